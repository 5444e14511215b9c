"""Attention of one layer over an offloaded cache, on the step path."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvacc.engine.attention import AttentionCall, attention_logits
from kvacc.engine.offload import OffloadedLayer
from kvacc.engine.plan import limits_for
from kvacc.engine.rotary import Rotation
from kvacc.engine.selecting import ask, attend_selected, layer_context
from kvacc.engine.speculation import Speculation
from kvacc.select_strategy import Asked, NewEntries, Selection
from kvacc.strategy import Strategy


class OffloadedAttention:
    """Lets each query read what the strategy selects, and brings it to the device.

    Args:
        rows: how each row of the batch is read (:class:`~kvacc.engine.stepping.RowReading`).
        layers: the cache's layers, by index.
    """

    def __init__(
        self,
        strategy: Strategy,
        rows: Sequence,
        layers: list,
        rotation: Rotation | None,
        latent: bool,
        speculation: Speculation | None,
    ) -> None:
        self.strategy = strategy
        self.rows = rows
        self.layers = layers
        self.rotation = rotation
        self.latent = latent
        self.speculation = speculation

    def attend(
        self, call: AttentionCall, layer: OffloadedLayer
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The attention of the newest tokens, whose entries the layer has stored.

        Returns:
            output [B, Q, n, V]; visible bool [B, H, n, W] over all columns seen;
            position long [B, n], negative at padding; long [B], bytes brought.
        """
        rows, _, count, _ = call.query.shape
        device = call.query.device
        first = layer.seen - count
        heads = 1 if self.latent else call.key.shape[1]
        own = torch.arange(first, layer.seen, device=device)
        position, entries = self._positions(own, device), self._positions(torch.arange(layer.seen), device)
        if layer.selector is None:
            compressed = torch.tensor([row.compressed for row in self.rows], device=device)
            layer.selector = self.strategy.selector(
                layer_context(call, heads, compressed, self.rotation, self.speculation)
            )
        layer.selector.extend(
            NewEntries(
                call.key,
                position.clamp(min=0),
                torch.where(position > 0, own - 1, -1),
                position >= 0,
            )
        )
        readable = (entries[:, None] >= 0) & (entries[:, None] <= position[..., None])
        ahead = layer.take_ahead()
        if ahead is not None:
            chosen, brought = ahead
            itself = readable[:, None, :, -1:].expand(rows, heads, 1, 1)
            chosen = Selection(torch.cat([chosen, itself], -1))
        else:
            speculated = self.speculation.queries(call) if self.speculation else None
            asked = self._asked(call, call.query, speculated, own, position, entries, readable)
            chosen = ask(layer.selector, asked)
            brought = layer.bring(chosen.visible[..., :first].any(2))
        layer.selector.settle()
        self.fetch_for_the_next(call)
        slots = torch.cat([brought.column, own.expand(rows, heads, count)], -1)
        columns = slots[:, :, None].expand(-1, -1, count, -1)
        valid = torch.nn.functional.pad(brought.valid, (0, count), value=True)
        on_device = Selection(
            chosen.visible.gather(-1, columns) & valid[:, :, None],
            None if chosen.far is None else chosen.far.expand_as(chosen.visible).gather(-1, columns),
            chosen.distance,
        )
        key, value = brought.key, brought.value
        if self.latent:  # one latent is stored; the module makes keys and values of all heads from it
            empty = key.shape[2] == 0
            key, value = (
                (call.key[:, :, :0], call.value[:, :, :0]) if empty else call.module.expand_kv(key, value)
            )
        here = call.with_tensors(call.query, torch.cat([key, call.key], 2), torch.cat([value, call.value], 2))
        place = entries.clamp(min=0)[:, None].expand(rows, heads, -1).gather(-1, slots)
        out = attend_selected(here, on_device, self.rotation, position, place)
        return out, chosen.visible, position, brought.bytes_of_row

    def _positions(self, columns: torch.Tensor, device: torch.device) -> torch.Tensor:
        """long [B, n], place in the text; negative at padding."""
        padding = torch.tensor([row.padding for row in self.rows], device=device)
        return columns.to(device) - padding[:, None]

    def _asked(self, call, query, speculated, own, position, entries, readable) -> Asked:
        """The question of queries at ``position`` [B, n]; the other tensors as in :class:`Asked`,
        places in ``entries`` [B, W] negative at padding."""
        dense = torch.tensor([row.dense for row in self.rows], device=position.device)[:, None]
        acts_after = (dense == 0) | self.strategy.acts_while_decoding
        budget = [
            limits_for(self.strategy, row.compressed, places)[0]
            for row, places in zip(self.rows, position.clamp(min=0).tolist(), strict=True)
        ]
        return Asked(
            query=query,
            speculated=speculated,
            position=position,
            budget=torch.tensor(budget, device=position.device),
            acts=(position >= dense) & acts_after & (position >= 0),
            compresses=(position == dense - 1),
            readable=readable,
            entry_position=entries.clamp(min=0),
            own=own,
            logits=lambda query, key: attention_logits(call, query, key),
        )

    def fetch_for_the_next(self, call: AttentionCall) -> None:
        """While this layer runs, choose for the next one and start to bring it."""
        if not getattr(self.strategy, "selects_ahead", False) or call.query.shape[2] != 1:
            return
        following = call.layer + 1
        layer = self.layers[following] if following < len(self.layers) else None
        if not isinstance(layer, OffloadedLayer) or layer.selector is None or layer.seen == 0:
            return
        speculated = self.speculation.queries_ahead(following, call.layer)
        if speculated is None:
            return
        device = call.query.device
        position = self._positions(torch.tensor([layer.seen]), device)
        entries = self._positions(torch.arange(layer.seen), device)
        readable = ((entries >= 0) & (position >= 0))[:, None]
        asked = self._asked(call, None, speculated, None, position, entries, readable)
        layer.fetch_ahead(ask(layer.selector, asked).visible)
