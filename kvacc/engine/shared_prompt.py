"""Prompts that begin alike, in generation: the beginning is read once, and each continues from a
copy of the cache at its end.

Several questions asked about one haystack, or fixed few-shot examples, are such beginnings.
:mod:`kvacc.engine.prefix` does the same for scoring, and says when strategies allow it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from kvacc.engine import attention
from kvacc.engine.plan import Request
from kvacc.engine.prefill import chunks
from kvacc.engine.prefix import group_by_prefix
from kvacc.engine.scoring import step_forward
from kvacc.engine.stepping import RowReading, StepSession
from kvacc.engine.wrapped import WrappedModel
from kvacc.strategy import Strategy

PASS_WORTH = 64
"""A decoding pass costs about as much as reading this many more tokens of a prompt: it has to
fetch all weights for one token of each row."""

PADDED_WIDTH = 5000
"""A row of n tokens that is padded costs as much as reading n * n / 5,000 more: attention must then
mind a mask, and cannot skip what lies behind each query. Measured on two cores."""


@dataclass(frozen=True)
class PromptBatch:
    """Prompts that are generated from together.

    Attributes:
        prompts: their numbers.
        shared: leading tokens that they have in common with all prompts of their group.
        group: number of that group; None where nothing is shared.
    """

    prompts: list[int]
    shared: int = 0
    group: int | None = None

    def smaller(self, most: int) -> list[PromptBatch]:
        """The same prompts in batches of at most ``most``; with 0, each without sharing."""
        if not most:
            return [PromptBatch([prompt]) for prompt in self.prompts]
        parts = (self.prompts[first : first + most] for first in range(0, len(self.prompts), most))
        return [replace(self, prompts=part) for part in parts]


def can_share(wrapped: WrappedModel, strategy: Strategy) -> bool:
    """A cache at the end of a beginning can be copied, and the copies continued."""
    # A pool in host memory is written in place: copying it would cost what sharing saves.
    return wrapped.shares_trees and strategy.shares_trees and not strategy.offloads


def alone_is_faster(prompt_tokens: int, new_tokens: int, rows: int) -> bool:
    """Would a prompt be generated from faster by itself than with others of about its length, which
    pad it, although they share its decoding passes? On processors."""
    passes = PASS_WORTH * new_tokens * (1 - 1 / rows)
    return passes < prompt_tokens**2 / PADDED_WIDTH


def plan_batches(
    prompts: Sequence[Request],
    strategy: Strategy,
    share: bool,
    rows_for: Callable[[int], int],
    new_tokens: int,
) -> list[PromptBatch]:
    """All prompts in batches, longest first.

    Rows are padded on the left, before everything; so behind a shared beginning only prompts of
    one length can be rows of a batch. Sharing is chosen where it saves more than these smaller
    batches cost.

    Args:
        prompts: each with one target, whatever it is.
        rows_for: tokens that a row still has to read -> rows of a batch.
        new_tokens: the most that are generated.
    """
    alone: list[int] = []
    shared: list[PromptBatch] = []
    groups = group_by_prefix([[prompt] for prompt in prompts], strategy) if share else []
    for number, group in enumerate(groups):
        batches = [
            PromptBatch(part, group.tokens, number)
            for part in _of_equal_length(group.documents, prompts, group.tokens, rows_for)
        ]
        longest = max(len(prompts[n].tokens) for n in group.documents)
        otherwise = -(-len(group.documents) // rows_for(longest))
        saved = group.tokens * (len(group.documents) - 1)
        if group.tokens and saved > PASS_WORTH * new_tokens * max(0, len(batches) - otherwise):
            shared += batches
        else:
            alone += group.documents
    alone = sorted(alone if share else range(len(prompts)), key=lambda n: -len(prompts[n].tokens))
    while alone:
        count = rows_for(len(prompts[alone[0]].tokens))
        shared.append(PromptBatch(alone[:count]))
        alone = alone[count:]
    return shared


def _of_equal_length(
    numbers: Sequence[int], prompts: Sequence[Request], shared: int, rows_for: Callable[[int], int]
) -> Iterator[list[int]]:
    by_length: dict[int, list[int]] = {}
    for number in numbers:
        by_length.setdefault(len(prompts[number].tokens), []).append(number)
    for length, members in sorted(by_length.items(), reverse=True):
        count = rows_for(length - shared)  # the beginning is read already
        yield from (members[first : first + count] for first in range(0, len(members), count))


class Beginning:
    """The cache after the first tokens of a prompt, on the step path.

    Args:
        prompt: any of the prompts that begin so.
        shared: how many tokens are read.
        chunk: tokens of a forward pass; all when None.
    """

    def __init__(
        self, wrapped: WrappedModel, strategy: Strategy, prompt: Request, shared: int, chunk: int | None
    ) -> None:
        self.tokens = prompt.tokens[:shared]
        row = RowReading(0, prompt.dense, prompt.compressed)
        self._session = wrapped.step(strategy, [row])
        with attention.active(self._session), torch.inference_mode():
            first = 0
            for part in chunks(torch.tensor([self.tokens], device=wrapped.device), chunk):
                step_forward(wrapped, self._session, part, first, last_only=True)
                first += part.shape[1]

    def continue_in(self, session: StepSession) -> None:
        """Let every row of a fresh ``session`` go on from here; this cache stays as it is."""
        for index, layer in enumerate(self._session.cache.layers):
            # Layers put new tensors in place of old ones, so a layer beside this one is enough.
            own = copy.copy(layer)
            own.batch_repeat_interleave(len(session.rows))
            session.cache.layers[index] = own
