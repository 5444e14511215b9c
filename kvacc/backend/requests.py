"""lm-eval's log-likelihood requests, turned into the engine's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from kvacc.backend.prompts import Prompts
from kvacc.engine.plan import Request
from kvacc.errors import KvaccError


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A request as tokens, with what has to be reported about it."""

    instance: Instance
    request: Request
    prompt_tokens: int
    truncated: int

    @property
    def unreachable(self) -> int:
        """Scored queries read with the full cache."""
        return max(0, self.request.dense - self.request.first_scored)


def prepare(
    prompts: Prompts, instances: Sequence[Instance], encoded: Sequence[tuple[list[int], list[int]]]
) -> list[list[Prepared]]:
    """Documents of prepared requests. Options of a document get one compressed length."""
    documents: dict[Any, list[Prepared]] = {}
    for number, (instance, (context, target)) in enumerate(zip(instances, encoded, strict=True)):
        prepared = _cut(prompts, instance, context, target)
        # A request without a prompt (acc_mutual_info's) must not set the budget of the others.
        known = instance.metadata is not None and instance.doc_id is not None and instance.args[0] != ""
        key = (instance.task_name, instance.doc_id) if known else number
        documents.setdefault(key, []).append(prepared)
    return [_one_budget(document) for document in documents.values()]


def windows_of(hf: HFLM, instance: Instance, length: int) -> list[Prepared]:
    """A whole text in windows of at most ``length`` tokens, none for an empty one."""
    windows = []
    for window in utils.get_rolling_token_windows(
        token_list=hf.tok_encode(instance.args[0]),
        prefix_token=hf.prefix_token_id,
        max_seq_len=length,
        context_len=1,
    ):
        context, target = utils.make_disjoint_window(window)
        inputs = (*context, *target)[:-1]
        # The text itself is what gets compressed: a fraction refers to its window.
        request = Request(inputs, tuple(target), dense=0, compressed=len(inputs))
        windows.append(Prepared(instance, request, len(context), 0))
    return windows


def empty_text(instance: Instance) -> Prepared:
    """What stands in the record of a text without windows: nothing to score."""
    return Prepared(instance, Request((), (), dense=0, compressed=1), 0, 0)


def _cut(prompts: Prompts, instance: Instance, context: list[int], target: list[int]) -> Prepared:
    #   CTX      CONT         the model reads all but the last token, from the left as
    #   0 1 2 3|4 5 6 7 8 9   much as fits; the continuation's tokens are predicted at
    #         ^ ^ ^ ^ ^ ^     the marked places
    if not target:
        raise KvaccError(
            f"request {instance.idx} of document {instance.doc_id} in {instance.task_name!r} has "
            f"an empty continuation after tokenisation: {instance.args[1]!r}"
        )
    most = prompts.hf.max_length
    if len(target) > most:
        raise KvaccError(
            f"a continuation of {len(target)} tokens is longer than the model's context of "
            f"{most}: give a larger max_length, or leave the document out"
        )
    inputs = (context + target)[-(most + 1) :][:-1]
    truncated = len(context) + len(target) - 1 - len(inputs)
    prompt = len(inputs) - (len(target) - 1)
    dense = prompts.dense_tokens(instance, context, prompt, truncated)
    request = Request(tuple(inputs), tuple(target), dense, compressed=dense or prompt)
    return Prepared(instance, request, prompt, truncated)


def _one_budget(document: list[Prepared]) -> list[Prepared]:
    # WinoGrande's options stand inside the context: the shortest sets the budget of all,
    # so that no option is read with more of it than another.
    shared = min(p.request.compressed for p in document)
    return [
        dataclasses.replace(p, request=dataclasses.replace(p.request, compressed=shared)) for p in document
    ]
