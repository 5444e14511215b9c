"""The beginning of a dense prefill, all of its queries at once.

While a prompt is read with the full cache nothing is evicted, so which entries a query reads
is known before any attention is computed, and a score that adds up attention is a sum over
queries. The scan then has nothing to decide, and whole blocks are computed by the same
vectorised operations on every device, on processors one head at a time; it goes on from the
last dense token, after which the strategy compresses.
"""

from __future__ import annotations

import itertools

import torch

from kvacc.engine import compiled
from kvacc.engine.attention import AttentionCall, attention_logits, weighted_values
from kvacc.engine.scan import Scan, masked_softmax
from kvacc.products import one_by_one


def dense_beginning(scan: Scan) -> int:
    """Leading columns of the plan in which nothing is decided: every row reads its first,
    dense segment there, and not that segment's last token. 0 unless scores add up attention."""
    plan = scan.plan
    if not compiled.adds_up_attention(scan.strategy) or scan.strategy.reads_full_rows:
        return 0
    reads = plan.dense[:, 0] & (plan.parent[:, 0] < 0)
    until = torch.where(reads, plan.stop[:, 0] - 1, 0)
    return max(0, int(until.min()))


def dense_block(
    scan: Scan, call: AttentionCall, first: int, record: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Attention of queries that lie within :func:`dense_beginning`; the scan moves on behind them.

    Returns:
        output [B, Q, R, V]; seen_by int32 [B, H, R]; visible bool [B, H, R, W'] with ``record``.
    """
    count, columns = call.query.shape[2], call.key.shape[2]
    state, plan = scan.current, scan.plan
    rows, heads = state.alive.shape[:2]
    real = plan.segment[:, first : first + count] >= 0
    before, own = state.alive[..., : columns - count], _among_themselves(real)
    state.score[..., columns - count : columns] = scan.arrival[..., first : first + count] * real[:, None]
    if one_by_one(call.query):
        out = call.value.new_empty(*call.query.shape[:3], call.value.shape[-1])
        group = call.query.shape[1] // heads
        for b, h in itertools.product(range(rows), range(heads)):
            here, head = slice(b, b + 1), slice(h, h + 1)
            out[here, h * group : (h + 1) * group], received = _attend(
                scan, call.of_head(b, h, heads), before[here, head], own[here], real[here]
            )
            state.score[here, head, :columns] += received
    else:
        out, received = _attend(scan, call, before, own, real)
        state.score[..., :columns] += received
    seen_by = (before.sum(-1)[..., None] + own.sum(-1)[:, None]) * real[:, None]
    visible = None
    if record:
        earlier = before[:, :, None].expand(-1, -1, count, -1)
        visible = torch.cat([earlier, own[:, None].expand(-1, heads, -1, -1)], -1)
        visible = visible & real[:, None, :, None]
    state.alive[..., columns - count : columns] = real[:, None]
    return out, seen_by.int(), visible


def _attend(
    scan: Scan, call: AttentionCall, before: torch.Tensor, own: torch.Tensor, real: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and what each entry received of it.

    Args:
        before: bool [B, H, W' - R], earlier entries that are still there.
        own: bool [B, R, R], see :func:`_among_themselves`; real: bool [B, R], False at padding.

    Returns:
        output [B, Q, R, V]; received float32 [B, H, W'].
    """
    rows, query_heads, count, _ = call.query.shape
    heads, columns = before.shape[1], call.key.shape[2]
    logits = attention_logits(call, call.query, call.key)
    logits = logits.view(rows, heads, query_heads // heads, count, columns)
    padded = not bool(real.all())
    # In place, and only where an entry is hidden: a long prompt's logits are the widest thing here.
    logits[..., columns - count :].masked_fill_(~own[:, None, None], float("-inf"))
    if not bool(before.all()):
        logits[..., : columns - count].masked_fill_(~before[:, :, None, None], float("-inf"))
    if padded:
        logits.masked_fill_(~real[:, None, None, :, None], 0.0)
    if call.aux is None:
        attention = logits.softmax(-1)
    else:
        attention = _with_sinks(logits, call.aux.float().view(heads, -1))
    if padded:
        attention.masked_fill_(~real[:, None, None, :, None], 0.0)
    received = (
        attention.amax(2).sum(2)
        if scan.strategy.aggregate == "max"
        else attention.sum((2, 3)) / attention.shape[2]
    )
    return weighted_values(attention.view(rows, query_heads, count, columns), call.value), received


def _among_themselves(real: torch.Tensor) -> torch.Tensor:
    """bool [B, R, R]: which of a block's own entries its queries read."""
    count = real.shape[1]
    return torch.ones(count, count, dtype=torch.bool, device=real.device).tril() & real[:, None, :]


def _with_sinks(logits: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
    """Softmax with GPT-OSS's sink logits ``aux`` [H, G] in the denominator."""
    return masked_softmax(logits, torch.ones((), dtype=torch.bool, device=logits.device), aux)
