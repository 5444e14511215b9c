"""Prompts as tokens, and how many of them a protocol reads before the strategy acts."""

from __future__ import annotations

from dataclasses import dataclass

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from kvacc.task_catalog import context_boundary


@dataclass(frozen=True)
class Prompts:
    """How prompts are read.

    Attributes:
        hf: lm-eval's backend: its tokenisation and context length.
        protocol: when compression acts.
        tail_tokens: in ``context``, prompt tokens left uncompressed where the task does not say
            where its context segment ends.
        num_fewshot: examples in the prompts; counted by blank lines when None.
    """

    hf: HFLM
    protocol: str
    tail_tokens: int
    num_fewshot: int | None

    def whole(self, instance: Instance) -> list[int]:
        """The prompt of a generation, however long."""
        return self.hf.tok_encode(instance.args[0]) or [self.hf.prefix_token_id]

    def with_continuation(self, instance: Instance) -> tuple[list[int], list[int]]:
        """lm-eval's own split into context and continuation tokens."""
        context, continuation = instance.args
        if context == "":
            target = self.hf.tok_encode(continuation, add_special_tokens=False)
            if target and self.hf.prefix_token_id == target[0]:
                return target[:1], target[1:]
            return [self.hf.prefix_token_id], target
        return self.hf._encode_pair(context, continuation)

    def dense_tokens(self, instance: Instance, context: list[int], prompt: int, truncated: int) -> int:
        """Tokens read with the full cache before the strategy acts.

        Args:
            context: the prompt's tokens, however many.
            prompt: how many of them are read.
            truncated: how many were cut from the left.
        """
        if self.protocol == "stream":
            return 0
        if self.protocol == "serve":
            return prompt
        text = instance.args[0]
        shots = self.num_fewshot if self.num_fewshot is not None else text.count("\n\n")
        end = context_boundary(instance.doc, text, shots) if isinstance(instance.doc, dict) else None
        if end is None:
            # A prompt shorter than the tail would leave nothing to compress.
            return max(1, prompt - min(self.tail_tokens, prompt // 2))
        before = self.hf.tok_encode(text[:end])
        common = next(
            (i for i, (a, b) in enumerate(zip(before, context, strict=False)) if a != b), len(before)
        )
        return min(max(1, common - truncated), prompt)
