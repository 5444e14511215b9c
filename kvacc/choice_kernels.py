"""The numba kernels behind :mod:`kvacc.compiled_choice`; importing this needs numba.

Arrays have the shapes of :func:`~kvacc.select_strategy.highest` and
:func:`~kvacc.select_strategy.best_of_group`; ``out`` is written.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange


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
        values = np.empty(width, dtype=np.float32)
        n = 0
        for w in range(width):
            if allowed[b, h, i, w]:
                values[n] = scores[b, h, i, w]
                n += 1
        if wanted >= n:
            out[b, h, i] = allowed[b, h, i]
            continue
        last = nth_highest(values, n, wanted)
        # What is above the last value is in; of those equal to it the first ones are.
        equal = wanted
        for k in range(n):
            if values[k] > last:
                equal -= 1
        for w in range(width):
            if allowed[b, h, i, w]:
                value = scores[b, h, i, w]
                if value > last:
                    out[b, h, i, w] = True
                elif value == last and equal > 0:
                    out[b, h, i, w] = True
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
