"""numba kernels behind :mod:`kvacc.engine.compiled`; importing this needs numba.

One job per row and KV head. ``kept`` lists the columns of the kept set in text order.
Arrays are those of :class:`~kvacc.engine.plan.Plan` and
:class:`~kvacc.engine.scan.Scan`; ``end_alive`` and ``end_score`` [B, S, H, W] hold the
state at the end of each segment.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange


@njit(inline="always")
def enter(b, h, t, s, start, parent, alive, score, alive0, score0, end_alive, end_score, kept):
    """At a segment's first token take the parent's state; list the kept columns."""
    if t == start[b, s]:
        up = parent[b, s]
        if up < 0:
            alive[b, h] = alive0[b, h]
            score[b, h] = score0[b, h]
        else:
            alive[b, h] = end_alive[b, up, h]
            score[b, h] = end_score[b, up, h]
    n = 0
    for c in range(alive.shape[2]):
        if alive[b, h, c]:
            kept[n] = c
            n += 1
    return n


@njit(inline="always")
def shrink(b, h, n, limit, recent, sinks, seen, position, alive, score, kept):
    """Evict the worst kept entries until ``limit`` are left; of equal ones the
    later position goes. ``kept`` stays in text order."""
    while n > limit:
        worst = -1
        lowest = np.inf
        for k in range(n):
            place = position[b, h, kept[k]]
            if place < sinks or place >= seen - recent:
                continue
            value = score[b, h, kept[k]]
            if value <= lowest:
                lowest = value
                worst = k
        if worst < 0:
            worst = n - 1
        alive[b, h, kept[worst]] = False
        for k in range(worst, n - 1):
            kept[k] = kept[k + 1]
        n -= 1
    return n


@njit(inline="always")
def shrink_far(b, h, n, limit, recent, sinks, seen, position, alive, score, kept):
    """``shrink`` by many entries at once, by sorting."""
    rank = np.empty(n, dtype=np.float32)
    for k in range(n):
        place = position[b, h, kept[k]]
        protected = place < sinks or place >= seen - recent
        rank[k] = -np.inf if protected else -score[b, h, kept[k]]
    order = np.argsort(rank, kind="mergesort")
    for k in range(limit, n):
        alive[b, h, kept[order[k]]] = False
    m = 0
    for k in range(n):
        if alive[b, h, kept[k]]:
            kept[m] = kept[k]
            m += 1
    return m


@njit(inline="always")
def after_token(
    b, h, t, s, n, seen, stop, dense, compress, budget, recent, sinks,
    position, alive, score, end_alive, end_score, kept,
):  # fmt: skip
    ends = t + 1 == stop[b, s]
    if n > budget[b, t] and (not dense[b, s] or (ends and compress[b, s])):
        if n - budget[b, t] > 8:
            n = shrink_far(
                b, h, n, budget[b, t], recent[b, t], sinks[b, t], seen, position, alive, score, kept
            )
        else:
            n = shrink(b, h, n, budget[b, t], recent[b, t], sinks[b, t], seen, position, alive, score, kept)
    if ends:
        end_alive[b, s, h] = alive[b, h]
        end_score[b, s, h] = score[b, h]
    return n


@njit(parallel=True, cache=True)
def attention_sum_kernel(
    logits, first, offset, segment, start, stop, parent, dense, compress, budget, recent, sinks,
    use_max, aux, has_aux, position, alive, score, alive0, score0, arrival, end_alive, end_score, seen_by,
    record, visible,
):  # fmt: skip
    rows, heads, group, count, columns = logits.shape
    width = alive.shape[2]
    for job in prange(rows * heads):
        b = job // heads
        h = job % heads
        kept = np.empty(width + 1, dtype=np.int64)
        weight = np.empty(width + 1, dtype=np.float32)
        received = np.empty(width + 1, dtype=np.float32)
        last = -2
        n = 0
        for i in range(count):
            t = first + i
            s = segment[b, t]
            if s < 0:
                for g in range(group):
                    logits[b, h, g, i, :] = 0.0
                continue
            if s != last or t == start[b, s]:
                n = enter(b, h, t, s, start, parent, alive, score, alive0, score0, end_alive, end_score, kept)
                last = s
            column = offset + t
            alive[b, h, column] = True
            score[b, h, column] = arrival[b, h, t]
            kept[n] = column
            n += 1
            for k in range(n):
                received[k] = 0.0
            for g in range(group):
                row = logits[b, h, g, i]
                top = np.float32(-np.inf)
                for k in range(n):
                    top = max(top, row[kept[k]])
                if has_aux:
                    top = max(top, aux[h, g])
                total = 0.0
                for k in range(n):
                    e = np.float32(math.exp(row[kept[k]] - top))
                    weight[k] = e
                    total += e
                if has_aux:
                    total += math.exp(aux[h, g] - top)
                scale = np.float32(1.0 / total)
                row[:] = 0.0
                for k in range(n):
                    p = weight[k] * scale
                    row[kept[k]] = p
                    if use_max:
                        received[k] = max(received[k], p)
                    else:
                        received[k] += p
            share = np.float32(1.0) if use_max else np.float32(1.0 / group)
            for k in range(n):
                score[b, h, kept[k]] += received[k] * share
            seen_by[b, h, i] = n
            if record:
                for k in range(n):
                    visible[b, h, i, kept[k]] = True
            seen = position[b, h, column] + 1
            n = after_token(
                b, h, t, s, n, seen, stop, dense, compress, budget, recent, sinks,
                position, alive, score, end_alive, end_score, kept,
            )  # fmt: skip


@njit(parallel=True, cache=True)
def static_kernel(
    visible, first, offset, segment, start, stop, parent, dense, compress, budget, recent, sinks,
    position, alive, score, alive0, score0, arrival, end_alive, end_score, seen_by,
):  # fmt: skip
    rows, heads, count, columns = visible.shape
    width = alive.shape[2]
    for job in prange(rows * heads):
        b = job // heads
        h = job % heads
        kept = np.empty(width + 1, dtype=np.int64)
        last = -2
        n = 0
        for i in range(count):
            t = first + i
            s = segment[b, t]
            if s < 0:
                continue
            if s != last or t == start[b, s]:
                n = enter(b, h, t, s, start, parent, alive, score, alive0, score0, end_alive, end_score, kept)
                last = s
            column = offset + t
            alive[b, h, column] = True
            score[b, h, column] = arrival[b, h, t]
            kept[n] = column
            n += 1
            for k in range(n):
                visible[b, h, i, kept[k]] = True
            seen_by[b, h, i] = n
            seen = position[b, h, column] + 1
            n = after_token(
                b, h, t, s, n, seen, stop, dense, compress, budget, recent, sinks,
                position, alive, score, end_alive, end_score, kept,
            )  # fmt: skip
