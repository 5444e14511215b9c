"""The step path of strategies that select: a cache in host memory, of which a selection is
brought to the device for each token.

On CUDA the pool is pinned memory and copies run on a stream of their own, started while the
layer before still runs where the strategy can choose that early. On a machine without a
GPU the pool and what is brought from it are two allocations, and the counts are the same.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from transformers.cache_utils import CacheLayerMixin

from kvacc.engine.host_memory import on_host
from kvacc.engine.transfer_meter import Kind, TransferMeter
from kvacc.errors import KvaccError
from kvacc.select_strategy import Selector


@dataclass
class Brought:
    """Entries on the device: S slots per deciding head.

    Attributes:
        column: long [B, H, S]; valid: bool [B, H, S].
        key: [B, H, S, D]; value: [B, H, S, V], as stored.
        bytes_of_row: long [B], bytes copied for each row.
    """

    column: torch.Tensor
    valid: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bytes_of_row: torch.Tensor


class OffloadedLayer(CacheLayerMixin):
    """One layer's keys and values, in host memory.

    Attributes:
        pool_keys [B, H, capacity, D], pool_values [B, H, capacity, V]: of which the first
            ``seen`` columns are filled. With latent attention they are the latent and its
            rotary part, of one head.
        seen: columns seen so far, padding included.
        selector: the strategy's summary, on the device.
        ahead: a selection that was made, and brought, before the layer ran.
        meter: times the copies, where somebody wants to know.
    """

    is_sliding = False
    is_croppable = False

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.pool_keys: torch.Tensor | None = None
        self.pool_values: torch.Tensor | None = None
        self.selector: Selector | None = None
        self.ahead: tuple[torch.Tensor, Brought] | None = None
        self.stream: torch.cuda.Stream | None = None
        self.meter: TransferMeter | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        self.pool_keys = self._allocate(key_states, 0)
        self.pool_values = self._allocate(value_states, 0)
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device)
        self.is_initialized = True

    def _allocate(self, like: torch.Tensor, capacity: int) -> torch.Tensor:
        shape = (like.shape[0], like.shape[1], capacity, like.shape[3])
        with on_host():
            return torch.empty(shape, dtype=like.dtype, pin_memory=self.device.type == "cuda")

    def update(self, key_states, value_states, *args, **kwargs):
        """Store the new entries in the pool. The layer is given back the new ones only; the
        others are brought when it is known which of them are read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.seen + key_states.shape[-2]
        if end > self.pool_keys.shape[2]:
            # Doubling keeps the copies of a long generation linear in its length.
            capacity = max(end, 2 * self.pool_keys.shape[2])
            for name in ("pool_keys", "pool_values"):
                old = getattr(self, name)
                grown = self._allocate(old, capacity)
                grown[:, :, : self.seen] = old[:, :, : self.seen]
                setattr(self, name, grown)
        with self._timing("store"):
            self.pool_keys[:, :, self.seen : end] = key_states
            self.pool_values[:, :, self.seen : end] = value_states
        self.seen = end
        return key_states, value_states

    def bring(self, wanted: torch.Tensor, ahead: bool = False) -> Brought:
        """Copy entries to the device, these and no others.

        Args:
            wanted: bool [B, H, W], W at most ``seen``.
            ahead: the layer has not run yet.
        """
        wanted = wanted.cpu()  # waits until the choice is made, which is no time of copying
        if self.meter is not None:
            self.meter.count(int(wanted.sum()), ahead)
        with self._timing("bring ahead" if ahead else "bring"):
            return self._copied(wanted)

    def _timing(self, kind: Kind) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.meter is None else self.meter.timing(kind)

    def _copied(self, wanted: torch.Tensor) -> Brought:
        rows, heads, _ = wanted.shape
        counts = wanted.sum(-1)
        size = int(counts.max()) if counts.numel() else 0
        slots = (~wanted).to(torch.uint8).argsort(dim=-1, stable=True)[..., :size]
        valid = torch.arange(size) < counts[..., None]
        entry = valid.nonzero(as_tuple=True)
        column = slots[entry]
        brought, moved = [], 0
        for pool in (self.pool_keys, self.pool_values):
            with on_host():
                packed = pool[entry[0], entry[1], column]
                if self.stream is not None:
                    packed = packed.pin_memory()
            moved += packed.shape[-1] * packed.element_size()
            on_device = packed.to(self.device, non_blocking=True, copy=True)
            filled = torch.zeros(rows, heads, size, pool.shape[3], dtype=pool.dtype, device=self.device)
            filled[tuple(index.to(self.device) for index in entry)] = on_device
            brought.append(filled)
        return Brought(
            slots.to(self.device),
            valid.to(self.device),
            *brought,
            bytes_of_row=(counts.sum(1) * moved).to(self.device),
        )

    def fetch_ahead(self, visible: torch.Tensor) -> None:
        """Start bringing ``visible`` bool [B, H, 1, W] for the layer's next token."""
        if self.stream is None:
            self.ahead = (visible, self.bring(visible[:, :, 0], ahead=True))
            return
        # The copies wait for the choice, and nothing else waits for them.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self.ahead = (visible, self.bring(visible[:, :, 0], ahead=True))

    def take_ahead(self) -> tuple[torch.Tensor, Brought] | None:
        """What :meth:`fetch_ahead` brought, once."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None and self.stream is not None:
            with self._timing("wait"):
                torch.cuda.current_stream(self.device).wait_stream(self.stream)
            for tensor in (ahead[1].key, ahead[1].value, ahead[1].column, ahead[1].valid):
                tensor.record_stream(torch.cuda.current_stream(self.device))
        return ahead

    def host_bytes(self) -> int:
        """Bytes of the entries in the pool."""
        if not self.is_initialized:
            return 0
        return sum(pool[:, :, : self.seen].numel() * pool.element_size() for pool in self._pools())

    def device_bytes(self) -> int:
        """Bytes held on the device between tokens: the summary."""
        return self.selector.measured_bytes() if self.selector else 0

    def _pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pool_keys, self.pool_values

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.pool_keys = self.pool_values = self.selector = self.ahead = None
        self.is_initialized = False
        self.seen = 0

    def _select_rows(self, rows: torch.Tensor) -> None:
        if not self.is_initialized:
            return
        host = rows.cpu()
        for name in ("pool_keys", "pool_values"):
            with on_host():
                chosen = getattr(self, name)[host]
                setattr(self, name, chosen.pin_memory() if self.stream is not None else chosen)
        self.ahead = None
        self.selector.reorder(rows.to(self.device))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._select_rows(torch.arange(self.pool_keys.shape[0]).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        raise KvaccError("an offloaded cache cannot be cropped; use no assisted decoding")
