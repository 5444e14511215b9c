"""Replay a strategy's decisions over the tokens of one layer, in plain PyTorch.

Exact, because a decision of layer l at token t depends only on what layers up to l
computed for tokens up to t: all queries of the layer are known, so the rule can be
replayed over positions inside the layer. This is the reference, and the way for
strategies that bring rules of their own; :mod:`kvacc.engine.compiled` replays the
common rules faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvacc.engine.plan import Plan
from kvacc.strategy import EvictStrategy


@dataclass
class Entries:
    """The decision state of one layer. B rows, H heads that decide, W entries.

    Attributes:
        position: long [B, H, W] (or H = 1 where heads agree), place in the text.
        alive: bool [B, H, W], the kept set.
        score: float32 [B, H, W].
    """

    position: torch.Tensor
    alive: torch.Tensor
    score: torch.Tensor

    def expand(self, rows: int) -> Entries:
        """The same for ``rows`` rows, of one."""
        return Entries(*(x.expand(rows, -1, -1) for x in (self.position, self.alive, self.score)))


@dataclass
class Scan:
    """A scan under way: state of the current segment and at the end of each one.

    The columns are ``offset`` stored entries, then the plan's tokens. Blocks of
    queries are fed in order, so the n x n scores never exist at once.
    """

    plan: Plan
    strategy: EvictStrategy
    current: Entries
    initial: Entries
    finished: list[tuple[torch.Tensor, torch.Tensor] | None]
    offset: int
    readable: torch.Tensor
    """bool [B, H, offset], the stored entries that attention over full rows reads."""
    arrival: torch.Tensor
    """float32 [B, H, T], the score of each token's entry when it is stored."""
    ends: tuple | None = None
    """The compiled scan's own record of the states at segment ends."""


def start_scan(
    plan: Plan, strategy: EvictStrategy, stored: Entries, layer: int, readable: torch.Tensor | None = None
) -> Scan:
    """Begin at ``stored`` entries (W may be 0), to be followed by the plan's tokens.

    ``readable`` bool [B, H, W] are the stored entries that a strategy with
    ``reads_full_rows`` reads, hidden ones included; by default those alive.
    """
    heads = stored.alive.shape[1]
    rows, width = plan.tokens.shape
    device = plan.tokens.device
    offset = stored.alive.shape[-1]
    arrival = strategy.initial_score(plan.position, layer, heads).transpose(1, 2).contiguous()
    position = plan.position[:, None].expand(rows, heads, width)
    grown = Entries(
        position=torch.cat([stored.position.expand(rows, heads, offset), position], -1),
        alive=torch.cat([stored.alive, torch.zeros(rows, heads, width, dtype=torch.bool, device=device)], -1),
        score=torch.cat([stored.score, torch.zeros(rows, heads, width, device=device)], -1),
    )
    readable = stored.alive if readable is None else readable
    current = Entries(grown.position, grown.alive.clone(), grown.score.clone())
    return Scan(plan, strategy, current, grown, [None] * plan.start.shape[1], offset, readable, arrival)


def scan_block(
    scan: Scan, logits: torch.Tensor | None, first: int, count: int, aux: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replay queries ``first`` to ``first + count``.

    Args:
        logits: float32 [B, H, G, count, W'], W' >= offset + first + count, scaled
            attention logits; None for a strategy that needs none.
        aux: float32 [H, G] attention-sink logits that join the softmax denominator.

    Returns:
        visible: bool [B, H, count, W']; with W' = offset + first + count when logits is None.
        seen_by: int32 [B, H, count], number of visible entries; 0 at padding.
    """
    plan, strategy, state = scan.plan, scan.strategy, scan.current
    rows, heads, width = state.alive.shape
    columns = scan.offset + first + count if logits is None else logits.shape[-1]
    device = state.alive.device
    visible = torch.zeros(rows, heads, count, columns, dtype=torch.bool, device=device)
    for i in range(count):
        t = first + i
        segment = plan.segment[:, t].long()
        real = segment >= 0
        own = segment.clamp(min=0)[:, None]
        _enter(scan, real & (plan.start.gather(1, own)[:, 0] == t), own)
        column = scan.offset + t
        state.alive[:, :, column] |= real[:, None]
        state.score[:, :, column] = torch.where(
            real[:, None], scan.arrival[:, :, t], state.score[:, :, column]
        )
        visible[:, :, i] = state.alive[..., :columns] & real[:, None, None]
        if strategy.needs_attention:
            read = visible[:, :, i]
            if strategy.reads_full_rows:
                own_text = plan.ancestors_of(t, 1, columns - scan.offset)
                read = torch.cat([scan.readable, own_text.expand(rows, heads, -1)], -1)
            attention = masked_softmax(logits[:, :, :, i], read[:, :, None], aux)
            observed = strategy.observe(state.score[..., :columns], attention)
            state.score[..., :columns] = torch.where(
                real[:, None, None], observed, state.score[..., :columns]
            )
        stop = plan.stop.gather(1, own)[:, 0] == t + 1
        dense = plan.dense.gather(1, own)[:, 0]
        evicts = real & (~dense | (stop & plan.compress.gather(1, own)[:, 0]))
        if evicts.any():
            keep, score = strategy.keep(
                state.score,
                state.position,
                state.alive,
                plan.position[:, t] + 1,
                plan.budget[:, t].long(),
                plan.recent[:, t].long(),
                plan.sinks[:, t].long(),
            )
            at = evicts[:, None, None]
            state.alive = torch.where(at, keep, state.alive)
            state.score = torch.where(at, score, state.score)
        if bool((real & stop).any()):
            _leave(scan, real & stop, own)
    return visible, visible.sum(-1, dtype=torch.int32)


def _enter(scan: Scan, rows: torch.Tensor, own: torch.Tensor) -> None:
    """Rows that start a segment take the state at the end of its parent."""
    if not bool(rows.any()):
        return
    parent = scan.plan.parent.gather(1, own)[:, 0]
    for b in rows.nonzero()[:, 0].tolist():
        up = int(parent[b])
        alive, score = (
            (scan.initial.alive[b], scan.initial.score[b])
            if up < 0
            else (scan.finished[up][0][b], scan.finished[up][1][b])
        )
        scan.current.alive[b] = alive
        scan.current.score[b] = score


def _leave(scan: Scan, rows: torch.Tensor, own: torch.Tensor) -> None:
    for b in rows.nonzero()[:, 0].tolist():
        number = int(own[b, 0])
        if scan.finished[number] is None:
            scan.finished[number] = (scan.current.alive.clone(), scan.current.score.clone())
        else:
            scan.finished[number][0][b] = scan.current.alive[b]
            scan.finished[number][1][b] = scan.current.score[b]


def masked_softmax(logits: torch.Tensor, mask: torch.Tensor, aux: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dimension where ``mask`` holds, 0 elsewhere.

    Args:
        logits: float32 [B, H, G, ..., W]. mask: bool, broadcastable to it.
        aux: float32 [H, G], logits that take part in the denominator only (GPT-OSS).

    Rows without any entry are all zero, never NaN.
    """
    logits = logits.masked_fill(~mask, float("-inf"))
    top = logits.amax(-1, keepdim=True)
    if aux is not None:
        aux = aux.view(1, *aux.shape, *[1] * (logits.dim() - 3))
        top = torch.maximum(top, aux)
    top = top.clamp(min=torch.finfo(logits.dtype).min)
    weights = (logits - top).exp()
    total = weights.sum(-1, keepdim=True)
    if aux is not None:
        total = total + (aux - top).exp()
    return weights / total.clamp(min=torch.finfo(logits.dtype).tiny)
