"""Each deliberate mistake is caught, and by the invariant that it breaks."""

from __future__ import annotations

import pytest
from verify import mutants
from verify.mutants import Accumulated

from kvacc.verify import Report, tiny_subject, verify_strategy

IN_STRATEGIES = {
    "reads the length of the text": (mutants.ReadsTheLength, (2, 5, 9, 3)),
    "evicts sinks": (mutants.EvictsSinks, (4,)),
    "budget exceeded by one": (mutants.OneTooMany, (4,)),
    "state kept between requests": (mutants.KeepsState, (6,)),
    "half-precision scores": (mutants.HalfPrecisionScores, (9,)),
    "ties to the higher position": (mutants.KeepsTheLater, (9,)),
    "forgets the first token": (mutants.ForgetsTheFirst, (4, 1)),
}
"""mistake -> (strategy, failing invariants, the most telling first)"""

IN_ENGINE = {
    "reads future queries": (mutants.reads_future_queries, (2, 6, 5, 3)),
    "off-by-one position after eviction": (mutants.off_by_one_position, (7, 5, 3)),
    "cache counts entries": (mutants.cache_counts_entries, (7,)),
    "padding counted as tokens": (mutants.padding_counts_as_tokens, (5,)),
    "per-query-head storage": (mutants.stores_per_query_head, (8, 9, 3)),
    "reports nothing hidden": (mutants.reports_nothing_hidden, (10,)),
    "leaves a hook": (mutants.leaves_a_hook, (6,)),
    "frees nothing": (mutants.frees_nothing, (4,)),
}
"""mistake -> (change of the engine, failing invariants, the most telling first)"""


def verify(strategy) -> Report:
    # Grouped queries, rotary positions: every mistake can show there.
    return verify_strategy(strategy, [tiny_subject("llama")], thorough=False)


def of(report: Report, invariant: int):
    return next(result.failure for result in report.failures if result.invariant == invariant)


def test_without_a_mistake_everything_holds():
    report = verify(Accumulated())
    assert report.failing == () and report.acted
    assert all(result.status == "holds" and result.cases > 0 for result in report.results)


@pytest.mark.parametrize("mistake", IN_STRATEGIES)
def test_mistakes_of_a_strategy(mistake):
    mutants.KeepsState.learned.clear()
    strategy, expected = IN_STRATEGIES[mistake]
    report = verify(strategy())
    assert report.failing == expected
    for result in report.failures:
        assert result.failure.expected != result.failure.found


@pytest.mark.parametrize("mistake", IN_ENGINE)
def test_mistakes_of_an_engine(mistake, monkeypatch):
    change, expected = IN_ENGINE[mistake]
    change(monkeypatch)
    report = verify(Accumulated())
    assert report.failing == expected
    for result in report.failures:
        assert result.failure.expected != result.failure.found


def test_the_smallest_case_names_its_place_and_both_values():
    failure = of(verify(mutants.OneTooMany()), 4)
    # The short text, its budget of three, and the first query that can read five entries.
    assert (failure.model, failure.protocol, failure.budget, failure.tokens) == (
        "tiny llama",
        "stream",
        "3",
        8,
    )
    assert (failure.layer, failure.head, failure.position) == (0, 0, 4)
    assert failure.expected == "at most 3 kept, 1 new" and failure.found == "0-4 (5)"
    text = str(failure)
    assert "layer 0, KV head 0, position 4" in text and "0-4 (5)" in text


def test_an_exception_of_the_strategy_is_a_failure_with_its_place():
    report = verify_strategy(mutants.Raises(), [tiny_subject("llama")])
    assert set(report.failing) == set(range(1, 11))
    failure = report.failures[0].failure
    assert failure.found.startswith("RuntimeError: ") and ".py:" in failure.why


@pytest.mark.slow
def test_a_failure_on_a_longer_text_is_looked_for_on_a_short_one():
    # Only the first of several models tries a short text at once.
    report = verify_strategy(
        mutants.OneTooMany(), [tiny_subject("llama"), tiny_subject("opt")], thorough=False
    )
    (result,) = report.failures
    assert result.failing_models == ("tiny llama", "tiny opt")
    assert result.failure.tokens == 8
