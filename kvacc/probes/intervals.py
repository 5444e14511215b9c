"""Medians of repeated timings, with intervals by bootstrap over the repeats.

Tokens of one run are not independent (a busy moment of the machine slows many of them), so
whole runs are drawn, never single tokens. The interval is the percentile bootstrap's (Efron
and Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3). Of up to five runs it
is their range, whose coverage of the median is ``1 - 2 / 2**runs`` at most: 94 % of five.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy

from kvacc.probes.records import Distribution

RESAMPLES = 2000
CONFIDENCE = 0.95
_BLOCK = 2_000_000
"""Numbers drawn at once, so that long runs need little memory."""


class Ratio(NamedTuple):
    """A strategy's time over that of ``full``, run by run."""

    value: float
    low: float
    high: float

    @property
    def spans_one(self) -> bool:
        """True when the interval does not exclude "equally fast"."""
        return self.low <= 1 <= self.high


def distribution(runs: Sequence[Sequence[float]], seed: int = 0) -> Distribution:
    """Median, tail and interval of timings.

    Args:
        runs: one list for each run, all equally long: [R, T].
        seed: of the bootstrap.
    """
    values = numpy.asarray(runs, dtype=numpy.float64)
    low, high = _interval(values, seed)
    pooled = values.ravel()
    return Distribution(
        median=float(numpy.median(pooled)),
        low=low,
        high=high,
        p95=float(numpy.quantile(pooled, 0.95)),
        p99=float(numpy.quantile(pooled, 0.99)),
        count=pooled.size,
        values=pooled.tolist(),
    )


def paired_ratio(
    strategy: Sequence[Sequence[float]], full: Sequence[Sequence[float]], seed: int = 0
) -> Ratio | None:
    """How many times as long a strategy takes as ``full``: the median of run r over the median of
    ``full``'s run r, of which the median over runs and its interval are taken.

    None where the runs cannot be paired, because their numbers differ, or a time is 0.
    """
    one, other = (numpy.median(numpy.asarray(runs, numpy.float64), axis=1) for runs in (strategy, full))
    if one.shape != other.shape or not (other > 0).all():
        return None
    ratios = one / other
    return Ratio(float(numpy.median(ratios)), *_interval(ratios[:, None], seed))


def _interval(values: numpy.ndarray, seed: int) -> tuple[float, float]:
    """Of the median of all values [R, T], by drawing runs."""
    runs, size = values.shape
    draw = numpy.random.default_rng(seed)
    chosen = draw.integers(runs, size=(RESAMPLES, runs))
    block = max(1, _BLOCK // (runs * size))
    medians = numpy.concatenate(
        [
            numpy.median(values[chosen[start : start + block]].reshape(-1, runs * size), axis=1)
            for start in range(0, RESAMPLES, block)
        ]
    )
    tail = (1 - CONFIDENCE) / 2
    # An end is one of the medians drawn, so that a few runs give no number that none of them has.
    low = numpy.quantile(medians, tail, method="lower")
    high = numpy.quantile(medians, 1 - tail, method="higher")
    return float(low), float(high)
