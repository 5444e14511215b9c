"""One text under a strategy on either path, and where two such runs differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvacc.engine import attention
from kvacc.engine.plan import Request, build_rows, make_plan
from kvacc.engine.scoring import step_forward
from kvacc.engine.stepping import RowReading, StepSession
from kvacc.records import as_ranges
from kvacc.select_strategy import SelectStrategy
from kvacc.strategy import EvictStrategy, Strategy
from kvacc.verify.subjects import Subject

PATHS_AGREE = 1e-3
"""The parallel and the step path, in float32."""

_SHOWN_POSITIONS = 12


@dataclass(frozen=True)
class Text:
    """Tokens to read, and how (see :class:`kvacc.engine.plan.Request`)."""

    tokens: tuple[int, ...]
    dense: int
    compressed: int

    def __len__(self) -> int:
        return len(self.tokens)

    def request(self, scored: int | None = None) -> Request:
        """A request in which the last ``scored`` queries count, by default all."""
        scored = len(self) if scored is None else scored
        return Request(self.tokens, (5,) * scored, self.dense, self.compressed)


@dataclass(frozen=True)
class Run:
    """What came out for one text of T tokens.

    Attributes:
        logits: float32 [T, vocabulary].
        reads: layer -> bool [H, T, T], what each query read, in the layers where the
            strategy acts.
    """

    logits: torch.Tensor
    reads: dict[int, torch.Tensor]

    def reads_in(self, layer: int, like: torch.Tensor) -> torch.Tensor:
        """bool [H, T, T]; everything where nothing was recorded."""
        return self.reads.get(layer, torch.ones_like(like).tril())

    @property
    def hides(self) -> bool:
        return any(not torch.equal(read, torch.ones_like(read).tril()) for read in self.reads.values())


def parallel_runs(
    subject: Subject, strategy: Strategy, texts: Sequence[Text], reference: bool = False
) -> list[Run]:
    """The texts as one batch on the parallel path, padded on the right."""
    rows = [row for i, text in enumerate(texts) for row in build_rows([(i, text.request())])]
    plan = make_plan(rows, strategy)
    logits, session = subject.wrapped.parallel(plan, strategy, record=True, reference=reference)
    runs, first = [], 0
    for b, text in enumerate(texts):
        count = len(text)
        reads = {layer: mask[b, :, :count, :count].cpu() for layer, mask in session.decisions.items()}
        runs.append(Run(logits[first : first + count].float().cpu(), reads))
        first += count
    return runs


def step_runs(
    subject: Subject,
    strategy: Strategy,
    texts: Sequence[Text],
    chunk: int = 1,
    padding: int = 0,
    own_positions: bool = False,
    inspect: Callable[[StepSession, int], None] | None = None,
) -> list[Run]:
    """The texts as one batch on the step path, padded on the left.

    Args:
        chunk: columns per forward pass.
        padding: columns of padding before the longest text.
        own_positions: let the model count positions by the cache's length, as
            ``generate`` does; for a single text without padding.
        inspect: called with the session and the columns seen, after each pass.
    """
    wrapped = subject.wrapped
    width = max(map(len, texts)) + padding
    pads = [width - len(text) for text in texts]
    rows = [RowReading(p, text.dense, text.compressed) for p, text in zip(pads, texts, strict=True)]
    session = wrapped.step(strategy, rows, record=True)
    tokens = torch.tensor([[0] * p + list(t.tokens) for p, t in zip(pads, texts, strict=True)])
    tokens = tokens.to(wrapped.device)
    logits = []
    with attention.active(session), torch.inference_mode():
        for first in range(0, width, chunk):
            part = tokens[:, first : first + chunk]
            if own_positions:
                out = wrapped.model(input_ids=part, cache=session.cache, use_cache=True).logits
            else:
                out = step_forward(wrapped, session, part, first)
            logits.append(out)
            if inspect is not None:
                inspect(session, first + part.shape[1])
    whole = torch.cat(logits, 1).float().cpu()
    acting = acting_layers(subject, strategy)
    return [Run(whole[b, p:], _joined(session, acting, b, p, width)) for b, p in enumerate(pads)]


def acting_layers(subject: Subject, strategy: Strategy) -> set[int]:
    """The layers in which the strategy decides what is read."""
    if not isinstance(strategy, (EvictStrategy, SelectStrategy)):
        return set()
    kinds = subject.wrapped.kinds_for(strategy)
    first = getattr(strategy, "dense_layers", 0)
    return {index for index, kind in enumerate(kinds) if kind.name == "full" and index >= first}


def _joined(
    session: StepSession, acting: set[int], row: int, padding: int, width: int
) -> dict[int, torch.Tensor]:
    """What the row's queries read in the layers ``acting``, put together from all passes."""
    reads: dict[int, torch.Tensor] = {}
    first = 0
    for passed in session.reads:
        for layer in acting & passed.keys():
            mask = passed[layer]
            count, columns = mask.shape[2:]
            if layer not in reads:
                reads[layer] = torch.zeros(mask.shape[1], width, width, dtype=torch.bool)
            reads[layer][:, first : first + count, :columns] = mask[row].cpu()
        first += next((mask.shape[2] for mask in passed.values()), 0)
    return {layer: mask[:, padding:, padding:] for layer, mask in reads.items()}


@dataclass(frozen=True)
class Difference:
    """The first place where two runs differ."""

    what: str
    position: int
    expected: str
    found: str
    layer: int | None = None
    head: int | None = None


def first_difference(
    expected: Run, found: Run, tolerance: float, before: int | None = None
) -> Difference | None:
    """Where ``found`` first differs, by position, then by layer and head; what was read
    comes before what followed from it.

    Args:
        tolerance: allowed difference of logits.
        before: compare positions below this one only.
    """
    reads = reads_difference(expected, found, before)
    logits = logits_difference(expected.logits[:before], found.logits[:before], tolerance)
    if reads is None or logits is None:
        return reads or logits
    return reads if reads.position <= logits.position else logits


def reads_difference(expected: Run, found: Run, before: int | None = None) -> Difference | None:
    best: Difference | None = None
    for layer in sorted(expected.reads.keys() | found.reads.keys()):
        known = expected.reads.get(layer, found.reads.get(layer))
        one, other = expected.reads_in(layer, known), found.reads_in(layer, known)
        one, other = one[:, :before, :before], other[:, :before, :before]
        if one.shape[0] != other.shape[0]:
            counts = f"{one.shape[0]} heads that decide", f"{other.shape[0]}"
            return Difference("heads", 0, *counts, layer=layer)
        wrong = (one != other).any(-1)
        if not wrong.any():
            continue
        position = int(wrong.any(0).nonzero()[0, 0])
        if best is None or position < best.position:
            head = int(wrong[:, position].nonzero()[0, 0])
            shown = positions(one[head, position]), positions(other[head, position])
            best = Difference("entries read", position, *shown, layer=layer, head=head)
    return best


def logits_difference(expected: torch.Tensor, found: torch.Tensor, tolerance: float) -> Difference | None:
    """expected, found: [T, vocabulary]."""
    off = (expected - found).abs().nan_to_num(nan=float("inf"))
    worst = off.amax(-1)
    if not bool((worst > tolerance).any()):
        return None
    position = int((worst > tolerance).nonzero()[0, 0])
    token = int(off[position].argmax())
    values = (f"{float(logits[position, token]):.6g}" for logits in (expected, found))
    return Difference(f"logit of token {token}", position, *values)


def positions(read: torch.Tensor) -> str:
    """``0 3 7-9 (5)``: the places in bool [T] that are True, and how many."""
    places = read.nonzero()[:, 0].tolist()
    shown = as_ranges(places)
    if len(shown) > _SHOWN_POSITIONS:
        shown = [*shown[: _SHOWN_POSITIONS - 1], "...", shown[-1]]
    return f"{' '.join(shown) or 'none'} ({len(places)})"
