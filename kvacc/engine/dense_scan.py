"""The beginning of a dense prefill, all of its queries at once.

While a prompt is read with the full cache nothing is evicted, so which entries a query reads
is known before any attention is computed, and a score that adds up attention is a sum over
queries. The scan then has nothing to decide, and whole blocks are computed by the same
vectorised operations on every device; it goes on from the last dense token, after which the
strategy compresses.
"""

from __future__ import annotations

import torch

from kvacc.engine import compiled
from kvacc.engine.scan import Scan, masked_softmax


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
    scan: Scan, logits: torch.Tensor, first: int, aux: torch.Tensor | None, record: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Attention of queries that lie within :func:`dense_beginning`; the scan moves on behind them.

    Args:
        logits: float32 [B, H, G, R, W'], W' = offset + first + R; overwritten.

    Returns:
        attention like ``logits``, 0 at hidden entries; seen_by int32 [B, H, R]; visible
        bool [B, H, R, W'] with ``record``.
    """
    count, columns = logits.shape[3:]
    state, plan = scan.current, scan.plan
    real = plan.segment[:, first : first + count] >= 0
    before, own = state.alive[..., : columns - count], _among_themselves(real)
    padded = not bool(real.all())
    # In place, and only where an entry is hidden: a long prompt's logits are the widest thing here.
    logits[..., columns - count :].masked_fill_(~own[:, None, None], float("-inf"))
    if not bool(before.all()):
        logits[..., : columns - count].masked_fill_(~before[:, :, None, None], float("-inf"))
    if padded:
        logits.masked_fill_(~real[:, None, None, :, None], 0.0)
    attention = logits.softmax(-1) if aux is None else _with_sinks(logits, aux)
    if padded:
        attention.masked_fill_(~real[:, None, None, :, None], 0.0)
    received = (
        attention.amax(2).sum(2)
        if scan.strategy.aggregate == "max"
        else attention.sum((2, 3)) / attention.shape[2]
    )
    seen_by = (before.sum(-1)[..., None] + own.sum(-1)[:, None]) * real[:, None]
    visible = None
    if record:
        earlier = before[:, :, None].expand(-1, -1, count, -1)
        visible = torch.cat([earlier, own[:, None].expand(-1, before.shape[1], -1, -1)], -1)
        visible = visible & real[:, None, :, None]
    new = slice(columns - count, columns)
    state.alive[..., new] = real[:, None]
    state.score[..., new] = scan.arrival[..., first : first + count] * real[:, None]
    state.score[..., :columns] += received
    return attention, seen_by.int(), visible


def _among_themselves(real: torch.Tensor) -> torch.Tensor:
    """bool [B, R, R]: which of a block's own entries its queries read."""
    count = real.shape[1]
    return torch.ones(count, count, dtype=torch.bool, device=real.device).tril() & real[:, None, :]


def _with_sinks(logits: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
    """Softmax with GPT-OSS's sink logits ``aux`` [H, G] in the denominator."""
    return masked_softmax(logits, torch.ones((), dtype=torch.bool, device=logits.device), aux)
