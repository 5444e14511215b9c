"""Statistics of accuracy comparisons: small pure functions with their assumptions in words.

Differences are always *strategy minus full*, so a loss is negative, in the metric's
unit (accuracy: -0.021 is 2.1 points lost). Items are paired: index i of both arrays
is the same document. Items that share a passage or haystack share a cluster; then
the plain formulas are too sure of themselves (McNemar's exact test rejects a true
null 17 % of the time at 5 %, with five questions per haystack), so every function
that can takes ``clusters``.

Whether a drop stays within a margin is asked in :mod:`kvacc.non_inferiority`.

Sources: Miller, "Adding error bars to evals" (arXiv:2411.00640) for clustered
standard errors and paired differences; Tango (Statistics in Medicine 17, 1998,
891-908) for the score interval of a paired difference; Connor (Biometrics 43, 1987,
207-211) for the sample size of McNemar's test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy

from kvacc.errors import KvaccError

EXACT_ITEMS = 100
"""Up to so many independent items exact tests are used; they cost some milliseconds there."""

Array = Sequence[float] | numpy.ndarray


class Flips(NamedTuple):
    """Items whose correctness differs between ``full`` and the strategy."""

    lost: int
    """Right under full, wrong under the strategy."""
    gained: int
    """Wrong under full, right under the strategy."""


class Difference(NamedTuple):
    """Strategy minus full on the same items, with an interval."""

    value: float
    """Average difference; negative is a loss."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""
    method: str
    """``tango``, ``clustered t`` or ``paired t``."""

    @property
    def spans_zero(self) -> bool:
        """True when the interval does not exclude "no difference"."""
        return self.low <= 0 <= self.high


def proportion_stderr(successes: int, items: int) -> float | None:
    """Standard error of a share: sqrt(p (1 - p) / (n - 1)), as lm-eval computes it.

    The same number as :func:`mean_stderr` of the zeros and ones. None when n < 2,
    where no spread can be seen.
    """
    if not 0 <= successes <= items:
        raise KvaccError(f"{successes} successes of {items} items is impossible; give 0 to {items}")
    if items < 2:
        return None
    share = successes / items
    return math.sqrt(share * (1 - share) / (items - 1))


def mean_stderr(values: Array) -> float | None:
    """Standard error of a mean: s / sqrt(n), with s the sample deviation (n - 1).

    None when n < 2. Exactly 0 only when all values are equal.
    """
    values = _numbers(values, "values")
    if len(values) < 2:
        return None
    if (values == values[0]).all():
        return 0.0
    return float(values.std(ddof=1) / math.sqrt(len(values)))


def clustered_stderr(values: Array, clusters: Sequence) -> float | None:
    """Standard error of a mean whose items come in clusters.

    sqrt( C/(C-1) * sum_c ( sum_{i in c} (x_i - mean) )^2 ) / n, with C clusters: the
    sandwich estimate of Miller 2024, equation 4, with the finite-cluster correction.
    With one item per cluster it equals :func:`mean_stderr`. None when C < 2.
    """
    values = _numbers(values, "values")
    number, index = _cluster_index(clusters, len(values))
    if number < 2:
        return None
    if number == len(values):
        return mean_stderr(values)
    if (values == values[0]).all():
        return 0.0
    sums = numpy.bincount(index, weights=values - values.mean(), minlength=number)
    return float(math.sqrt(number / (number - 1) * (sums**2).sum()) / len(values))


def items_stderr(values: Array, clusters: Sequence) -> float | None:
    """Standard error of a mean of items that may share clusters: :func:`clustered_stderr`, or
    :func:`mean_stderr` where that one sees no spread although there is some (a single
    cluster, or errors that cancel within every cluster, as of a model that answers "yes"
    to a passage's yes and no question). Zero only when all values are equal."""
    return clustered_stderr(values, clusters) or mean_stderr(values)


def flips(full: Array, strategy: Array) -> Flips:
    """Items lost and gained, from two arrays of zeros and ones.

    Raises:
        KvaccError: lengths differ, or a value is neither 0 nor 1.
    """
    full, strategy = _paired(full, strategy)
    if not (_is_binary(full) and _is_binary(strategy)):
        raise KvaccError("flips are defined for items scored 0 or 1; this metric has other values")
    return Flips(int(((full == 1) & (strategy == 0)).sum()), int(((full == 0) & (strategy == 1)).sum()))


def mcnemar_exact(lost: int, gained: int) -> float:
    """Two-sided p-value of McNemar's exact test: Binomial(lost + gained, 1/2).

    Assumes independent items: do not use it when items share a context. 1.0 when no
    item differs.
    """
    if lost < 0 or gained < 0:
        raise KvaccError(f"flips ({lost}, {gained}) cannot be negative")
    if lost + gained == 0:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(gained, lost + gained, 0.5).pvalue)


def mcnemar_mid_p(lost: int, gained: int) -> float:
    """Two-sided mid-p value of McNemar's test: the exact one less the chance of the outcome seen.

    Less conservative than :func:`mcnemar_exact` (.049 instead of .032 at a nominal .05, 200
    items and 10 % discordance), at the price of not being guaranteed (Fagerland, Lydersen and
    Laake, BMC Medical Research Methodology 13:91, 2013). Assumes independent items.
    """
    exact = mcnemar_exact(lost, gained)
    if lost + gained == 0:
        return 1.0
    from scipy.stats import binom

    return float(exact - binom.pmf(lost, lost + gained, 0.5))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm 1979), in the order given.

    Rejecting what is at most alpha keeps the chance of any false rejection, of however many
    tests and however they depend on each other, at most alpha.
    """
    number = len(p_values)
    if any(not 0 <= p <= 1 for p in p_values):
        raise KvaccError(f"p-values must lie between 0 and 1, not {list(p_values)}")
    adjusted, highest = [0.0] * number, 0.0
    for rank, index in enumerate(sorted(range(number), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (number - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def holm_of_discrete(
    p_values: Sequence[float], smallest: Sequence[float], alpha: float = 0.05
) -> list[float]:
    """Holm's adjusted p-values, over those tests only that could have rejected at all.

    An exact test of 3 items that differ cannot have a p-value below 1/8, whatever way they go.
    How many differ says nothing about which way, so the tests that cannot reject may be left
    out by it, and the others need no correction for them (the idea of Tarone, Biometrics 46,
    1990, 515-522). Of what came out unchanged nothing differs.

    Args:
        p_values: of the tests.
        smallest: the smallest p-value that each could have had; 0 where there is no such limit.
        alpha: level at which the adjusted values are going to be read.

    Returns:
        Adjusted p-values, 1.0 for a test that does not count.
    """
    if len(p_values) != len(smallest):
        raise KvaccError(f"{len(p_values)} p-values, but {len(smallest)} smallest ones; give one for each")
    counted = [index for index, least in enumerate(smallest) if least <= alpha]
    adjusted = [1.0] * len(p_values)
    for index, p in zip(counted, holm([p_values[index] for index in counted]), strict=True):
        adjusted[index] = p
    return adjusted


def items_needed(
    margin: float,
    discordance: float,
    drop: float = 0.0,
    confidence: float = 0.95,
    power: float = 0.8,
    design_effect: float = 1.0,
) -> int | None:
    """Paired items that would show, one-sided, that a drop stays within the margin.

    ``n = ((z_a + z_b) sqrt(p - d^2) / (margin - d))^2`` (Connor 1987, for non-inferiority),
    with p the discordance and d the true drop; and never fewer than are needed where nothing
    flips at all: ``z_a^2 (1 - margin) / margin`` by Tango's bound, or the n from which
    ``(1 - margin)^n <= 1 - confidence`` where that few items get the exact test.

    Args:
        margin: largest drop allowed, in the metric's unit (0.01 is a point).
        discordance: share of items whose correctness differs, in [0, 1].
        drop: the true drop that is assumed; 0: nothing is lost.
        confidence: of the one-sided bound.
        power: chance of showing it.
        design_effect: 1 + (k - 1) ICC for clusters of k items; multiplies the items.

    Returns:
        A number of items, or None where none would do (``drop >= margin``).
    """
    if not 0 <= discordance <= 1 or abs(drop) > 1 or design_effect <= 0:
        raise KvaccError(
            f"discordance {discordance}, drop {drop}, design effect {design_effect}: give shares up to 1 "
            "and a positive design effect"
        )
    if drop >= margin:
        return None
    z_alpha, z_beta = _normal_quantile(2 * confidence - 1), _normal_quantile(2 * power - 1)
    spread = max(discordance - drop**2, 0.0)
    wanted = ((z_alpha + z_beta) / (margin - drop)) ** 2 * spread
    least = 0.0
    if 0 < margin < 1:
        exact = math.log(1 - confidence) / math.log(1 - margin)
        tango = z_alpha**2 * (1 - margin) / margin
        least = tango if tango > EXACT_ITEMS else min(exact, max(tango, EXACT_ITEMS + 1))
    return max(1, math.ceil(max(wanted, least) * design_effect))


def tango_interval(lost: int, gained: int, items: int, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval of a paired difference of shares, (gained - lost) / items.

    The ends are the differences d at which the score statistic
    ``(gained - lost - n d) / sqrt(n (2 q + d (1 - d)))`` reaches -z and +z, where q,
    the share of lost items, is its maximum-likelihood estimate given d:
    ``q = (sqrt(B^2 - 4 A C) - B) / (2 A)`` with ``A = 2 n``,
    ``B = -gained - lost + (2 n - gained + lost) d`` and ``C = -lost d (1 - d)``
    (Tango 1998, with d = gained share - lost share). Keeps its coverage for small
    samples and for no discordant item at all, where the Wald interval has width 0.

    Returns:
        lower and upper end, both in [-1, 1].
    """
    if lost < 0 or gained < 0 or items < 1 or lost + gained > items:
        raise KvaccError(f"flips ({lost}, {gained}) of {items} items is impossible")
    critical = _normal_quantile(confidence)
    estimate = (gained - lost) / items
    low = (
        -1.0
        if estimate == -1
        else _bisect(lambda d: tango_statistic(lost, gained, items, d) - critical, -1.0, estimate)
    )
    high = (
        1.0
        if estimate == 1
        else _bisect(lambda d: tango_statistic(lost, gained, items, d) + critical, estimate, 1.0)
    )
    return low, high


def tango_statistic(lost: int, gained: int, items: int, difference: float) -> float:
    """Tango's score statistic for H0: true difference = ``difference``; standard normal under it."""
    gap = gained - lost - items * difference
    a = 2 * items
    b = -gained - lost + (2 * items - gained + lost) * difference
    c = -lost * difference * (1 - difference)
    share_lost = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    variance = items * (2 * share_lost + difference * (1 - difference))
    if variance <= 0:
        return math.copysign(math.inf, gap) if gap else 0.0
    return gap / math.sqrt(variance)


def paired_difference(
    full: Array, strategy: Array, clusters: Sequence | None = None, confidence: float = 0.95
) -> Difference | None:
    """Strategy minus full on the same items, with an interval of the given confidence.

    The method follows from the data: items that share clusters get the clustered
    standard error with Student's t at C - 1 degrees of freedom; unclustered zeros and
    ones get Tango's score interval; anything else a paired t at n - 1. For clustered
    zeros and ones the interval is never narrower than Tango's (taken on clusters when
    no cluster differs from another), because t has width 0 when nothing flipped.

    Args:
        full: scores of the items under full, [n].
        strategy: scores of the same items under the strategy, [n].
        clusters: a label per item, [n]; None or all different: independent items.

    Returns:
        None when there is no item, or too few (two items or two clusters are the
        least for a t interval) to show any spread.
    """
    full, strategy = _paired(full, strategy)
    items = len(full)
    if items == 0:
        return None
    differences = strategy - full
    value = float(differences.mean())
    number = items if clusters is None else _cluster_index(clusters, items)[0]
    binary = _is_binary(full) and _is_binary(strategy)
    if number == items and binary:
        return Difference(value, *tango_interval(*flips(full, strategy), items, confidence), "tango")
    if number < 2:
        return None
    if number < items:
        stderr, method = clustered_stderr(differences, clusters), "clustered t"
    else:
        stderr, method = mean_stderr(differences), "paired t"
    from scipy.stats import t

    half = float(t.ppf((1 + confidence) / 2, number - 1)) * stderr
    low, high = value - half, value + half
    if binary:
        lost, gained = flips(full, strategy)
        if stderr == 0 and not (lost and gained):
            # Every item went the same way, so one outcome per cluster is all that is known.
            lost, gained, items = number * (lost > 0), number * (gained > 0), number
        tango_low, tango_high = tango_interval(lost, gained, items, confidence)
        low, high = min(low, tango_low), max(high, tango_high)
    return Difference(value, low, high, method)


def minimum_detectable_drop(
    items: int, discordance: float, confidence: float = 0.95, power: float = 0.8, design_effect: float = 1.0
) -> float | None:
    """The smallest true drop that this many items would show, two-sided.

    Solves Connor's formula ``n = ((z_a sqrt(p) + z_b sqrt(p - d^2)) / d)^2`` for the
    drop d, with p the discordance (share of items whose correctness differs).

    Args:
        items: number of paired items.
        discordance: in (0, 1].
        design_effect: 1 + (k - 1) ICC for clusters of k items; divides the items.

    Returns:
        A drop in (0, discordance], or None when even a drop of all discordant items
        would not be detected.
    """
    if items < 1 or not 0 < discordance <= 1 or design_effect <= 0:
        raise KvaccError(
            f"items {items}, discordance {discordance}, design effect {design_effect}: "
            "give at least 1 item, a discordance in (0, 1] and a positive design effect"
        )
    z_alpha, z_beta = _normal_quantile(confidence), _normal_quantile(2 * power - 1)

    def excess(drop: float) -> float:
        spread = z_alpha * math.sqrt(discordance) + z_beta * math.sqrt(max(discordance - drop**2, 0.0))
        return math.sqrt(items / design_effect) * drop - spread

    if excess(discordance) < 0:
        return None
    return _bisect(lambda drop: -excess(drop), 0.0, discordance)


def is_at_chance(score: float, stderr: float | None, chance: float | None) -> bool:
    """True when ``score <= chance + 2 stderr``: it cannot be told from guessing.

    A baseline at chance makes every comparison with it uninterpretable. False when
    chance is unknown; an unknown standard error counts as 0.
    """
    return chance is not None and score <= chance + 2 * (stderr or 0.0)


def design_effect(values: Array, clusters: Sequence) -> float | None:
    """Clustered over plain variance of the mean: how many times too sure the plain one is."""
    plain, clustered = mean_stderr(values), clustered_stderr(values, clusters)
    if not plain or clustered is None:
        return None
    return (clustered / plain) ** 2


def _bisect(falling, low: float, high: float) -> float:
    """Root of a falling function that is >= 0 at ``low`` and <= 0 at ``high``."""
    for _ in range(80):
        middle = (low + high) / 2
        if falling(middle) > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _normal_quantile(confidence: float) -> float:
    """z with P(|Z| <= z) = confidence; 1.96 for 0.95."""
    if not 0 < confidence < 1:
        raise KvaccError(f"confidence {confidence} is not in (0, 1); 0.95 is usual")
    from statistics import NormalDist

    return NormalDist().inv_cdf((1 + confidence) / 2)


def _numbers(values: Array, what: str) -> numpy.ndarray:
    array = numpy.asarray(values, dtype=numpy.float64)
    if array.ndim != 1 or not numpy.isfinite(array).all():
        raise KvaccError(f"{what} must be a flat list of finite numbers")
    return array


def _paired(full: Array, strategy: Array) -> tuple[numpy.ndarray, numpy.ndarray]:
    full, strategy = _numbers(full, "full's scores"), _numbers(strategy, "the strategy's scores")
    if len(full) != len(strategy):
        raise KvaccError(f"cannot pair {len(full)} items of full with {len(strategy)} of the strategy")
    return full, strategy


def _cluster_index(clusters: Sequence, items: int) -> tuple[int, numpy.ndarray]:
    if len(clusters) != items:
        raise KvaccError(f"{len(clusters)} cluster labels for {items} items; give one per item")
    seen: dict = {}
    index = numpy.array([seen.setdefault(label, len(seen)) for label in clusters], dtype=numpy.int64)
    return len(seen), index


def _is_binary(values: numpy.ndarray) -> bool:
    return bool(numpy.isin(values, (0.0, 1.0)).all())
