"""The Triton kernel behind :mod:`kvacc.engine.triton_scan`; importing this needs Triton.

One program per row and KV head walks over the queries of a block. It holds the kept set, the
scores and the positions of all entries as vectors of ``BLOCK`` lanes, one lane a column, so a
token costs one pass over the row of logits and no launch. In global memory lie only the state
between blocks of queries and at the end of each segment. Offsets are 64 bit: B x H x G x R x W
logits can be more than 2^31.
"""

from __future__ import annotations

import triton
import triton.language as tl

HIGHEST_KEY = tl.constexpr(2**63 - 1)
LOWEST_KEY = tl.constexpr(-(2**63))
LOWEST_FLOAT = tl.constexpr(-3.4028234663852886e38)
SMALLEST_FLOAT = tl.constexpr(1.1754943508222875e-38)
"""As :func:`kvacc.engine.scan.masked_softmax` clamps them, so that an empty row is 0, never NaN."""


@triton.jit
def ranks(score, position, seen, recent, sinks):
    """int64 [BLOCK], higher is better: protected entries, then by score, then the lower position.

    No two entries of a path share a position, so no two ranks are equal and no tie is left
    to the order in which lanes are reduced.
    """
    protected = (position < sinks) | (position >= seen - recent)
    # -0.0 equals 0.0, but its bits do not.
    score = tl.where(score == 0.0, 0.0, score)
    bits = tl.where(protected, float("inf"), score).to(tl.int32, bitcast=True)
    # As integers, floats are in order but for the negative ones, which run backwards.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) + (0x7FFFFFFF - position).to(tl.int64)


@triton.jit
def shrink(alive, rank, kept, limit):
    """``alive`` with the ``limit`` best of its ``kept`` > limit entries."""
    if kept - limit == 1:
        worst = tl.min(tl.where(alive, rank, HIGHEST_KEY), 0)
        alive = alive & (rank != worst)
    else:
        # The rank of the last that stays, bit by bit: the highest that ``limit`` entries reach.
        rank = tl.where(alive, rank, LOWEST_KEY)
        positive = tl.sum((rank >= 0).to(tl.int32), 0) >= limit
        threshold = tl.where(positive, tl.full((), 0, tl.int64), tl.full((), LOWEST_KEY, tl.int64))
        step = tl.full((), 2**62, tl.int64)
        for _ in range(63):
            higher = threshold + step
            threshold = tl.where(tl.sum((rank >= higher).to(tl.int32), 0) >= limit, higher, threshold)
            step = step >> 1
        alive = alive & (rank >= threshold)
    return alive


@triton.jit
def attend(logits, sinks, alive, inside, column, query, stride, columns, GROUP, USE_MAX, HAS_AUX):
    """Turn one query's logits into attention over ``alive``, 0 elsewhere, for each head of the group.

    ``logits`` points at [G, R, W'] and ``sinks`` at [G]; ``stride`` is R. Returns float32 [BLOCK],
    the mean or the maximum over the group.
    """
    received = tl.zeros_like(column).to(tl.float32)
    for g in range(GROUP):
        row = logits + (g * stride + query) * columns + column
        logit = tl.load(row, mask=alive & inside, other=float("-inf"))
        top = tl.max(logit, 0)
        if HAS_AUX:
            top = tl.maximum(top, tl.load(sinks + g))
        # Comparisons, not maximum(): NaN stays NaN, as in the reference.
        top = tl.where(top < LOWEST_FLOAT, LOWEST_FLOAT, top)
        weight = tl.exp(logit - top)
        total = tl.sum(weight, 0)
        if HAS_AUX:
            total += tl.exp(tl.load(sinks + g) - top)
        weight = weight / tl.where(total < SMALLEST_FLOAT, SMALLEST_FLOAT, total)
        tl.store(row, weight, mask=inside)
        if USE_MAX:
            received = tl.maximum(received, weight)
        else:
            received += weight
    if not USE_MAX:
        received = received / GROUP
    return received


COUNTS = ("first", "count", "columns", "offset", "width", "tokens", "segments", "heads")


# Counts differ from block to block; a variant of the kernel for each would be compiled anew.
@triton.jit(do_not_specialize=COUNTS)
def replay_kernel(
    logits, aux, seen_by, visible,
    segment, start, stop, parent, dense, compress, budget, recent, sinks,
    arrival, position, alive_now, score_now, alive_first, score_first, alive_ends, score_ends,
    first, count, columns, offset, width, tokens, segments, heads,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, SCORED: tl.constexpr, USE_MAX: tl.constexpr,
    HAS_AUX: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """Replay queries ``first`` to ``first + count``; grid (B * H,).

    Arrays are contiguous, those of :class:`~kvacc.engine.plan.Plan` and
    :class:`~kvacc.engine.scan.Scan`, and: logits float32 [B, H, G, R, W'] (``SCORED``), aux
    float32 [H, G] (``HAS_AUX``), seen_by int32 [B, H, R], visible uint8 [B, H, R, W']
    (``RECORD``), both of zeros; position int32 [B, H, W]; alive_ends uint8 and score_ends
    float32 [B, S, H, W], the state at segment ends. Flags are uint8. W' <= BLOCK.
    """
    job = tl.program_id(0).to(tl.int64)
    b = job // heads
    h = job % heads
    # 64 bit from here on, so that products of them are.
    tall = tl.full((), 0, tl.int64) + columns
    column = tl.arange(0, BLOCK)
    inside = column < columns
    here = job * width + column
    alive = tl.load(alive_now + here, mask=inside, other=0) != 0
    score = tl.load(score_now + here, mask=inside, other=0.0)
    place = tl.load(position + here, mask=inside, other=0)
    for i in range(count):
        at = b * tokens + first + i
        own = tl.load(segment + at)
        if own >= 0:
            mine = b * segments + own
            if first + i == tl.load(start + mine):
                up = tl.load(parent + mine)
                if up >= 0:
                    # A lane may read what another lane of this program wrote.
                    tl.debug_barrier()
                    there = ((b * segments + up) * heads + h) * width + column
                    alive = tl.load(alive_ends + there, mask=inside, other=0) != 0
                    score = tl.load(score_ends + there, mask=inside, other=0.0)
                else:
                    alive = tl.load(alive_first + here, mask=inside, other=0) != 0
                    score = tl.load(score_first + here, mask=inside, other=0.0)
            arrived = column == offset + first + i
            alive = alive | arrived
            score = tl.where(arrived, tl.load(arrival + job * tokens + first + i), score)
            kept = tl.sum(alive.to(tl.int32), 0)
            tl.store(seen_by + job * count + i, kept)
            if RECORD:
                out = visible + (job * count + i) * tall + column
                tl.store(out, alive.to(tl.uint8), mask=inside)
            if SCORED:
                received = attend(
                    logits + job * GROUP * count * tall, aux + h * GROUP, alive, inside, column, i, count,
                    tall, GROUP, USE_MAX, HAS_AUX,
                )  # fmt: skip
                score = tl.where(alive, score + received, score)
            ends = first + i + 1 == tl.load(stop + mine)
            limit = tl.load(budget + at)
            acts = (tl.load(dense + mine) == 0) | (ends & (tl.load(compress + mine) != 0))
            if acts & (kept > limit):
                seen = tl.load(position + job * width + offset + first + i) + 1
                rank = ranks(score, place, seen, tl.load(recent + at), tl.load(sinks + at))
                alive = shrink(alive, rank, kept, limit)
            if ends:
                there = (mine * heads + h) * width + column
                tl.store(alive_ends + there, alive.to(tl.uint8), mask=inside)
                tl.store(score_ends + there, score, mask=inside)
        elif SCORED:
            for g in range(GROUP):
                row = logits + ((job * GROUP + g) * count + i) * tall + column
                tl.store(row, tl.zeros_like(score), mask=inside)
    tl.store(alive_now + here, alive.to(tl.uint8), mask=inside)
    tl.store(score_now + here, score, mask=inside)
