"""The contract between a strategy that selects and the engine.

A :class:`SelectStrategy` forgets nothing: keys and values live in host memory, and
for each query a selection of them is brought to the device. What it needs to choose,
a *summary* of the entries (InfiniGen's partial keys, Quest's page bounds, InfLLM's
representative keys), stays on the device in a :class:`Selector`, one per layer. Both
execution paths call it in the same way:

1. ``extend``: entries arrive, and the selector updates its summary;
2. ``select``: which of the readable entries does each query read?

The parallel path extends by all tokens of a layer at once, the step path by one token
or one chunk at a time. So ``select`` may use, for each query, only entries that
``Asked.readable`` allows it, and whatever it accumulates from queries must not depend
on how they were cut into chunks.

Shapes: B rows, Q query heads, K heads of the stored keys, H heads that decide (K, or 1
where all share a latent), G = Q / H, n queries, W entries, D key dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvacc.errors import KvaccError
from kvacc.products import times_transposed
from kvacc.strategy import Strategy

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LayerContext:
    """What a selector knows of its layer.

    Attributes:
        layer: index in the model.
        heads: H.
        compressed: long [B], the length that fractions refer to, for each row.
        rotate: (x [B, K or Q, n, D], by [B, 1, n]) -> x moved by that many positions;
            None unless the strategy ``needs_rotation``.
        skewed: key [B, K, n, D] -> its skewed partial columns [B, K, n, C]; None unless
            the strategy has a ``speculation``.
    """

    layer: int
    heads: int
    compressed: torch.Tensor
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    skewed: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class NewEntries:
    """Entries that arrive, in columns after those that are there.

    Attributes:
        key: [B, K, n, D], rotated by the model.
        position: long [B, n], place in the text.
        previous: long [B, n], column of the token before it on its path, -1 for a first one.
        real: bool [B, n], False at padding.
    """

    key: torch.Tensor
    position: torch.Tensor
    previous: torch.Tensor
    real: torch.Tensor


@dataclass(frozen=True)
class Asked:
    """Queries that want to know what to read.

    Attributes:
        query: [B, Q, n, D], rotated by the model; None when a selection is asked for
            ahead, before the layer has run.
        speculated: [B, Q, n, C], the skewed partial queries made from the attention
            input of the layer before; None unless the strategy has a ``speculation``.
        position: long [B, n]; negative at padding.
        budget: long [B, n], entries allowed.
        acts: bool [B, n]; False while a dense prefill reads everything.
        compresses: bool [B, n]; True for the last query of a dense prefill.
        readable: bool [B, n, W], the entries before each query on its path, and itself.
        entry_position: long [B, W].
        own: long [n], column of each query's own entry; None when asked for ahead.
        logits: (query [B, Q, n, C], key [B, K, W, C]) -> float32 [B, Q, n, W], scaled and
            capped as the model's attention does.
    """

    query: torch.Tensor | None
    speculated: torch.Tensor | None
    position: torch.Tensor
    budget: torch.Tensor
    acts: torch.Tensor
    compresses: torch.Tensor
    readable: torch.Tensor
    entry_position: torch.Tensor
    own: torch.Tensor | None
    logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def itself(self) -> torch.Tensor:
        """bool [n, W], each query's own entry."""
        import torch

        count, width = self.readable.shape[1:]
        if self.own is None:
            return torch.zeros(count, width, dtype=torch.bool, device=self.readable.device)
        return torch.arange(width, device=self.readable.device) == self.own[:, None]

    def part(self, which: int) -> Asked:
        """The same for query ``which`` alone, with the entries up to its own."""
        one, columns = slice(which, which + 1), int(self.own[which]) + 1
        return Asked(
            self.query[:, :, one],
            None if self.speculated is None else self.speculated[:, :, one],
            self.position[:, one],
            self.budget[:, one],
            self.acts[:, one],
            self.compresses[:, one],
            self.readable[:, one, :columns],
            self.entry_position[:, :columns],
            self.own[one],
            self.logits,
        )


@dataclass(frozen=True)
class Selection:
    """What each query reads.

    Attributes:
        visible: bool [B, H, n, W], within ``readable``.
        far: bool [B, H or 1, n, W], entries read at ``distance`` positions from the
            query wherever they are in the text (InfLLM), or None.
    """

    visible: torch.Tensor
    far: torch.Tensor | None = None
    distance: torch.Tensor | None = None
    """long [B, n]"""


@dataclass(frozen=True)
class SpeculationSettings:
    """How a model's queries are guessed from a few skewed columns (InfiniGen).

    Attributes:
        calibration: ``prose`` or the path of the text that the columns are chosen by.
        calibration_digest: of that text (:func:`kvacc.calibration.calibration_digest`).
        skew: rotate queries and keys so that few columns carry most of them.
        partial_ratio: share of the columns used, in (0, 1].
        columns: which, a rule of :meth:`kvacc.engine.skewing.Skewing.columns`.
        source: ``previous``, the attention input of the layer before, or ``current``, the
            layer's own query.
    """

    calibration: str
    calibration_digest: str
    skew: bool
    partial_ratio: float
    columns: str
    source: str


class Selector:
    """One layer's summary of its entries. Tensors in ``state`` follow the batch's rows."""

    def __init__(self, layer: LayerContext) -> None:
        self.layer = layer
        self.state: dict[str, torch.Tensor] = {}

    def extend(self, new: NewEntries) -> None:
        """Entries arrive."""

    def select(self, asked: Asked) -> Selection:
        """What each query reads. Queries come in the order of the text."""
        raise NotImplementedError

    def settle(self) -> None:
        """The queries of a forward pass of the step path are answered: what they alone needed can go."""

    def reorder(self, rows: torch.Tensor) -> None:
        """Row b continues what was row ``rows[b]`` (beam search)."""
        self.state = {name: value[rows] for name, value in self.state.items()}

    def append(self, name: str, value: torch.Tensor, dim: int) -> None:
        """``value`` joins the state ``name`` at the end of ``dim``."""
        import torch

        held = self.state.get(name)
        # A copy: a selector that writes into its state must not write into the model's keys.
        self.state[name] = value.clone() if held is None else torch.cat([held, value], dim)

    def measured_bytes(self) -> int:
        """Bytes of the summary, held on the device."""
        return sum(value.nbytes for value in self.state.values())


@dataclass(frozen=True)
class SelectStrategy(Strategy):
    """A strategy whose queries read a selection of an offloaded cache.

    Args:
        dense_layers: first layers that read everything; their cache stays on the device.
    """

    offloads: ClassVar[bool] = True
    """Keys and values live in host memory; the device holds what is selected."""

    dense_layers: int = 0

    def validate(self) -> None:
        count_option(self, "dense_layers")

    @property
    def physical_eviction(self) -> bool:
        return False

    @property
    def speculation(self) -> SpeculationSettings | None:
        """How queries are guessed before their layer runs; None when they are not."""
        return None

    @property
    def selects_ahead(self) -> bool:
        """True when a selection needs neither the layer's own query nor the newest entry,
        so that entries can be fetched while the layer before still runs."""
        return False

    def selector(self, layer: LayerContext) -> Selector:
        """The state of one layer, for one batch."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it selects")


def count_option(strategy: Strategy, name: str, least: int = 0) -> None:
    """Raise KvaccError unless the option ``name`` is a whole number of at least ``least``."""
    value: Any = getattr(strategy, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise KvaccError(f"{strategy.name}: {name} {value!r} is not a whole number of at least {least}")


def best_of_group(logits: torch.Tensor, heads: int, candidates: torch.Tensor) -> torch.Tensor:
    """One score per deciding head from the logits of its G query heads: how far an entry is
    below the highest of the query head that wants it most, so 0 at each query head's first
    choice. With one query head per KV head it ranks as the logits do.

    Args:
        logits: float32 [B, Q, n, W]. candidates: bool [B, H or 1, n, W].

    Returns:
        float32 [B, H, n, W], -inf where there is no candidate.
    """
    from kvacc import compiled_choice

    if compiled_choice.available(logits):
        return compiled_choice.best_of_group(logits, heads, candidates)
    rows, query_heads, count, width = logits.shape
    grouped = logits.view(rows, heads, query_heads // heads, count, width)
    grouped = grouped.masked_fill(~candidates[:, :, None], float("-inf"))
    if width == 0:
        return grouped.amax(2)
    top = grouped.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    return (grouped - top).amax(2)


def count_true(mask: torch.Tensor) -> torch.Tensor:
    """int32 [...]: how many are True in each row of a bool mask [..., W]."""
    import torch

    from kvacc import compiled_choice

    if mask.device.type == "cpu" and compiled_choice.numba_is_here():
        return compiled_choice.count_true(mask)
    return mask.sum(-1, dtype=torch.int32)


def dots(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Inner products of queries [B, Q, n, C] with the keys [B, K, W, C] of their KV head,
    float32 [B, Q, n, W]."""
    rows, query_heads, count, size = query.shape
    heads = key.shape[1]
    grouped = query.float().reshape(rows, heads, query_heads // heads * count, size)
    if rows * heads == 1:
        return times_transposed(grouped[0, 0], key[0, 0].float()).view(1, query_heads, count, key.shape[2])
    return (grouped @ key.float().transpose(-1, -2)).view(rows, query_heads, count, key.shape[2])


def highest(scores: torch.Tensor, count: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """The ``count`` highest scores of each query; of equal ones the lower column.

    Args:
        scores: float32 [B, H, n, W].
        count: long, broadcastable to [B, H, n].
        allowed: bool, broadcastable to [B, H, n, W].

    Returns:
        bool [B, H, n, W], at most ``count`` True in each row, all of them ``allowed``.
    """
    import torch

    from kvacc import compiled_choice

    if compiled_choice.available(scores):
        return compiled_choice.highest(scores, count, allowed)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    in_order = allowed.expand_as(scores).gather(-1, order)
    first = in_order & (in_order.cumsum(-1) <= count[..., None])
    return torch.zeros_like(first).scatter(-1, order, first)
