"""Generations compared with ``full``: on the tokens of ``full``'s own greedy answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lm_eval.api.instance import Instance

from kvacc.backend.generation import GeneratedRow, Generator
from kvacc.backend.generation_arguments import GenerationArguments
from kvacc.engine.fidelity import References
from kvacc.engine.plan import Request
from kvacc.engine.scoring import Score
from kvacc.records import RequestRecord, fidelity_of, selection_of
from kvacc.strategy import make_strategy


def keep_answers(
    references: References, rows: Sequence[GeneratedRow], arguments: GenerationArguments
) -> None:
    """Remember what ``full`` generated greedily."""
    for one in rows:
        references.add_answer(one.prompt.tokens, arguments.limits, one.tokens[: one.measured.tokens])


def compared_with_full(
    generator: Generator,
    references: References,
    score: Callable[[list[list[Request]]], list[list[Score]]],
    instances: Sequence[Instance],
    records: Sequence[RequestRecord],
) -> list[RequestRecord]:
    """The records with the fidelity on the tokens of ``full``'s own greedy answers, which the
    strategy reads under its protocol and budget as it would have generated them.

    Args:
        score: scores documents under the strategy, compared with ``full``.
        records: of the strategy's generations, one for each instance.
    """
    documents: list[list[Request]] = []
    numbers: list[int] = []
    for number, instance in enumerate(instances):
        prompt = generator.read(instance)
        answer = _answer_of_full(generator, references, instance, prompt.tokens)
        if answer:
            documents.append([prompt.followed_by(answer)])
            numbers.append(number)
    out = list(records)
    for number, [request], [one] in zip(numbers, documents, score(documents), strict=True):
        # What a selection moved is measured where it ran, in the generation.
        found = fidelity_of(one) | selection_of(one) | {"moved_bytes": records[number].moved_bytes}
        found["compared_tokens"] = len(request.targets)
        out[number] = dataclasses.replace(records[number], **found)
    return out


def _answer_of_full(
    generator: Generator, references: References, instance: Instance, prompt: list[int]
) -> list[int]:
    """The tokens that ``full`` generates greedily after the prompt; made once."""
    arguments = generator.arguments(instance)
    if references.answer(prompt, arguments.limits) is None:
        arguments = arguments.greedy()
        rows = generator.generate([instance], arguments, make_strategy("full"))
        keep_answers(references, rows, arguments)
    return references.answer(prompt, arguments.limits)
