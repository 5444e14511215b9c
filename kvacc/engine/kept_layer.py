"""Layers of the step path's cache: the kept set of a strategy that evicts, and the whole text."""

from __future__ import annotations

import torch
from transformers.cache_utils import CacheLayerMixin

from kvacc.engine.scan import Entries
from kvacc.errors import KvaccError

GROWTH = 128
"""Columns by which a whole layer's tensors grow: a copy of everything in so many tokens."""


class KeptLayer(CacheLayerMixin):
    """Keys and values of one layer's kept set.

    Args:
        heads: heads that decide, when they are not the KV heads.
        any_order: an arriving token may take the slot of one that was evicted, which spares
            moving all the others; only for strategies that ask for nothing but positions.

    Attributes:
        keys [B, K, S, D], values [B, K, S, V]: S slots, in text order unless ``any_order``; a
            row that keeps fewer entries than another has empty slots.
        entries: which slots are alive, their positions and scores; H deciding heads
            (K, or 1 where all heads share a latent).
        seen: columns seen so far, padding included; what the model counts positions by.
    """

    is_sliding = False
    is_croppable = False

    def __init__(self, heads: int | None = None, any_order: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.any_order = any_order
        self.entries: Entries | None = None
        self.seen = 0
        self._has_free_slot = False
        self._is_in_order = True
        self._taken: torch.Tensor | None = None
        """long [B, H], the slots that the newest token took; None when it came behind the others."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        self.keys = key_states[:, :, :0]
        self.values = value_states[:, :, :0]
        heads = self.heads or key_states.shape[1]
        empty = torch.zeros(key_states.shape[0], heads, 0, device=self.device)
        self.entries = Entries(empty.long(), empty.bool(), empty)
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Stored and new keys and values; what is kept of them is decided after attention."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[-2]
        self._taken = None
        if count == 1 and self._has_free_slot:
            self._taken = (~self.entries.alive).to(torch.uint8).argmax(-1)
            self._is_in_order = False
            for stored, new in ((self.keys, key_states), (self.values, value_states)):
                slot = self._taken[..., None, None].expand(-1, stored.shape[1], 1, stored.shape[3])
                stored.scatter_(2, slot, new)
        else:
            # A chunk is replayed by scans that take the order of slots for that of the text.
            if self._has_free_slot or (count > 1 and not self._is_in_order):
                self._into_text_order()
            self.keys = torch.cat([self.keys, key_states], -2)
            self.values = torch.cat([self.values, value_states], -2)
        self.seen += count
        return self.keys, self.values

    def joined(self, position: torch.Tensor, real: torch.Tensor, score: torch.Tensor) -> Entries:
        """The entries with the token that :meth:`update` stored last.

        Args:
            position: long [B]. real: bool [B], False at padding. score: float32 [B, H].
        """
        stored = self.entries
        shape = (*stored.alive.shape[:2], 1)
        new = (position[:, None, None].expand(shape), real[:, None, None].expand(shape), score[..., None])
        old = (stored.position, stored.alive, stored.score)
        if self._taken is None:
            return Entries(*(torch.cat(pair, -1) for pair in zip(old, new, strict=True)))
        slot = self._taken[..., None]
        return Entries(*(a.scatter(-1, slot, b) for a, b in zip(old, new, strict=True)))

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        stored = self.keys.shape[-2] if self.is_initialized else 0
        return stored + query_length, self.seen - stored

    def get_max_length(self) -> int:
        return -1

    def retain(self, entries: Entries, physical: bool) -> None:
        """Store ``entries`` (over the current slots); with ``physical`` free the others."""
        if not physical:
            self.entries = entries
            return
        size = int(entries.alive.sum(-1).max())
        free = entries.alive.shape[-1] - size
        if self.any_order and free <= 1:
            self.entries, self._has_free_slot = entries, free == 1
            return
        # A stable sort of "is gone" brings the kept slots to the front in the order they have.
        self._move(entries, (~entries.alive).to(torch.uint8).argsort(dim=-1, stable=True)[..., :size])

    def _into_text_order(self) -> None:
        """Slots by position, without those that are free in every head."""
        last = torch.iinfo(torch.long).max
        order = self.entries.position.masked_fill(~self.entries.alive, last).argsort(dim=-1, stable=True)
        self._move(self.entries, order[..., : int(self.entries.alive.sum(-1).max())])
        self._is_in_order = True

    def _move(self, entries: Entries, slots: torch.Tensor) -> None:
        """Keep the ``slots`` long [B, H, S'], in their order."""
        self.entries = Entries(
            *(x.gather(-1, slots) for x in (entries.position, entries.alive, entries.score))
        )
        self._has_free_slot = False
        heads = self.keys.shape[1]
        slots = slots.expand(-1, heads, -1)[..., None]
        self.keys = self.keys.gather(2, slots.expand(-1, -1, -1, self.keys.shape[-1]))
        self.values = self.values.gather(2, slots.expand(-1, -1, -1, self.values.shape[-1]))

    def measured_bytes(self) -> int:
        """Bytes of the entries alive now, keys and values of all rows."""
        if not self.is_initialized:
            return 0
        per_entry = self.keys.shape[-1] * self.keys.element_size()
        per_entry += self.values.shape[-1] * self.values.element_size()
        copies = self.keys.shape[1] // self.entries.alive.shape[1]
        return int(self.entries.alive.sum()) * copies * per_entry

    def reset(self) -> None:
        self.keys = self.values = self.entries = self._taken = None
        self.is_initialized = self._has_free_slot = False
        self._is_in_order = True
        self.seen = 0

    def _select_rows(self, rows: torch.Tensor) -> None:
        if self.is_initialized:
            self.keys, self.values = self.keys[rows], self.values[rows]
            e = self.entries
            self.entries = Entries(e.position[rows], e.alive[rows], e.score[rows])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._select_rows(beam_idx.to(self.device) if self.is_initialized else beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            rows = torch.arange(self.keys.shape[0], device=self.device).repeat_interleave(repeats)
            self._select_rows(rows)

    def crop(self, tokens_to_remove: int) -> None:
        raise KvaccError(
            "an evicting cache cannot be cropped: evicted entries are gone; use no assisted decoding"
        )


class WholeLayer(KeptLayer):
    """Keys and values of a layer that forgets nothing.

    Its tensors are the filled part of larger ones, so that a token is written and nothing
    copied; all that is known of its entries follows from the padding.

    Args:
        padding: long [B], left padding columns of each row.
    """

    def __init__(self, padding: torch.Tensor, heads: int | None = None) -> None:
        super().__init__(heads)
        self.padding = padding
        self._room: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Stored and new keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.seen + key_states.shape[-2]
        if self._room is None or end > self._room[0].shape[2]:
            # The first time it is a prompt, of which it is not known whether more follows.
            room = end + GROWTH if self.seen else end
            self._room = tuple(_grown(x, room) for x in (self.keys, self.values))
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, self.seen : end] = new
        self.keys, self.values = (room[:, :, :end] for room in self._room)
        self.seen = end
        return self.keys, self.values

    @property
    def entries(self) -> Entries | None:
        """Every token of each row, without scores."""
        if not self.is_initialized:
            return None
        rows, heads = self.keys.shape[0], self.heads or self.keys.shape[1]
        column = torch.arange(self.seen, device=self.device)
        place = (column - self.padding.to(self.device)[:, None])[:, None].expand(rows, heads, self.seen)
        return Entries(place, place >= 0, torch.zeros(place.shape, device=self.device))

    @entries.setter
    def entries(self, value: None) -> None:
        if value is not None:
            raise RuntimeError("a layer that forgets nothing was given a kept set")

    def reset(self) -> None:
        super().reset()
        self._room = None

    def _select_rows(self, rows: torch.Tensor) -> None:
        if self.is_initialized:
            self.keys, self.values = self.keys[rows], self.values[rows]
            self.padding = self.padding[rows.to(self.padding.device)]
            self._room = None  # another cache may be writing there


def _grown(stored: torch.Tensor, columns: int) -> torch.Tensor:
    """A tensor [B, K, columns, D] that begins with ``stored``."""
    grown = stored.new_empty(*stored.shape[:2], columns, stored.shape[3])
    grown[:, :, : stored.shape[2]] = stored
    return grown
