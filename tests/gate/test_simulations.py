"""How often the whole gate fails, and passes, when the truth is known: 2,000 simulated runs each.

Seeds are fixed, so these are numbers, not chances. docs/ci.md has a table of them.
"""

from __future__ import annotations

import pytest
from gate.simulated import clustered, independent, pair, share, verdicts

from kvacc.gate.verdicts import Limits, Verdict

RUNS = 2000
DEFAULT = Limits()
# The gate is the more eager the smaller the margin: at nearly none it fails on any significant drop.
NO_MARGIN = Limits(margin=1e-6)


def one_of(cells, items, drop, discordance=0.1):
    """A gate of several cells, of which the first has lost something."""

    def pairs(random):
        return [
            pair(independent(random, items, discordance, drop if index == 0 else 0.0), task=f"task {index}")
            for index in range(cells)
        ]

    return pairs


def haystacks(tasks, number, questions, drop=0.0):
    """Retention tasks whose questions about one haystack flip together, and their average."""

    def pairs(random):
        return [
            pair(clustered(random, number, questions, 0.2, drop), task=f"task {index}", kind="retention")
            for index in range(tasks)
        ]

    return pairs


@pytest.mark.parametrize(
    ("pairs", "limits"),
    [
        (one_of(1, 1000, 0.0), DEFAULT),
        (one_of(1, 1000, 0.0), NO_MARGIN),
        (one_of(4, 120, 0.0), NO_MARGIN),
        (one_of(12, 150, 0.0, discordance=0.02), NO_MARGIN),
        (haystacks(2, 40, 5), DEFAULT),
        (haystacks(2, 40, 5), NO_MARGIN),
        (haystacks(1, 12, 4), NO_MARGIN),
    ],
    ids=[
        "one",
        "one, no margin",
        "four, no margin",
        "twelve with few changes, no margin",
        "clustered",
        "clustered, no margin",
        "few clusters, no margin",
    ],
)
def test_without_a_difference_the_gate_fails_at_most_one_time_in_twenty(pairs, limits):
    """Clustered: two retention tasks and their average."""
    assert share(verdicts(pairs, limits, RUNS), Verdict.FAIL) <= 0.05


@pytest.mark.parametrize("cells", [1, 3])
def test_a_drop_of_five_points_on_a_thousand_items_fails(cells):
    """10 % discordance, default margin; asked for is 80 %."""
    found = verdicts(one_of(cells, 1000, 0.05), DEFAULT, RUNS // cells)
    assert share(found, Verdict.FAIL) >= 0.95
    assert share(found, Verdict.PASS) == 0


@pytest.mark.parametrize(
    ("pairs", "limits"),
    [
        (one_of(1, 1000, 0.01), DEFAULT),
        (lambda random: [pair(clustered(random, 40, 5, 0.2, 0.05))], Limits(margin=0.05)),
    ],
    ids=["independent", "clustered"],
)
def test_a_drop_of_just_the_margin_is_neither_failed_nor_passed_too_often(pairs, limits):
    """Both errors have 5 % there; 2,000 runs are known to within 1 point."""
    found = verdicts(pairs, limits, RUNS)
    assert share(found, Verdict.FAIL) <= 0.06
    assert share(found, Verdict.PASS) <= 0.06


def test_unclustered_tests_would_be_too_eager():
    """Why clusters matter: the same runs, judged as if every question were independent."""

    def pairs(random):
        before, now, _ = clustered(random, 40, 5, 0.2, 0.0)
        return [pair((before, now, None))]

    assert share(verdicts(pairs, NO_MARGIN, RUNS // 4), Verdict.FAIL) > 0.1


def test_enough_items_pass():
    """7,000 items, 10 % discordance and nothing lost: 6,183 give a power of 80 %."""
    found = verdicts(lambda random: [pair(independent(random, 7000, 0.1, 0.0))], DEFAULT, 300)
    assert share(found, Verdict.PASS) >= 0.78
    assert share(found, Verdict.FAIL) == 0
