"""The step path: a real cache that holds only what the strategy keeps.

Used for generation, for every latency and memory figure, and as the oracle of the
parallel path in tests. One token at a time is the plain reading of a strategy's
definition (:meth:`StepSession._one_token`); a chunk of several tokens, such as a
prompt, is replayed token by token inside the layer and then really evicted, so the
result does not depend on how a prompt is cut into chunks.

Rows are padded on the left. Each layer keeps positions and validity of its own, so
padding never enters a kept set and layers may hold different entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import DynamicCache

from kvacc.engine import compiled
from kvacc.engine.attention import AttentionCall, attention_logits, dense_attention, weighted_values
from kvacc.engine.kept_layer import KeptLayer, WholeLayer
from kvacc.engine.layers import LayerKind
from kvacc.engine.offload import OffloadedLayer
from kvacc.engine.offloaded_attention import OffloadedAttention
from kvacc.engine.parallel import _grouped_aux, replay
from kvacc.engine.plan import NO_LIMIT, Plan, limits_for
from kvacc.engine.rotary import Rotation
from kvacc.engine.scan import masked_softmax, start_scan
from kvacc.engine.selecting import selects_in
from kvacc.engine.speculation import Speculation
from kvacc.errors import KvaccError
from kvacc.strategy import EvictStrategy, Strategy


@dataclass(frozen=True)
class RowReading:
    """How one row of a generation is read.

    Args:
        padding: left padding columns before its first token.
        dense: tokens read with the full cache before the strategy acts (0: at once).
        compressed: length that a fractional budget refers to.
    """

    padding: int
    dense: int
    compressed: int


class StepSession:
    """Answers the attention calls of a generation; owns its cache.

    Args:
        rows: how each row of the batch is read.

    Attributes:
        cache: hand this to the model as ``cache=``.
        passes: for each forward pass so far, what its last query read:
            (kept float64 [B], share of entries visible, mean over layers and KV heads;
            hidden bool [B], some entry was hidden).
        moved: for each forward pass, bytes brought from the host pool, long [B].
        reads: with ``record``, for each forward pass: layer -> bool [B, H, n, C], what each of
            its queries read of all columns seen so far, padding included.
    """

    def __init__(
        self,
        config,
        strategy: Strategy,
        kinds: list[LayerKind],
        rows: Sequence[RowReading],
        rotation: Rotation | None = None,
        latent: bool = False,
        device: torch.device | str = "cpu",
        speculation: Speculation | None = None,
        record: bool = False,
    ):
        if not strategy.causal:
            raise KvaccError(f"{strategy!r} reads future tokens, so it cannot decode token by token")
        self.strategy = strategy
        self.kinds = kinds
        self.rows = list(rows)
        self.rotation = rotation
        self.padding = torch.tensor([r.padding for r in rows], device=device)
        self._padded = any(r.padding for r in rows)
        self.cache = DynamicCache(config=config.get_text_config(decoder=True))
        heads = 1 if latent else None
        for index, kind in enumerate(kinds):
            if kind.name == "full":
                self.cache.layers[index] = (
                    OffloadedLayer()
                    if selects_in(strategy, index, speculation)
                    else KeptLayer(heads, compiled.needs_positions_only(strategy))
                    if isinstance(strategy, EvictStrategy)
                    else WholeLayer(self.padding, heads)
                )
        self.inputs = speculation.inputs if speculation else None
        self.record = record
        self.reads: list[dict[int, torch.Tensor]] = []
        self._reads: dict[int, torch.Tensor] = {}
        self.moved: list[torch.Tensor] = []
        self._moved = torch.zeros(len(self.rows), dtype=torch.long, device=device)
        self._offloaded = OffloadedAttention(
            strategy, self.rows, self.cache.layers, rotation, latent, speculation
        )
        self.passes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._kept = torch.zeros(len(self.rows), dtype=torch.float64, device=device)
        self._hidden = torch.zeros(len(self.rows), dtype=torch.bool, device=device)
        attending = [i for i, kind in enumerate(kinds) if kind.name != "other"]
        self._last_layer, self._layers = attending[-1], len(attending)
        self._plan: tuple[tuple[int, int, torch.device], Plan] | None = None
        self._limits_known: tuple[tuple[int, torch.device], tuple] | None = None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        out = self._answer(call)
        if call.layer == self._last_layer:
            self.passes.append((self._kept / self._layers, self._hidden.clone()))
            self.moved.append(self._moved.clone())
            if self.record:
                self.reads.append(self._reads)
                self._reads = {}
            self._kept.zero_()
            self._hidden.zero_()
            self._moved.zero_()
        return out

    def _answer(self, call: AttentionCall) -> torch.Tensor:
        count = call.query.shape[2]
        layer = self.cache.layers[call.layer]
        if isinstance(layer, OffloadedLayer):
            self.kinds[call.layer].require_length(layer.seen)
            return self._selected(call, layer)
        # The layer after one whose entries are on the device may be offloaded.
        self._offloaded.fetch_for_the_next(call)
        if not isinstance(layer, KeptLayer):
            return self._windowed(call, self.kinds[call.layer], layer.get_seq_length())
        if call.key.shape[2] != layer.keys.shape[2]:
            raise RuntimeError(f"layer {call.layer} was updated but its attention saw other keys")
        first = layer.seen - count
        if not isinstance(self.strategy, EvictStrategy):
            return self._full(call, layer, first)
        self.kinds[call.layer].require_length(layer.seen)
        if count == 1:
            return self._one_token(call, layer, first)
        return self._chunk(call, layer, first)

    def _selected(self, call: AttentionCall, layer: OffloadedLayer) -> torch.Tensor:
        out, visible, position, moved = self._offloaded.attend(call, layer)
        self._moved += moved.to(self._moved.device)
        self._measure(visible[:, :, -1].sum(-1), position[:, -1])
        columns = torch.arange(visible.shape[-1], device=visible.device)
        self._note(call.layer, visible, columns.expand(*visible.shape[:2], -1), layer.seen)
        return out

    def _note(self, layer: int, visible: torch.Tensor, columns: torch.Tensor, total: int) -> None:
        """With ``record``: visible bool [B, H, n, S] of slots that are ``columns`` [B, H, S]."""
        if self.record:
            rows, heads, count, _ = visible.shape
            columns = columns.clamp(0, total - 1)[:, :, None].expand_as(visible)
            read = torch.zeros(rows, heads, count, total, dtype=torch.uint8, device=visible.device)
            self._reads[layer] = read.scatter_reduce(3, columns, visible.to(torch.uint8), "amax").bool()

    def _windowed(self, call: AttentionCall, kind: LayerKind, end: int) -> torch.Tensor:
        """A sliding or chunked layer: its entries are the newest of ``end`` columns, in order."""
        count, width = call.query.shape[2], call.key.shape[2]
        padding = self.padding.to(call.key.device)[:, None]
        query = torch.arange(end - count, end, device=call.key.device) - padding
        key = torch.arange(end - width, end, device=call.key.device) - padding
        mask = (key[:, None] >= 0) & (key[:, None] <= query[:, :, None])
        window = kind.visible(query, key)
        if window is not None:
            mask = mask & window
        self._kept += 1
        columns = torch.arange(end - width, end, device=mask.device).expand(mask.shape[0], 1, -1)
        self._note(call.layer, mask[:, None], columns, end)
        return dense_attention(call, _never_empty(mask)[:, None])

    def _full(self, call: AttentionCall, layer: KeptLayer, first: int) -> torch.Tensor:
        rows, _, count, _ = call.query.shape
        width = call.key.shape[2]
        self._kept += 1
        plain = not self._padded and (first == 0 or count == 1)
        mask = None
        if not plain or self.record:
            padding = self.padding.to(call.key.device)[:, None]
            query = torch.arange(first, first + count, device=call.key.device) - padding
            key = torch.arange(width, device=call.key.device) - padding
            mask = (key[:, None] >= 0) & (key[:, None] <= query[:, :, None])
            columns = torch.arange(width, device=mask.device).expand(rows, 1, -1)
            self._note(call.layer, mask[:, None], columns, width)
        return dense_attention(call, None if plain else _never_empty(mask)[:, None])

    def _one_token(self, call: AttentionCall, layer: KeptLayer, column: int) -> torch.Tensor:
        """The strategy as its paper states it: join, attend, observe, evict."""
        strategy = self.strategy
        rows, query_heads = call.query.shape[:2]
        heads = layer.entries.alive.shape[1]
        padding = self.padding.to(call.key.device)
        position = column - padding  # [B]; negative in padding
        real = position >= 0
        place = position.clamp(min=0)
        entries = layer.joined(place, real, strategy.initial_score(place, call.layer, heads))
        query, key = call.query, call.key
        if strategy.rotates_to_cache_positions:
            # Places in the cache: the rank of each kept entry in text order.
            rank = entries.alive.long().cumsum(-1) - 1
            key = self.rotation.rotate(
                call.layer, key, torch.where(entries.alive, rank - entries.position, 0)
            )
            newest = (rank[:, :1, -1] - position[:, None]).clamp(max=0)
            query = self.rotation.rotate(call.layer, query, newest[..., None])
        width = key.shape[2]
        logits = attention_logits(call, query, key).view(rows, heads, query_heads // heads, width)
        aux = _grouped_aux(call, heads)
        attention = masked_softmax(logits, entries.alive[:, :, None], aux)
        out = weighted_values(attention.view(rows, query_heads, 1, width), call.value)
        if strategy.needs_attention:
            read = attention
            if strategy.reads_full_rows:
                # A simulation: nothing was freed, so attention over every earlier token exists.
                every = torch.ones_like(entries.alive)
                before = torch.arange(width, device=real.device) < padding[:, None]
                read = masked_softmax(logits, (every & ~before[:, None])[:, :, None], aux)
            score = strategy.observe(entries.score, read)
            entries.score = torch.where(real[:, None, None], score, entries.score)
        self._measure(entries.alive.sum(-1), position)
        self._note(
            call.layer,
            (entries.alive & real[:, None, None])[:, :, None],
            entries.position + padding[:, None, None],
            layer.seen,
        )
        evicts, any_evicts, budget, recent, sinks = self._limits_at(column, position)
        if any_evicts:
            keep, score = strategy.keep(
                entries.score, entries.position, entries.alive, position + 1, budget, recent, sinks
            )
            entries.alive = torch.where(evicts[:, None, None], keep, entries.alive)
            entries.score = torch.where(evicts[:, None, None], score, entries.score)
        layer.retain(entries, physical=strategy.physical_eviction)
        return out

    def _limits_at(self, column: int, position: torch.Tensor) -> tuple:
        """:meth:`_limits`, and whether any row evicts; the same for all layers on a device."""
        known = self._limits_known
        if known is None or known[0] != (column, position.device):
            evicts, *limits = self._limits(position)
            known = self._limits_known = ((column, position.device), (evicts, bool(evicts.any()), *limits))
        return known[1]

    def _limits(self, position: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Does each row evict after the token at ``position`` [B], and to what limits?"""
        limits, evicts = [], []
        for row, place in zip(self.rows, position.tolist(), strict=True):
            real = place >= 0
            budget, recent, sinks = limits_for(self.strategy, row.compressed, [max(place, 0)])
            limits.append((budget[0], recent[0], sinks[0]) if real else (NO_LIMIT, 0, 0))
            in_dense = place < row.dense - 1
            decodes = place >= row.dense
            acts = not in_dense and (not decodes or row.dense == 0 or self.strategy.acts_while_decoding)
            evicts.append(real and acts)
        columns = torch.tensor(limits, device=position.device).T
        return torch.tensor(evicts, device=position.device), *columns

    def _chunk(self, call: AttentionCall, layer: KeptLayer, first: int) -> torch.Tensor:
        count = call.query.shape[2]
        if self._plan is None or self._plan[0] != (first, count, call.key.device):
            self._plan = ((first, count, call.key.device), self._chunk_plan(first, count, call.key.device))
        plan = self._plan[1]
        readable = None
        if self.strategy.reads_full_rows:  # nothing was freed: slots are columns
            stored = layer.entries.alive
            column = torch.arange(stored.shape[-1], device=stored.device)
            readable = (column >= self.padding.to(stored.device)[:, None])[:, None].expand_as(stored)
        scan = start_scan(plan, self.strategy, layer.entries, call.layer, readable)
        stored = layer.entries.position + self.padding.to(call.key.device)[:, None, None]
        out, seen_by, visible = replay(scan, call, self.rotation, record=self.record)
        if self.record:
            arrived = torch.arange(first, layer.seen, device=stored.device).expand(*stored.shape[:2], -1)
            self._note(call.layer, visible, torch.cat([stored, arrived], -1), layer.seen)
        position = plan.position[:, -1]
        real = plan.segment[:, -1] >= 0
        self._measure(seen_by[:, :, -1], torch.where(real, position, -1))
        layer.retain(scan.current, physical=self.strategy.physical_eviction)
        return out

    def _chunk_plan(self, first: int, count: int, device) -> Plan:
        """A plan whose rows are the chunk's tokens: padding, dense part, then the rest."""
        rows = len(self.rows)
        shape = (rows, count)
        column = torch.arange(first, first + count)
        padding = torch.tensor([r.padding for r in self.rows])
        position = column - padding[:, None]
        dense = torch.tensor([r.dense for r in self.rows])[:, None]
        segment = torch.where(position < 0, -1, torch.where(position < dense, 0, 1)).int()
        starts, stops, compress = [], [], []
        for row in self.rows:
            ends = [min(max(row.padding + row.dense - first, 0), count), count]
            begins = [min(max(row.padding - first, 0), count), max(ends[0], row.padding - first, 0)]
            starts.append(begins)
            stops.append(ends)
            compress.append([0 < row.dense == first + ends[0] - row.padding, False])
        limits = [
            limits_for(self.strategy, row.compressed, place.clamp(min=0).tolist())
            for row, place in zip(self.rows, position, strict=True)
        ]
        # A row that starts with its second segment takes the stored state, as the first does.
        parent = [[-1, 0 if start[0] < stop[0] else -1] for start, stop in zip(starts, stops, strict=True)]
        acts = [row.dense == 0 or self.strategy.acts_while_decoding for row in self.rows]

        def limit(which: int) -> torch.Tensor:
            return torch.tensor([x[which] for x in limits], dtype=torch.int32)

        return Plan(
            tokens=torch.zeros(shape, dtype=torch.long),
            position=position.clamp(min=0),
            segment=segment,
            start=torch.tensor(starts, dtype=torch.int32),
            stop=torch.tensor(stops, dtype=torch.int32),
            parent=torch.tensor(parent, dtype=torch.int32),
            dense=torch.tensor([[True, not a] for a in acts]),
            compress=torch.tensor(compress),
            budget=limit(0),
            recent=limit(1),
            sinks=limit(2),
            counted=torch.zeros(shape, dtype=torch.bool),
            compressed=torch.tensor([row.compressed for row in self.rows]),
        ).to(device)

    def _measure(self, visible: torch.Tensor, position: torch.Tensor) -> None:
        """visible [B, H]: entries read by the query at ``position`` [B]."""
        visible, position = visible.to(self._kept.device), position.to(self._kept.device)
        could = (position + 1).clamp(min=1)[:, None]
        self._kept += (visible.double() / could).mean(1)
        self._hidden |= (visible < could).any(1) & (position >= 0)

    def measured_bytes(self) -> int:
        """Bytes held on the device now: keys and values in every layer that stores entries there,
        and the summaries of offloaded ones."""
        total = 0
        for layer in self.cache.layers:
            if isinstance(layer, KeptLayer):
                total += layer.measured_bytes()
            elif isinstance(layer, OffloadedLayer):
                total += layer.device_bytes()
            elif getattr(layer, "keys", None) is not None:
                total += layer.keys.nbytes + layer.values.nbytes
        return total

    def host_bytes(self) -> int:
        """Bytes of keys and values in host memory now."""
        return sum(layer.host_bytes() for layer in self.cache.layers if isinstance(layer, OffloadedLayer))


def _never_empty(mask: torch.Tensor) -> torch.Tensor:
    """Padding queries read something, so that no softmax row is empty. [B, n, W]."""
    return mask | ~mask.any(-1, keepdim=True)
