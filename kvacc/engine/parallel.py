"""The parallel path: score known tokens in one forward pass, decisions replayed inside
each layer. Nothing is freed here, so no latency or memory figure may come from it."""

from __future__ import annotations

import torch

from kvacc.engine import compiled
from kvacc.engine.attention import AttentionCall, attention_logits, dense_attention, weighted_values
from kvacc.engine.layers import LayerKind
from kvacc.engine.plan import Plan
from kvacc.engine.rotary import Rotation
from kvacc.engine.scan import Entries, Scan, masked_softmax, scan_block, start_scan
from kvacc.strategy import EvictStrategy, Strategy

BLOCK_BYTES = 64 * 2**20
"""Attention logits held at once, in bytes; longer rows are replayed in blocks."""


class ParallelSession:
    """Answers the attention calls of one forward pass over a :class:`Plan`.

    Attributes:
        kept: float64 [B, T], for each counted query the sum over layers of the share
            of visible entries, averaged over KV heads.
        hidden: bool [B, T], an entry was hidden from the query in some layer.
        layers: number of attention layers answered.
        decisions: layer -> bool [B, H, T, T], only with ``record=True`` (tests).
    """

    def __init__(
        self,
        plan: Plan,
        strategy: Strategy,
        kinds: list[LayerKind],
        rotation: Rotation | None = None,
        latent: bool = False,
        record: bool = False,
        reference: bool = False,
    ):
        self.plan = plan
        self.strategy = strategy
        self.kinds = kinds
        self.rotation = rotation
        self.latent = latent
        self.record = record
        self.reference = reference
        self.kept = torch.zeros(plan.tokens.shape, dtype=torch.float64, device=plan.tokens.device)
        self.hidden = torch.zeros_like(plan.counted)
        self.layers = 0
        self.decisions: dict[int, torch.Tensor] = {}
        self._longest = int(plan.position.max()) + 1
        self._masks: dict[LayerKind, torch.Tensor] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        kind = self.kinds[call.layer]
        self.layers += 1
        if kind.name == "full" and isinstance(self.strategy, EvictStrategy):
            kind.require_length(self._longest)
            if not self.strategy.causal:
                return self._from_all_queries(call)
            return self._replay(call)
        self.kept += 1
        return dense_attention(call, self._mask(kind))

    def _mask(self, kind: LayerKind) -> torch.Tensor:
        """bool [B, 1, T, T], made once for all layers of a kind."""
        if kind not in self._masks:
            mask = self.plan.ancestors()
            window = kind.visible(self.plan.position, self.plan.position)
            if window is not None:
                itself = torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device)
                mask = mask & (window | itself)
            self._masks[kind] = mask[:, None]
        return self._masks[kind]

    def _deciding_heads(self, call: AttentionCall) -> int:
        return 1 if self.latent else call.key.shape[1]

    def _replay(self, call: AttentionCall) -> torch.Tensor:
        rows, _, width, _ = call.query.shape
        heads = self._deciding_heads(call)
        empty = torch.zeros(rows, heads, 0, device=call.query.device)
        stored = Entries(empty.long(), empty.bool(), empty)
        scan = start_scan(self.plan, self.strategy, stored, call.layer)
        out, seen_by, visible = replay(
            scan, call, self.rotation, use_compiled=not self.reference, record=self.record
        )
        self._count(seen_by)
        if self.record:
            self.decisions[call.layer] = visible
        return out

    def _from_all_queries(self, call: AttentionCall) -> torch.Tensor:
        """A rule that needs every query of the row at once (H2O's ``scores=global``)."""
        rows, query_heads, width, _ = call.query.shape
        heads = self._deciding_heads(call)
        causal = self._mask(self.kinds[call.layer])[:, 0] & (self.plan.segment >= 0)[:, :, None]
        logits = attention_logits(call, call.query, call.key)
        grouped = logits.view(rows, heads, query_heads // heads, width, width)
        aux = _grouped_aux(call, heads)
        attention = masked_softmax(grouped, causal[:, None, None], aux)
        visible = self.strategy.visible_from_all_queries(
            attention, self.plan.position, causal, self.plan.budget[:, 0].long()
        )
        attention = masked_softmax(grouped, visible[:, :, None], aux)
        self._count(visible.sum(-1, dtype=torch.int32))
        if self.record:
            self.decisions[call.layer] = visible
        return weighted_values(attention.view(rows, query_heads, width, width), call.value)

    def _count(self, seen_by: torch.Tensor) -> None:
        """seen_by: int32 [B, H, T], visible entries per query."""
        could = self.plan.position[:, None] + 1
        self.kept += (seen_by.double() / could).mean(1)
        self.hidden |= (seen_by < could).any(1) & self.plan.counted


def replay(
    scan: Scan,
    call: AttentionCall,
    rotation: Rotation | None,
    use_compiled: bool = True,
    record: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Attention of the plan's queries over stored entries and one another, under the
    strategy's decisions, in blocks of queries.

    Returns:
        output [B, Q, T, V]; seen_by int32 [B, H, T]; visible bool [B, H, T, W] if recorded.
    """
    strategy = scan.strategy
    rows, query_heads, width, _ = call.query.shape
    heads = scan.current.alive.shape[1]
    group = query_heads // heads
    total = scan.offset + width
    use_compiled = use_compiled and compiled.supports(scan)
    aux = _grouped_aux(call, heads)
    block = max(1, BLOCK_BYTES // (4 * rows * query_heads * total))
    outputs, counts, masks = [], [], []
    for first in range(0, width, block):
        count = min(block, width - first)
        # Later entries are visible to nobody in this block, so they are left out.
        columns = scan.offset + first + count
        query = call.query[:, :, first : first + count]
        visible = None
        if not strategy.needs_attention:
            if use_compiled:
                visible, seen_by = compiled.static(scan, first, count, columns)
            else:
                visible, seen_by = scan_block(scan, None, first, count, None)
        logits = attention_logits(call, query, call.key[:, :, :columns])
        if strategy.rotates_to_cache_positions:
            logits = _with_moved_sinks(scan, call, rotation, logits, query, seen_by, first)
        logits = logits.view(rows, heads, group, count, columns)
        if visible is None and use_compiled:
            logits = logits.contiguous()
            seen_by = compiled.attention_sum(scan, logits, first, aux)
            attention = logits
            if record:
                visible = attention.gt(0).any(2)
        else:
            if visible is None:
                visible, seen_by = scan_block(scan, logits, first, count, aux)
            attention = masked_softmax(logits, visible[:, :, None], aux)
        attention = attention.view(rows, query_heads, count, columns)
        outputs.append(weighted_values(attention, call.value[:, :, :columns]))
        counts.append(seen_by)
        if record:
            masks.append(torch.nn.functional.pad(visible, (0, total - columns)))
    return (
        torch.cat(outputs, 2),
        torch.cat(counts, 2),
        torch.cat(masks, 2) if record else None,
    )


def _with_moved_sinks(
    scan: Scan, call: AttentionCall, rotation: Rotation | None, logits, query, seen_by, first
) -> torch.Tensor:
    """Logits with positions counted in the cache (StreamingLLM).

    The recent tokens are contiguous up to the query, so their distance to it is the
    same in the text and in the cache. Only the sinks are nearer: by as many positions
    as entries are missing between them and the query.

    logits: [B, Q, n, W]; query: [B, Q, n, D]; seen_by: [B, H, n].
    """
    plan = scan.plan
    count, columns = logits.shape[2:]
    position = scan.current.position[:, 0, :columns]  # all heads agree
    sinks = plan.sinks[:, first : first + count]
    widest = int(sinks.max()) if sinks.numel() else 0
    near = (position < widest).any(0).nonzero()[:, 0]
    missing = plan.position[:, first : first + count] + 1 - seen_by[:, 0]
    if near.numel() == 0 or not bool((missing > 0).any()):
        return logits
    moved = rotation.rotate(call.layer, query, -missing[:, None])
    moved_logits = attention_logits(call, moved, call.key[:, :, near])
    is_sink = position[:, None, None, near] < sinks[:, None, :, None]
    logits[..., near] = torch.where(is_sink, moved_logits, logits[..., near])
    return logits


def _grouped_aux(call: AttentionCall, heads: int) -> torch.Tensor | None:
    return None if call.aux is None else call.aux.float().view(heads, -1)
