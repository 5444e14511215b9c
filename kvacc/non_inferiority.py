"""Is a drop beyond a margin, or within it? One-sided tests on paired items.

A drop is *baseline minus current*, so a loss is positive. Two questions are asked of the
same items, each with its own p-value:

``p_beyond``
    against "the drop is at most the margin": small values say that too much was lost;
``p_within``
    against "the drop is at least the margin": small values say that it is not inferior.

Neither may be small: then there are too few items to tell.

The test follows from the data. Zeros and ones of independent items: exact unconditional
tests up to :data:`~kvacc.statistics.EXACT_ITEMS` items (Hsueh, Liu and Chen, Biometrics 57, 2001, 478-483:
the tail of Tango's statistic, maximised over the unknown discordance), Tango's score test
above. Items that share a text: Student's t on clusters. Other values: a paired t. Of zeros
and ones ``p_beyond`` is also never below the exact p-value of "no difference at all"
(McNemar's, or sign flips of whole clusters), so that, where nothing changed, a failure is
as rare as promised whatever the number of items.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy

from kvacc.errors import KvaccError
from kvacc.exact_tests import cluster_sums, exact_tail, sign_flip_p
from kvacc.statistics import (
    EXACT_ITEMS,
    Array,
    _cluster_index,
    _is_binary,
    _numbers,
    _paired,
    clustered_stderr,
    design_effect,
    flips,
    items_needed,
    mean_stderr,
    minimum_detectable_drop,
    tango_statistic,
)


class DropTest(NamedTuple):
    """A drop on paired items against a margin, in the metric's unit."""

    drop: float
    """Baseline minus current; positive is a loss."""
    low: float | None
    """One-sided lower bound of the drop; None with too few independent items for any."""
    high: float | None
    """One-sided upper bound."""
    p_beyond: float
    """Chance of so large a drop if the true one were the margin (or 0, if that is rarer to fail)."""
    p_within: float
    """Chance of so small a drop if the true one were the margin."""
    method: str
    """``exact``, ``tango``, ``clustered t`` or ``paired t``."""
    items: int
    discordance: float
    """Share of items that differ."""
    design_effect: float
    """How many times fewer independent items these are worth; 1 without clusters."""
    needed: int | None
    """Items that would show that the drop is within the margin, if in truth nothing is lost."""
    smallest_p: float = 0.0
    """The smallest ``p_beyond`` that so many differing items (or clusters) could have had: all lost."""


class _Sample(NamedTuple):
    """Paired items, summed up as the tests need them."""

    drop: float
    stderr: float
    clusters: int
    """Independent units."""
    items: int
    lost: int
    gained: int
    binary: bool
    shares: bool
    """Values lie in [0, 1]."""
    independent: bool


def drop_test(
    baseline: Array,
    current: Array,
    clusters: Sequence | None = None,
    margin: float = 0.0,
    confidence: float = 0.95,
    shares: bool = True,
) -> DropTest:
    """Test a drop against a margin.

    Args:
        baseline: the items' scores before, [n].
        current: the same items' scores now, [n].
        clusters: a label per item, [n]; None or all different: independent items.
        margin: largest drop allowed, at least 0, in the metric's unit.
        confidence: of each one-sided bound.
        shares: the scores lie in [0, 1]; False for others, such as nats.

    Raises:
        KvaccError: no items, lengths that differ, or a margin or confidence out of range.
    """
    baseline, current = _paired(baseline, current)
    if not len(baseline):
        raise KvaccError("a drop needs at least one item")
    if not 0 <= margin < math.inf or not 0.5 < confidence < 1:
        raise KvaccError(
            f"margin {margin}, confidence {confidence}: give a margin of 0 or more and a confidence "
            "between 0.5 and 1, such as 0.95"
        )
    sample = _sample(baseline, current, clusters, shares)
    differs = float((baseline != current).mean())
    effect = _design_effect(baseline - current, clusters, sample)
    needed = _needed(sample, differs, margin, confidence, effect)
    if sample.clusters < 2 and not sample.independent or (not sample.binary and sample.items < 2):
        return DropTest(sample.drop, None, None, 1.0, 1.0, "none", sample.items, differs, effect, needed, 1.0)
    alpha = 1 - confidence
    beyond = functools.partial(_p_beyond, sample)
    within = functools.partial(_p_within, sample)
    p_beyond, smallest = beyond(margin), 0.0
    if sample.binary:
        sums = cluster_sums(baseline - current, clusters)
        p_beyond = max(p_beyond, sign_flip_p(sums))
        smallest = 0.5 ** int((sums != 0).sum())
    low_end, high_end = (
        (-1.0, 1.0) if shares else (sample.drop - _reach(sample), sample.drop + _reach(sample))
    )
    # Both p-values move one way with the margin, so a bound is where one of them crosses alpha.
    low = _crossing(beyond, alpha, low_end, sample.drop)
    high = _crossing(within, alpha, sample.drop, high_end)
    return DropTest(
        sample.drop,
        low,
        high,
        p_beyond,
        within(margin),
        _method(sample),
        sample.items,
        differs,
        effect,
        needed,
        smallest,
    )


def non_inferiority(
    baseline: Array,
    current: Array,
    margin: float,
    clusters: Sequence | None = None,
    confidence: float = 0.95,
) -> bool:
    """True when the items show, with the given one-sided confidence, a drop below the margin."""
    return drop_test(baseline, current, clusters, margin, confidence).p_within <= 1 - confidence


def mean_drop_test(
    parts: Sequence[tuple[Array, Array, Sequence | None]], margin: float = 0.0, confidence: float = 0.95
) -> DropTest:
    """Test the average drop of several tasks, each counting once, against a margin.

    The tasks' items are independent of one another, so the distances from drop to bound
    add up in squares (MOVER, Zou and Donner, Statistics in Medicine 27, 2008, 1693-1702).
    p-values take the standard error that those distances imply.

    Args:
        parts: baseline, current and clusters of each task, as for :func:`drop_test`.
        margin: largest average drop allowed.
        confidence: of each one-sided bound.
    """
    if not parts:
        raise KvaccError("an average drop needs at least one task")
    tests = [drop_test(*part, margin=margin, confidence=confidence) for part in parts]
    return combine(tests, margin, confidence)


def combine(tests: Sequence[DropTest], margin: float, confidence: float) -> DropTest:
    """The average of several tests' drops; see :func:`mean_drop_test`."""
    number, items = len(tests), sum(test.items for test in tests)
    drop = sum(test.drop for test in tests) / number
    differs = sum(test.discordance * test.items for test in tests) / items
    effect = sum(test.design_effect * test.items for test in tests) / items
    needed = items_needed(margin, min(differs, 1.0), confidence=confidence, design_effect=effect)
    if any(test.low is None for test in tests):
        return DropTest(drop, None, None, 1.0, 1.0, "none", items, differs, effect, needed, 1.0)
    below = math.sqrt(sum((test.drop - test.low) ** 2 for test in tests)) / number
    above = math.sqrt(sum((test.high - test.drop) ** 2 for test in tests)) / number
    from scipy.stats import norm

    z = float(norm.ppf(confidence))
    p_beyond = _normal_tail((drop - margin) * z, below)
    p_within = _normal_tail((margin - drop) * z, above)
    smallest = math.prod(test.smallest_p for test in tests)
    return DropTest(
        drop,
        drop - below,
        drop + above,
        p_beyond,
        p_within,
        "MOVER",
        items,
        differs,
        effect,
        needed,
        smallest,
    )


def unchanged_test(items: int) -> DropTest:
    """The test of items that came out the same to the last digit: there is no drop to estimate."""
    return DropTest(0.0, 0.0, 0.0, 1.0, 0.0, "unchanged", items, 0.0, 1.0, None, 1.0)


def mean_test(
    values: Array, limit: float, clusters: Sequence | None = None, confidence: float = 0.95
) -> DropTest:
    """Test a mean against a limit that it must not exceed, by (clustered) t; ``drop`` is the mean."""
    values = _numbers(values, "values")
    return drop_test(values, numpy.zeros(len(values)), clusters, limit, confidence, shares=False)


def two_sided_p(full: Array, strategy: Array, clusters: Sequence | None = None) -> tuple[float, str] | None:
    """Two-sided p-value of "no difference", and the test: exact for zeros and ones, else (clustered) t.

    None with fewer than two independent items whose values are not zeros and ones.
    """
    full, strategy = _paired(full, strategy)
    if not len(full):
        return None
    sample = _sample(full, strategy, clusters, shares=True)
    if sample.binary:
        p = sign_flip_p(cluster_sums(full - strategy, clusters), two_sided=True)
        return p, "exact McNemar" if sample.independent else "exact sign flips of clusters"
    if sample.clusters < 2:
        return None
    if sample.stderr == 0:
        return (1.0 if sample.drop == 0 else 0.0), _method(sample)
    from scipy.stats import t

    return float(2 * t.sf(abs(sample.drop) / sample.stderr, sample.clusters - 1)), _method(sample)


def detectable_drop(
    full: Array,
    strategy: Array,
    clusters: Sequence | None = None,
    confidence: float = 0.95,
    power: float = 0.8,
) -> float | None:
    """The smallest true drop that items like these would show, two-sided, in the metric's unit.

    From the discordance and the design effect seen (:func:`kvacc.statistics.minimum_detectable_drop`);
    where too few items differ for any drop to be seen, the smallest one that could be if all that
    differ were lost: of 100 items 7.7 points.

    Returns:
        None where nothing could be shown: fewer than 4 items, or a continuous score that never differs.
    """
    full, strategy = _paired(full, strategy)
    if not len(full):
        return None
    sample = _sample(full, strategy, clusters, shares=True)
    if not sample.binary:
        if not sample.stderr:
            return None
        from scipy.stats import norm

        return float((norm.ppf((1 + confidence) / 2) + norm.ppf(power)) * sample.stderr)
    effect = _design_effect(full - strategy, clusters, sample)
    seen = (sample.lost + sample.gained) / sample.items

    def smallest(discordance: float) -> float | None:
        return minimum_detectable_drop(sample.items, discordance, confidence, power, effect)

    if seen and (found := smallest(seen)) is not None:
        return found
    if smallest(1.0) is None:
        return None
    low, high = seen, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if smallest(middle) is None else (low, middle)
    return high


def _sample(
    baseline: numpy.ndarray, current: numpy.ndarray, clusters: Sequence | None, shares: bool
) -> _Sample:
    drops = baseline - current
    items = len(drops)
    number = items if clusters is None else _cluster_index(clusters, items)[0]
    binary = shares and _is_binary(baseline) and _is_binary(current)
    lost, gained = flips(baseline, current) if binary else (0, 0)
    stderr = mean_stderr(drops) if number == items else clustered_stderr(drops, clusters)
    return _Sample(
        float(drops.mean()), stderr or 0.0, number, items, lost, gained, binary, shares, number == items
    )


def _method(sample: _Sample) -> str:
    if not sample.independent:
        return "clustered t"
    if not sample.binary:
        return "paired t"
    return "exact" if sample.items <= EXACT_ITEMS else "tango"


def _p_beyond(sample: _Sample, margin: float) -> float:
    return _p(sample, margin, larger=True)


def _p_within(sample: _Sample, margin: float) -> float:
    return _p(sample, margin, larger=False)


def _p(sample: _Sample, margin: float, *, larger: bool) -> float:
    if sample.shares and abs(margin) >= 1:
        return float(sample.drop <= margin if larger else sample.drop >= margin)
    if sample.binary and sample.independent:
        return _p_binary(sample.lost, sample.gained, sample.items, margin, larger)
    sign = 1 if larger else -1
    by_t = _t_tail(sign * (sample.drop - margin), sample.stderr, sample.clusters - 1)
    if not sample.binary and not (sample.shares and sample.stderr == sample.drop == 0):
        return by_t
    lost, gained, items = sample.lost, sample.gained, sample.items
    if sample.stderr == 0 and not (lost and gained):
        # Every cluster went the same way, so one outcome per cluster is all that is known.
        lost, gained, items = sample.clusters * (lost > 0), sample.clusters * (gained > 0), sample.clusters
    # t has no width when nothing changed, so Tango's test has a say too.
    return max(by_t, _p_binary(lost, gained, items, margin, larger, exact=False))


@functools.lru_cache(maxsize=65536)
def _p_binary(lost: int, gained: int, items: int, margin: float, larger: bool, exact: bool = True) -> float:
    if exact and items <= EXACT_ITEMS:
        return exact_tail(lost, gained, items, margin, larger=larger)
    statistic = tango_statistic(lost, gained, items, -margin)  # of the difference: a loss is negative
    from scipy.special import ndtr

    return float(ndtr(statistic if larger else -statistic))


def _t_tail(distance: float, stderr: float, freedom: int) -> float:
    if stderr == 0:
        return 0.0 if distance > 0 else 1.0
    from scipy.special import stdtr

    return float(stdtr(freedom, -distance / stderr))


def _normal_tail(distance: float, half: float) -> float:
    from scipy.special import ndtr

    if half == 0:
        return 0.0 if distance > 0 else 1.0
    return float(ndtr(-distance / half))


def _crossing(p_value: Callable[[float], float], alpha: float, low: float, high: float) -> float:
    """Where the p-value crosses alpha between the two; the end nearest to it where it does not."""
    from scipy.optimize import brentq

    ends = p_value(low) - alpha, p_value(high) - alpha
    if ends[0] * ends[1] >= 0:
        return low if abs(ends[0]) < abs(ends[1]) else high
    return float(brentq(lambda margin: p_value(margin) - alpha, low, high, xtol=1e-7))


def _reach(sample: _Sample) -> float:
    """A distance beyond any bound that a t interval of this sample can have."""
    from scipy.special import stdtrit

    return float(stdtrit(sample.clusters - 1, 1 - 1e-9)) * sample.stderr


def _design_effect(drops: numpy.ndarray, clusters: Sequence | None, sample: _Sample) -> float:
    """Of the drops; where they show none, items of a cluster count as one."""
    if sample.independent:
        return 1.0
    return max(1.0, design_effect(drops, clusters) or sample.items / sample.clusters)


def _needed(sample: _Sample, differs: float, margin: float, confidence: float, effect: float) -> int | None:
    if margin <= 0:
        return None
    if sample.binary or (sample.shares and sample.stderr == 0):
        return items_needed(margin, differs, confidence=confidence, design_effect=effect)
    from scipy.stats import norm

    spread = sample.stderr**2 * sample.items  # of one item; the design effect is in it
    z = norm.ppf(confidence) + norm.ppf(0.8)
    return max(2, math.ceil((z / margin) ** 2 * spread))
