"""The numba kernels behind :mod:`kvacc.compiled_choice`; importing this needs numba.

Arrays have the shapes of :func:`~kvacc.select_strategy.highest` and
:func:`~kvacc.select_strategy.best_of_group`; ``out`` is written.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

BINS = 256
"""Intervals that the values of one query are counted in."""


@njit(inline="always")
def nth_highest(values, n, nth):
    """The ``nth`` highest (1 is the highest) of the first ``n`` values, which are reordered:
    Hoare's selection, with the middle of three as pivot."""
    target = nth - 1
    low, high = 0, n - 1
    while low < high:
        a, b, c = values[low], values[(low + high) // 2], values[high]
        pivot = max(min(a, b), min(max(a, b), c))
        i, j = low, high
        while i <= j:
            while values[i] > pivot:
                i += 1
            while values[j] < pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if target <= j:
            high = j
        elif target >= i:
            low = i
        else:
            break
    return values[target]


@njit(inline="always")
def narrow(values, n, nth, lowest, highest, bins):
    """Drop all but the values among which the ``nth`` highest is: those that fall into one of equal
    intervals from ``lowest`` to ``highest``. Returns how many are left, in front, and which of them
    it is."""
    spread = highest - lowest
    scale = np.float32((BINS - 1) / spread)
    if not (np.isfinite(spread) and np.isfinite(scale)):  # infinities among them, or all equal
        return n, nth
    bins[:] = 0
    for k in range(n):
        bins[np.int32((values[k] - lowest) * scale)] += 1
    place, rest = BINS - 1, nth
    while bins[place] < rest:
        rest -= bins[place]
        place -= 1
    left = 0
    for k in range(n):
        value = values[k]
        values[left] = value
        left += np.int32((value - lowest) * scale) == place
    return left, rest


@njit(parallel=True, cache=True)
def highest_kernel(scores, count, allowed, out):
    rows, heads, queries, width = scores.shape
    for job in prange(rows * heads * queries):
        b = job // (heads * queries)
        h = job // queries % heads
        i = job % queries
        wanted = count[b, h, i]
        if wanted <= 0:
            continue
        row, may, chosen = scores[b, h, i], allowed[b, h, i], out[b, h, i]
        values = np.empty(width + 1, dtype=np.float32)
        lowest, highest = np.float32(np.inf), np.float32(-np.inf)
        n = 0
        for w in range(width):
            values[n] = row[w]
            n += may[w]
            lowest = min(lowest, row[w] if may[w] else lowest)
            highest = max(highest, row[w] if may[w] else highest)
        if wanted >= n:
            chosen[:] = may
            continue
        left, rest = narrow(values, n, wanted, lowest, highest, np.empty(BINS, dtype=np.int32))
        last = nth_highest(values, left, rest)
        # What is above the last value is in; of those equal to it the first ones are.
        above, equal = 0, 0
        for w in range(width):
            above += may[w] & (row[w] > last)
            equal += may[w] & (row[w] == last)
        if above + equal == wanted:
            for w in range(width):
                chosen[w] = may[w] & (row[w] >= last)
            continue
        equal = wanted - above
        for w in range(width):
            if may[w] and row[w] >= last:
                if row[w] > last:
                    chosen[w] = True
                elif equal > 0:
                    chosen[w] = True
                    equal -= 1


@njit(parallel=True, cache=True)
def best_of_group_kernel(logits, candidates, out):
    rows, heads, queries, width = out.shape
    group = logits.shape[1] // heads
    shared = candidates.shape[1] == 1
    for job in prange(rows * heads * queries):
        b = job // (heads * queries)
        h = job // queries % heads
        i = job % queries
        allowed = candidates[b, 0 if shared else h, i]
        best = out[b, h, i]
        best[:] = -np.inf
        for g in range(group):
            row = logits[b, h * group + g, i]
            top = np.float32(-np.inf)
            for w in range(width):
                if allowed[w] and row[w] > top:
                    top = row[w]
            if top == -np.inf:
                continue
            for w in range(width):
                if allowed[w]:
                    best[w] = max(best[w], row[w] - top)


@njit(parallel=True, cache=True)
def count_true_kernel(mask, out):
    for row in prange(mask.shape[0]):
        total = np.int32(0)
        for w in range(mask.shape[1]):
            total += mask[row, w]
        out[row] = total
