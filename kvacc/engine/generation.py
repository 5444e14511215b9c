"""Generation on the step path: transformers' own ``generate`` over a session's cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvacc.engine import attention
from kvacc.engine.prefill import passes_of
from kvacc.engine.shared_prompt import Beginning
from kvacc.engine.stepping import RowReading
from kvacc.engine.wrapped import WrappedModel
from kvacc.strategy import Strategy


@dataclass(frozen=True)
class Generated:
    """What the engine measured of one generated row.

    Attributes:
        tokens: tokens of its answer, the one that ended it included.
        kept_fraction: mean over the queries that produced them.
        hidden: an entry was hidden from one of them.
        moved_bytes: mean over these queries of the bytes brought from the host pool; None
            unless the strategy selects.
    """

    tokens: int
    kept_fraction: float
    hidden: bool
    moved_bytes: float | None = None


def generate(
    wrapped: WrappedModel,
    strategy: Strategy,
    rows: Sequence[RowReading],
    run: Callable[..., torch.Tensor],
    prompt_width: int,
    copies: int = 1,
    end_tokens: Sequence[int] = (),
    length: Callable[[list[int]], int] = len,
    prefill_chunk: int | None = None,
    beginning: Beginning | None = None,
) -> tuple[torch.Tensor, list[Generated]]:
    """Call ``run(cache=...)`` with the strategy's cache.

    Args:
        rows: how each left-padded row of the prompt batch is read.
        run: ``model.generate`` with everything but the cache.
        prompt_width: columns of the prompt batch.
        copies: rows that ``generate`` makes of each (beams or returned sequences).
        end_tokens: tokens that end a row.
        length: how many of a row's generated tokens belong to its answer. The others were
            made while waiting for longer rows, and are not measured.
        prefill_chunk: columns of the prompt batch that ``run`` reads in each pass
            (:mod:`kvacc.engine.prefill`).
        beginning: what all rows begin with, read already; then no row is padded.

    Returns:
        ``generate``'s tokens, and a measurement for each row of the prompt batch.
    """
    session = wrapped.step(strategy, [row for row in rows for _ in range(copies)])
    known = 0
    if beginning:
        beginning.continue_in(session)
        known = len(beginning.tokens)
    # A checkpoint may ask for a cache of transformers' own; the strategy is the cache here.
    wrapped.model.generation_config.cache_implementation = None
    with attention.active(session), torch.inference_mode():
        tokens = run(cache=session.cache)
    # Only the last pass over the prompt has a query that produced a token. What the passes before
    # it brought from the host belongs to the prompt: read in one pass, it brings nothing.
    before = passes_of(prompt_width - known, prefill_chunk) - 1
    passes, moves = session.passes[before:], session.moved[before:]
    if before:
        moves[0] = torch.zeros_like(moves[0])
    measured = []
    for b in range(len(rows)):
        made = tokens[b * (len(tokens) // len(rows)), prompt_width:].tolist()
        ended = next((i + 1 for i, token in enumerate(made) if token in end_tokens), len(made))
        count = length(made[:ended])
        reads = [(float(kept[b * copies]), bool(hidden[b * copies])) for kept, hidden in passes[:count]]
        kept = sum(k for k, _ in reads) / len(reads) if reads else 1.0
        moved = [float(each[b * copies]) for each in moves[:count]]
        mean = sum(moved) / len(moved) if moved and strategy.offloads else None
        measured.append(Generated(count, kept, any(h for _, h in reads), mean))
    return tokens, measured
