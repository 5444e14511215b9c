"""Many prompts generated from in batches, which get smaller where the memory does not suffice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvacc.engine.plan import Request
from kvacc.engine.scoring import is_out_of_memory
from kvacc.engine.shared_prompt import Beginning, can_share, plan_batches
from kvacc.engine.wrapped import WrappedModel
from kvacc.strategy import Strategy

Made = TypeVar("Made")


def in_batches(
    wrapped: WrappedModel,
    strategy: Strategy,
    prompts: Sequence[Request],
    room: int,
    rows_for: Callable[[int], int],
    prefill_chunk: int | None,
    generate: Callable[[list[int], Beginning | None], Made],
) -> Iterator[tuple[list[int], Made]]:
    """Numbers of the prompts of a batch, and what was generated for them.

    Args:
        prompts: each with one target, whatever it is; all have equal generation arguments.
        room: the most new tokens.
        rows_for: tokens that a row still has to read -> rows of a batch.
        prefill_chunk: tokens of a shared beginning read in one pass; all when None.
        generate: numbers of prompts, and what they begin with if that is read already.
    """
    share = can_share(wrapped, strategy)
    waiting = plan_batches(prompts, strategy, share, rows_for, room)
    beginning: Beginning | None = None
    group: int | None = None
    while waiting:
        batch = waiting.pop(0)
        try:
            if batch.group != group or beginning is None:
                beginning, group = None, batch.group  # its memory is free before the next is read
                if batch.shared:
                    first = prompts[batch.prompts[0]]
                    beginning = Beginning(wrapped, strategy, first, batch.shared, prefill_chunk)
            made = generate(batch.prompts, beginning)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or (len(batch.prompts) == 1 and not batch.shared):
                raise
            # Those that wait would not fit either, and would say so late in their generation.
            most = len(batch.prompts) // 2
            rest = [part for each in waiting for part in each.smaller(max(1, most))]
            waiting = [*batch.smaller(most), *rest]
            continue
        yield batch.prompts, made
