"""Exact tests of paired zeros and ones: whole distributions, no approximation.

``sign_flip_p`` asks whether there is a difference at all, and knows clusters. ``exact_tail`` asks
whether a drop is beyond a margin, of a small number of independent items.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy

from kvacc.statistics import _cluster_index

_NUISANCE_STEPS = 60


def sign_flip_p(sums: Sequence[int], two_sided: bool = False) -> float:
    """Exact p-value of "no difference" from whole-number drops of independent units.

    Without a difference a unit's drop is as likely as its opposite. The chance of a total as
    large as the one seen is counted over all signs, by adding one unit after another to the
    distribution of the total. With units of one item this is McNemar's exact test.
    """
    sizes = [abs(int(size)) for size in sums if size]
    observed = int(sum(sums))
    if not sizes:
        return 1.0
    if max(sizes) == 1:
        from scipy.stats import binom

        extreme = abs(observed) if two_sided else observed
        tail = float(binom.sf((len(sizes) + extreme) // 2 - 1, len(sizes), 0.5))
        return min(1.0, 2 * tail) if two_sided else tail
    reach = sum(sizes)
    chance = numpy.zeros(2 * reach + 1)
    chance[reach] = 1.0
    for size in sizes:
        chance = (numpy.roll(chance, size) + numpy.roll(chance, -size)) / 2
    totals = numpy.arange(-reach, reach + 1)
    seen = numpy.abs(totals) >= abs(observed) if two_sided else totals >= observed
    return min(1.0, float(chance[seen].sum()))


def cluster_sums(drops: numpy.ndarray, clusters: Sequence | None) -> numpy.ndarray:
    """The total of each cluster; of items without clusters, themselves."""
    if clusters is None:
        return drops
    number, index = _cluster_index(clusters, len(drops))
    return numpy.rint(numpy.bincount(index, weights=drops, minlength=number))


def exact_tail(lost: int, gained: int, items: int, margin: float, *, larger: bool) -> float:
    """Chance of a drop as large (or as small) as seen if the true drop is ``margin``.

    Outcomes are ordered by Tango's statistic; the chance is the largest over the unknown
    share of items that gain, on a grid (Hsueh, Liu and Chen 2001, section 3).
    """
    outcomes = _outcomes(items)
    b, c = outcomes.T
    statistic = _tango_drop_statistics(b, c, items, margin)
    seen = float(_tango_drop_statistics(numpy.array([lost]), numpy.array([gained]), items, margin)[0])
    tolerance = 1e-9 * max(1.0, abs(seen)) if math.isfinite(seen) else 0.0
    extreme = statistic >= seen - tolerance if larger else statistic <= seen + tolerance
    # lost share = gained share + margin, and both with the rest add up to 1.
    low, high = max(0.0, -margin), (1 - margin) / 2
    gaining = numpy.linspace(low, high, _NUISANCE_STEPS)
    shares = numpy.stack([gaining + margin, gaining, 1 - 2 * gaining - margin])
    logs = _counts(items)[extreme] @ numpy.log(numpy.maximum(shares, 1e-300))
    tail = numpy.exp(logs + _ways(items)[extreme, None]).sum(0)
    return min(1.0, float(tail.max()))


@functools.lru_cache(maxsize=8)
def _outcomes(items: int) -> numpy.ndarray:
    """Every (lost, gained) of so many items, int [outcomes, 2]."""
    lost, gained = numpy.meshgrid(numpy.arange(items + 1), numpy.arange(items + 1), indexing="ij")
    possible = lost + gained <= items
    return numpy.stack([lost[possible], gained[possible]], axis=1)


def _tango_drop_statistics(
    lost: numpy.ndarray, gained: numpy.ndarray, items: int, margin: float
) -> numpy.ndarray:
    """Tango's statistic of the drop against ``margin`` for many outcomes, larger for larger drops."""
    d = -margin
    gap = lost - gained - items * margin
    a = 2 * items
    b = -gained - lost + (2 * items - gained + lost) * d
    c = -lost * d * (1 - d)
    share_lost = (numpy.sqrt(numpy.maximum(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    variance = items * (2 * share_lost + d * (1 - d))
    safe = numpy.where(variance > 1e-12, variance, 1.0)
    certain = numpy.where(numpy.abs(gap) > 1e-9, numpy.copysign(numpy.inf, gap), 0.0)
    return numpy.where(variance > 1e-12, gap / numpy.sqrt(safe), certain)


@functools.lru_cache(maxsize=8)
def _counts(items: int) -> numpy.ndarray:
    """Items lost, gained and unchanged of every outcome, float [outcomes, 3]."""
    outcomes = _outcomes(items)
    return numpy.column_stack([outcomes, items - outcomes.sum(1)]).astype(numpy.float64)


@functools.lru_cache(maxsize=8)
def _ways(items: int) -> numpy.ndarray:
    """Logarithm of the number of ways to each outcome, [outcomes]."""
    from scipy.special import gammaln

    return gammaln(items + 1) - gammaln(_counts(items) + 1).sum(1)
