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
from kvacc.engine.selecting import ask, attend_selected, entry_bytes, layer_context, quality, selects_in
from kvacc.engine.speculation import Speculation
from kvacc.select_strategy import Asked, NewEntries, SelectStrategy
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
        modules: layer -> the attention module that called.
        moved: float64 [B, T], bytes that a query brings from the host pool, all layers together.
        mass, recall: layer -> float64 [B, T] at counted queries, for layers that select; see
            :class:`~kvacc.engine.selecting.Quality`.
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
        speculation: Speculation | None = None,
    ):
        self.plan = plan
        self.speculation = speculation
        self.inputs = speculation.inputs if speculation else None
        self.strategy = strategy
        self.kinds = kinds
        self.rotation = rotation
        self.latent = latent
        self.record = record
        self.reference = reference
        self.kept = torch.zeros(plan.tokens.shape, dtype=torch.float64, device=plan.tokens.device)
        self.hidden = torch.zeros_like(plan.counted)
        self.moved = torch.zeros_like(self.kept)
        self.mass: dict[int, torch.Tensor] = {}
        self.recall: dict[int, torch.Tensor] = {}
        self.layers = 0
        self.modules: dict[int, torch.nn.Module] = {}
        self.decisions: dict[int, torch.Tensor] = {}
        self._longest = int(plan.position.max()) + 1
        self._plans = {plan.tokens.device: plan}
        self._masks: dict[tuple[LayerKind, torch.device], torch.Tensor] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        kind = self.kinds[call.layer]
        self.layers += 1
        self.modules[call.layer] = call.module
        if kind.name == "full" and isinstance(self.strategy, EvictStrategy):
            kind.require_length(self._longest)
            if not self.strategy.causal:
                return self._from_all_queries(call)
            return self._replay(call)
        if kind.name == "full" and isinstance(self.strategy, SelectStrategy):
            kind.require_length(self._longest)
            if selects_in(self.strategy, call.layer, self.speculation):
                return self._select(call)
        self.kept += 1
        return dense_attention(call, self._mask(kind, call.query.device))

    def _plan_on(self, device: torch.device) -> Plan:
        """The plan beside a layer: the layers of a large model lie on several devices."""
        if device not in self._plans:
            self._plans[device] = self.plan.to(device)
        return self._plans[device]

    def _mask(self, kind: LayerKind, device: torch.device) -> torch.Tensor:
        """bool [B, 1, T, T], made once for all layers of a kind on a device."""
        if (kind, device) not in self._masks:
            plan = self._plan_on(device)
            mask = plan.ancestors
            window = kind.visible(plan.position, plan.position)
            if window is not None:
                itself = torch.eye(mask.shape[-1], dtype=torch.bool, device=device)
                mask = mask & (window | itself)
            self._masks[kind, device] = mask[:, None]
        return self._masks[kind, device]

    def _deciding_heads(self, call: AttentionCall) -> int:
        return 1 if self.latent else call.key.shape[1]

    def _replay(self, call: AttentionCall) -> torch.Tensor:
        rows, _, width, _ = call.query.shape
        heads = self._deciding_heads(call)
        empty = torch.zeros(rows, heads, 0, device=call.query.device)
        stored = Entries(empty.long(), empty.bool(), empty)
        scan = start_scan(self._plan_on(call.query.device), self.strategy, stored, call.layer)
        out, seen_by, visible = replay(
            scan, call, self.rotation, use_compiled=not self.reference, record=self.record
        )
        self._count(seen_by)
        if self.record:
            self.decisions[call.layer] = visible
        return out

    def _select(self, call: AttentionCall) -> torch.Tensor:
        """A strategy that forgets nothing: each query reads a selection."""
        rows, query_heads, width, _ = call.query.shape
        heads = self._deciding_heads(call)
        plan = self._plan_on(call.query.device)
        context = layer_context(call, heads, plan.compressed, self.rotation, self.speculation)
        selector = self.strategy.selector(context)
        selector.extend(NewEntries(call.key, plan.position, plan.previous, plan.segment >= 0))
        speculated = self.speculation.queries(call) if self.speculation else None
        each = entry_bytes(call, self.latent)
        block = max(1, BLOCK_BYTES // (4 * rows * query_heads * width))
        outputs, counts, masks = [], [], []
        for first in range(0, width, block):
            count = min(block, width - first)
            here, columns = slice(first, first + count), first + count
            part = call.part(first, count, columns)
            readable = plan.ancestors[:, here, :columns] & (plan.segment >= 0)[:, here, None]
            asked = Asked(
                query=part.query,
                speculated=None if speculated is None else speculated[:, :, here],
                position=plan.position[:, here],
                budget=plan.budget[:, here].long(),
                acts=plan.acts[:, here],
                compresses=plan.compresses[:, here],
                readable=readable,
                entry_position=plan.position[:, :columns],
                own=torch.arange(first, columns, device=call.query.device),
                logits=lambda query, key, part=part: attention_logits(part, query, key),
            )
            chosen = ask(selector, asked)
            outputs.append(
                attend_selected(part, chosen, self.rotation, asked.position, asked.entry_position[:, None])
            )
            counts.append(chosen.visible.sum(-1, dtype=torch.int32))
            brought = counts[-1].sum(1) - (chosen.visible & asked.itself()).sum((1, 3))
            self.moved[:, here] += (brought * each * asked.acts).to(self.moved.device)
            self._judge(part, chosen.visible, readable, first)
            if self.record:
                masks.append(torch.nn.functional.pad(chosen.visible, (0, width - columns)))
        self._count(torch.cat(counts, 2))
        if self.record:
            self.decisions[call.layer] = torch.cat(masks, 2)
        return torch.cat(outputs, 2)

    def _judge(self, call: AttentionCall, visible: torch.Tensor, readable: torch.Tensor, first: int) -> None:
        """The quality of the selection at counted queries, which are few."""
        count = call.query.shape[2]
        counted = self.plan.counted[:, first : first + count].any(0).nonzero()[:, 0]
        if call.layer not in self.mass:
            self.mass[call.layer] = torch.zeros_like(self.kept)
            self.recall[call.layer] = torch.zeros_like(self.kept)
        if counted.numel():
            at = counted.to(call.query.device)
            some = call.with_tensors(call.query[:, :, at], call.key, call.value)
            found = quality(some, visible[:, :, at], readable[:, at])
            self.mass[call.layer][:, first + counted] = found.mass.to(self.kept.device)
            self.recall[call.layer][:, first + counted] = found.recall.to(self.kept.device)

    def _from_all_queries(self, call: AttentionCall) -> torch.Tensor:
        """A rule that needs every query of the row at once (H2O's ``scores=global``)."""
        rows, query_heads, width, _ = call.query.shape
        heads = self._deciding_heads(call)
        plan = self._plan_on(call.query.device)
        causal = self._mask(self.kinds[call.layer], call.query.device)[:, 0] & (plan.segment >= 0)[:, :, None]
        logits = attention_logits(call, call.query, call.key)
        grouped = logits.view(rows, heads, query_heads // heads, width, width)
        aux = _grouped_aux(call, heads)
        attention = masked_softmax(grouped, causal[:, None, None], aux)
        visible = self.strategy.visible_from_all_queries(
            attention, plan.position, causal, plan.budget[:, 0].long()
        )
        attention = masked_softmax(grouped, visible[:, :, None], aux)
        self._count(visible.sum(-1, dtype=torch.int32))
        if self.record:
            self.decisions[call.layer] = visible
        return weighted_values(attention.view(rows, query_heads, width, width), call.value)

    def _count(self, seen_by: torch.Tensor) -> None:
        """seen_by: int32 [B, H, T], visible entries per query."""
        seen_by = seen_by.to(self.kept.device)
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
    use_compiled = use_compiled and compiled.supports(scan)
    rows, query_heads, width, _ = call.query.shape
    total = scan.offset + width
    block = max(1, BLOCK_BYTES // (4 * rows * query_heads * total))
    outputs, counts, masks = [], [], []
    for first in range(0, width, block):
        count = min(block, width - first)
        # Later entries are visible to nobody in this block, so they are left out.
        columns = scan.offset + first + count
        part = call.part(first, count, columns)
        if scan.strategy.needs_attention:
            out, seen_by, visible = _scored_block(scan, part, first, use_compiled, record)
        else:
            out, seen_by, visible = _unscored_block(scan, part, rotation, first, use_compiled)
        outputs.append(out)
        counts.append(seen_by)
        if record:
            masks.append(torch.nn.functional.pad(visible, (0, total - columns)))
    return torch.cat(outputs, 2), torch.cat(counts, 2), torch.cat(masks, 2) if record else None


def _scored_block(scan: Scan, call: AttentionCall, first: int, use_compiled: bool, record: bool):
    """Decisions that follow from the attention itself."""
    rows, query_heads, count, _ = call.query.shape
    columns = call.key.shape[2]
    heads = scan.current.alive.shape[1]
    aux = _grouped_aux(call, heads)
    logits = attention_logits(call, call.query, call.key)
    logits = logits.view(rows, heads, query_heads // heads, count, columns)
    if use_compiled:
        attention = logits.contiguous()
        seen_by, visible = compiled.attention_sum(scan, attention, first, aux, record)
    else:
        visible, seen_by = scan_block(scan, logits, first, count, aux)
        attention = masked_softmax(logits, visible[:, :, None], aux)
    out = weighted_values(attention.view(rows, query_heads, count, columns), call.value)
    return out, seen_by, visible


def _unscored_block(
    scan: Scan, call: AttentionCall, rotation: Rotation | None, first: int, use_compiled: bool
):
    """Decisions that are known before any attention is computed."""
    rows, query_heads, count, _ = call.query.shape
    columns = call.key.shape[2]
    if use_compiled:
        visible, seen_by = compiled.static(scan, first, count, columns)
    else:
        visible, seen_by = scan_block(scan, None, first, count, None)
    heads = visible.shape[1]
    mask = visible if heads == 1 else visible.repeat_interleave(query_heads // heads, 1)
    if call.softcap is not None or call.aux is not None:
        logits = attention_logits(call, call.query, call.key)
        sinks = _moved_sinks(scan, call, rotation, seen_by, first)
        if sinks is not None:
            near, is_sink, _, moved = sinks
            logits[..., near] = torch.where(is_sink, moved, logits[..., near])
        aux = None if call.aux is None else call.aux.float().view(-1, 1)
        attention = masked_softmax(logits[:, :, None], mask[:, :, None], aux)[:, :, 0]
        return weighted_values(attention, call.value), seen_by, visible
    # A query that reads nothing is padding; it reads something so that no row is empty.
    mask = mask | (seen_by == 0).any(1)[:, None, :, None]
    sinks = _moved_sinks(scan, call, rotation, seen_by, first)
    if sinks is None:
        return dense_attention(call, mask), seen_by, visible
    # The fused kernel takes a bias: what a sink's logit gains by being nearer.
    near, is_sink, original, moved = sinks
    bias = torch.zeros(rows, query_heads, count, columns, device=mask.device)
    bias[..., near] = torch.where(is_sink, moved - original, 0.0)
    bias.masked_fill_(~mask, float("-inf"))
    return dense_attention(call, bias.to(call.query.dtype)), seen_by, visible


def _moved_sinks(scan: Scan, call: AttentionCall, rotation: Rotation | None, seen_by, first: int):
    """Logits of sinks with positions counted in the cache (StreamingLLM), or None where
    nothing is missing between them and the queries.

    The recent tokens are contiguous up to the query, so their distance to it is the
    same in the text and in the cache. Only the sinks are nearer: by as many positions
    as entries are missing between them and the query.

    Args:
        seen_by: [B, H, n].

    Returns:
        columns that are a sink in some row, [M]; is_sink bool [B, 1, n, M]; and the
        logits [B, Q, n, M] at the original and at the cache's positions.
    """
    if not scan.strategy.rotates_to_cache_positions:
        return None
    plan = scan.plan
    count, columns = call.query.shape[2], call.key.shape[2]
    position = scan.current.position[:, 0, :columns]  # all heads agree
    sinks = plan.sinks[:, first : first + count]
    near = (position < sinks.amax()).any(0).nonzero()[:, 0]
    missing = plan.position[:, first : first + count] + 1 - seen_by[:, 0]
    missing = missing.where(plan.segment[:, first : first + count] >= 0, 0)
    if near.numel() == 0 or not bool((missing > 0).any()):
        return None
    key = call.key[:, :, near]
    original = attention_logits(call, call.query, key)
    moved = attention_logits(call, rotation.rotate(call.layer, call.query, -missing[:, None]), key)
    is_sink = (position[:, None, near] < sinks[:, :, None])[:, None]
    return near, is_sink, original, moved


def _grouped_aux(call: AttentionCall, heads: int) -> torch.Tensor | None:
    return None if call.aux is None else call.aux.float().view(heads, -1)
