"""The parallel path: score known tokens in one forward pass, decisions replayed inside
each layer. Nothing is freed here, so no latency or memory figure may come from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from kvacc.engine import compiled
from kvacc.engine.attention import (
    AttentionCall,
    attention_logits,
    dense_attention,
    for_query_heads,
    weighted_values,
)
from kvacc.engine.dense_scan import dense_beginning, dense_block
from kvacc.engine.layers import LayerKind
from kvacc.engine.packing import TokenPacking
from kvacc.engine.plan import Plan
from kvacc.engine.prefix import Prefix, StoredLayer
from kvacc.engine.rotary import Rotation
from kvacc.engine.scan import Entries, Scan, masked_softmax, scan_block, start_scan
from kvacc.engine.selecting import (
    ask,
    attend_selected,
    entry_bytes,
    layer_context,
    mass_by_head,
    quality,
    selects_in,
)
from kvacc.engine.speculation import Speculation
from kvacc.select_strategy import Asked, NewEntries, SelectStrategy, count_true
from kvacc.strategy import EvictStrategy, Strategy

BLOCK_BYTES = 16 * 2**20
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
            :class:`~kvacc.engine.selecting.Quality`. With ``weigh`` the mass is also known of layers
            that evict: over all entries of this run that full attention would have read.
        mass_by_head: layer -> float64 [N, H] of the N counted queries in row order, only with ``weigh``.
        heads: layer -> number of heads that decide (KV heads; 1 where they share a latent).
        hidden_states: [N, D], what the output embedding was given at the counted queries; only where
            :meth:`kvacc.engine.wrapped.WrappedModel.parallel` was asked to keep it.
        decisions: layer -> bool [B, H, T, W], only with ``record=True`` (tests).
        stored: layer -> what later tokens read of a plan with one path, only with ``store=True``.

    The plan may continue a shared ``prefix`` of P tokens. Then a layer's W entries are the
    prefix's, the same for all rows, and behind them the plan's: W = P + T. With a ``packing`` the model
    runs on the plan's tokens without padding, and only attention sees the rows.
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
        weigh: bool = False,
        prefix: Prefix | None = None,
        store: bool = False,
        packing: TokenPacking | None = None,
    ):
        self.plan = plan
        self.packing = packing
        self.weigh = weigh
        self.prefix = prefix
        self.offset = prefix.tokens if prefix else 0
        self.stored: dict[int, StoredLayer] | None = {} if store else None
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
        self.mass_by_head: dict[int, torch.Tensor] = {}
        self.heads: dict[int, int] = {}
        self.hidden_states: torch.Tensor | None = None
        self.layers = 0
        self.modules: dict[int, torch.nn.Module] = {}
        self.decisions: dict[int, torch.Tensor] = {}
        self._longest = int(plan.position.max()) + 1
        self._plans = {plan.tokens.device: plan}
        self._masks: dict[tuple[LayerKind, torch.device], torch.Tensor] = {}
        """For all layers of a kind on a device."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The attention output [B, Q, T, V] of one layer; [1, Q, N, V] of packed tokens.

        Raises:
            KvaccError: a text longer than the window of a layer that is treated as full.
        """
        if self.packing is None:
            return self._attend(call)
        spread = map(self.packing.spread, (call.query, call.key, call.value))
        return self.packing.gather(self._attend(call.with_tensors(*spread)))

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        kind = self.kinds[call.layer]
        self.layers += 1
        self.modules[call.layer] = call.module
        self.heads[call.layer] = self._deciding_heads(call)
        if self.prefix:
            call = call.after(self.prefix.layers[call.layer])
        if self.stored is not None:
            self.stored[call.layer] = StoredLayer(call.key, call.value)
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
        return self._dense(call, kind)

    def _plan_on(self, device: torch.device) -> Plan:
        """The plan beside a layer: the layers of a large model lie on several devices."""
        if device not in self._plans:
            self._plans[device] = self.plan.to(device)
        return self._plans[device]

    def _dense(self, call: AttentionCall, kind: LayerKind) -> torch.Tensor:
        """Every query reads all entries before it, as far as its layer's window goes."""
        plan = self._plan_on(call.query.device)
        rows, _, width, _ = call.query.shape
        total = self.offset + width
        if not self.offset and kind.name == "full" and plan.is_causal:
            return dense_attention(call, None)
        block = max(1, BLOCK_BYTES // (rows * total))
        if block >= width:
            if (kind, plan.tokens.device) not in self._masks:
                self._masks[kind, plan.tokens.device] = self._mask(plan, kind, 0, width)
            return dense_attention(call, self._masks[kind, plan.tokens.device])
        outputs = []
        for first in range(0, width, block):
            count = min(block, width - first)
            part = call.part(first, count, self.offset + first + count)
            outputs.append(dense_attention(part, self._mask(plan, kind, first, count)))
        return torch.cat(outputs, 2)

    def _mask(self, plan: Plan, kind: LayerKind, first: int, count: int) -> torch.Tensor:
        """bool [B, 1, count, offset + first + count] for queries from ``first`` on."""
        mask = self._readable(plan, first, count)
        here = plan.position[:, first : first + count]
        window = kind.visible(here, self._entry_position(plan)[:, : mask.shape[-1]])
        if window is not None:
            own = torch.arange(count, device=mask.device)
            window[:, own, self.offset + first + own] = True
            mask = mask & window
        return mask[:, None]

    def _readable(self, plan: Plan, first: int, count: int) -> torch.Tensor:
        """bool [B, count, offset + first + count]: the entries on each query's path. Padding
        reads itself and the prefix."""
        own = plan.ancestors_of(first, count, first + count)
        return torch.nn.functional.pad(own, (self.offset, 0), value=True)

    def _entry_position(self, plan: Plan) -> torch.Tensor:
        """long [B, W], each entry's place in the text."""
        before = torch.arange(self.offset, device=plan.position.device).expand(len(plan.position), -1)
        return torch.cat([before, plan.position], 1)

    def _deciding_heads(self, call: AttentionCall) -> int:
        return 1 if self.latent else call.key.shape[1]

    def _replay(self, call: AttentionCall) -> torch.Tensor:
        rows = len(call.query)
        heads = self._deciding_heads(call)
        if self.prefix:
            stored = self.prefix.layers[call.layer].entries.expand(rows)
        else:
            empty = torch.zeros(rows, heads, 0, device=call.query.device)
            stored = Entries(empty.long(), empty.bool(), empty)
        # What is hidden from the strategy's queries is still there for attention over full rows.
        readable = torch.ones_like(stored.alive)
        scan = start_scan(self._plan_on(call.query.device), self.strategy, stored, call.layer, readable)
        masses: list[torch.Tensor] = []

        def watch(part: AttentionCall, visible: torch.Tensor, first: int) -> None:
            masses.append(self._weigh(part, visible, first))

        out, seen_by, visible = replay(
            scan,
            call,
            self.rotation,
            use_compiled=not self.reference,
            record=self.record,
            watch=watch if self.weigh else None,
        )
        if self.stored is not None:
            self.stored[call.layer].entries = scan.current
        self._count(seen_by)
        if self.weigh:
            self._keep_mass(call.layer, masses)
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
        entry_position = self._entry_position(plan)
        selector.extend(NewEntries(call.key, entry_position, *self._paths(plan)))
        speculated = self.speculation.queries(call, self.packing) if self.speculation else None
        each = entry_bytes(call, self.latent)
        total = self.offset + width
        block = max(1, BLOCK_BYTES // (4 * rows * query_heads * total))
        outputs, counts, masks, masses = [], [], [], []
        for first in range(0, width, block):
            count = min(block, width - first)
            here, columns = slice(first, first + count), self.offset + first + count
            part = call.part(first, count, columns)
            readable = self._readable(plan, first, count) & (plan.segment >= 0)[:, here, None]
            asked = Asked(
                query=part.query,
                speculated=None if speculated is None else speculated[:, :, here],
                position=plan.position[:, here],
                budget=plan.budget[:, here].long(),
                acts=plan.acts[:, here],
                compresses=plan.compresses[:, here],
                readable=readable,
                entry_position=entry_position[:, :columns],
                own=torch.arange(columns - count, columns, device=call.query.device),
                logits=lambda query, key, part=part: attention_logits(part, query, key),
            )
            chosen = ask(selector, asked)
            outputs.append(
                attend_selected(part, chosen, self.rotation, asked.position, asked.entry_position[:, None])
            )
            counts.append(count_true(chosen.visible))
            # A query's own entry is on the device already.
            own = chosen.visible[:, :, torch.arange(count, device=asked.own.device), asked.own]
            brought = counts[-1].sum(1) - own.sum(1)
            self.moved[:, here] += (brought * each * asked.acts).to(self.moved.device)
            self._judge(part, chosen.visible, readable, first)
            if self.weigh:
                masses.append(self._weigh(part, chosen.visible, first))
            if self.record:
                masks.append(torch.nn.functional.pad(chosen.visible, (0, total - columns)))
        self._count(torch.cat(counts, 2))
        if self.weigh:
            self.mass_by_head[call.layer] = torch.cat(masses, 1)[self.plan.counted]
        if self.record:
            self.decisions[call.layer] = torch.cat(masks, 2)
        return torch.cat(outputs, 2)

    def _paths(self, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each entry: long [B, W], the column of the token before it on its path, -1 for a
        first one; bool [B, W], False at padding."""
        real = plan.segment >= 0
        if not self.offset:
            return plan.previous, real
        before = torch.arange(-1, self.offset - 1, device=real.device).expand(len(real), -1)
        # A tree starts where the prefix ends: its first tokens follow the prefix's last.
        own = torch.where(real, plan.previous + self.offset, -1)
        own = torch.where(real & (plan.previous < 0), self.offset - 1, own)
        return torch.cat([before, own], 1), torch.cat([torch.ones_like(before, dtype=torch.bool), real], 1)

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

    def _weigh(self, call: AttentionCall, visible: torch.Tensor, first: int) -> torch.Tensor:
        """float64 [B, n, H], share of the true attention on what is ``visible`` [B, H, n, W], at
        counted queries; 0 at others.

        The true attention is over every entry that full attention would have read, with the
        queries and keys of this run and at their places in the text.
        """
        plan = self._plan_on(call.query.device)
        rows, heads, count, columns = visible.shape
        mass = torch.zeros(rows, count, heads, dtype=torch.float64, device=self.kept.device)
        counted = plan.counted[:, first : first + count].any(0).nonzero()[:, 0]
        if counted.numel():
            readable = self._readable(plan, first, count)[:, counted]
            readable = readable & (plan.segment[:, first + counted] >= 0)[:, :, None]
            some = call.with_tensors(call.query[:, :, counted], call.key, call.value)
            found = mass_by_head(some, visible[:, :, counted], readable)
            mass[:, counted.to(mass.device)] = found.transpose(1, 2).to(mass.device)
        return mass

    def _keep_mass(self, layer: int, masses: list[torch.Tensor]) -> None:
        """Blocks [B, n, H] of a layer that evicts."""
        whole = torch.cat(masses, 1)
        self.mass_by_head[layer] = whole[self.plan.counted]
        # Every KV head serves equally many query heads, so this is their mean too.
        self.mass[layer] = whole.mean(-1)

    def _from_all_queries(self, call: AttentionCall) -> torch.Tensor:
        """A rule that needs every query of the row at once (H2O's ``scores=global``)."""
        rows, query_heads, width, _ = call.query.shape
        heads = self._deciding_heads(call)
        plan = self._plan_on(call.query.device)
        causal = self._readable(plan, 0, width) & (plan.segment >= 0)[:, :, None]
        logits = attention_logits(call, call.query, call.key)
        grouped = logits.view(rows, heads, query_heads // heads, width, width)
        aux = _grouped_aux(call, heads)
        attention = masked_softmax(grouped, causal[:, None, None], aux)
        visible = self.strategy.visible_from_all_queries(
            attention, plan.position, causal, plan.budget[:, 0].long()
        )
        attention = masked_softmax(grouped, visible[:, :, None], aux)
        self._count(visible.sum(-1, dtype=torch.int32))
        if self.weigh:
            self._keep_mass(call.layer, [self._weigh(call, visible, 0)])
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
    watch: Callable[[AttentionCall, torch.Tensor, int], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Attention of the plan's queries over stored entries and one another, under the
    strategy's decisions, in blocks of queries.

    Args:
        watch: called for each block with its call, what is visible (bool [B, H, n, W']) and the
            number of its first query.

    Returns:
        output [B, Q, T, V]; seen_by int32 [B, H, T]; visible bool [B, H, T, W] if recorded.
    """
    undecided = dense_beginning(scan) if use_compiled else 0
    use_compiled = use_compiled and compiled.supports(scan)
    rows, query_heads, width, _ = call.query.shape
    total = scan.offset + width
    block = max(1, BLOCK_BYTES // (4 * rows * query_heads * total))
    starts = [*range(0, undecided, block), *range(undecided, width, block), width]
    outputs, counts, masks = [], [], []
    for first, end in itertools.pairwise(starts):
        count = end - first
        # Later entries are visible to nobody in this block, so they are left out.
        columns = scan.offset + first + count
        part = call.part(first, count, columns)
        if scan.strategy.needs_attention:
            which = record or watch is not None
            if first < undecided:
                out, seen_by, visible = dense_block(scan, part, first, which)
            else:
                out, seen_by, visible = _scored_block(scan, part, first, use_compiled, which)
        else:
            out, seen_by, visible = _unscored_block(scan, part, rotation, first, use_compiled)
        outputs.append(out)
        counts.append(seen_by)
        if watch:
            watch(part, visible, first)
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
    mask = visible
    if call.softcap is not None or call.aux is not None:
        mask = for_query_heads(mask, query_heads)
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
    bias.masked_fill_(~for_query_heads(mask, query_heads), float("-inf"))
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
