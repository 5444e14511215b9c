"""One batch of prompts, read and generated from under a strategy."""

from __future__ import annotations

import bisect
import dataclasses

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.utils import postprocess_generated_text

from kvacc.backend.generation_arguments import GenerationArguments, generation_arguments
from kvacc.backend.prompts import Prompts
from kvacc.engine.generation import Generated, generate
from kvacc.engine.plan import Request
from kvacc.engine.shared_prompt import Beginning
from kvacc.engine.stepping import RowReading
from kvacc.engine.wrapped import WrappedModel
from kvacc.errors import KvaccError
from kvacc.strategy import Strategy


@dataclasses.dataclass(frozen=True)
class ReadPrompt:
    """The prompt as it fits the context, how it is read, and the number of tokens cut off."""

    tokens: list[int]
    reading: RowReading
    truncated: int

    @property
    def alone(self) -> Request:
        """The prompt as a request of the engine, which has to have a target."""
        return Request(
            tuple(self.tokens), tuple(self.tokens[-1:]), self.reading.dense, self.reading.compressed
        )

    def followed_by(self, targets: list[int]) -> Request:
        """The engine's request for tokens after the prompt, read as a generation reads it."""
        tokens = (*self.tokens, *targets[:-1])
        return Request(tokens, tuple(targets), self.reading.dense, self.reading.compressed)


@dataclasses.dataclass(frozen=True)
class GeneratedRow:
    """What was generated after one prompt; ``tokens`` go on until the whole batch had stopped."""

    prompt: ReadPrompt
    tokens: list[int]
    measured: Generated


@dataclasses.dataclass(frozen=True)
class Generator:
    """Generates after prompts: transformers' ``generate``, called as lm-eval does.

    Attributes:
        prompts: how they are read.
        wrapped: the model.
        prefill_chunk: tokens of a prompt read in one pass; all when None.
    """

    prompts: Prompts
    wrapped: WrappedModel
    prefill_chunk: int | None

    def arguments(self, instance: Instance) -> GenerationArguments:
        return generation_arguments(self.prompts.hf, instance)

    def read(self, instance: Instance) -> ReadPrompt:
        room = self.arguments(instance).room
        whole = self.prompts.whole(instance)
        tokens = whole[-(self.prompts.hf.max_length - room) :]
        cut = len(whole) - len(tokens)
        dense = self.prompts.dense_tokens(instance, whole, len(tokens), cut)
        return ReadPrompt(tokens, RowReading(0, dense, dense or len(tokens)), cut)

    def generate(
        self,
        instances: list[Instance],
        arguments: GenerationArguments,
        strategy: Strategy,
        beginning: Beginning | None = None,
    ) -> list[GeneratedRow]:
        """A row for each instance; ``beginning`` is what their prompts begin with, read already."""
        hf = self.prompts.hf
        prompts = [self.read(instance) for instance in instances]
        width = max(len(prompt.tokens) for prompt in prompts)
        padding = [width - len(prompt.tokens) for prompt in prompts]
        pad = hf.tokenizer.pad_token_id
        context = torch.tensor(
            [[pad] * n + p.tokens for n, p in zip(padding, prompts, strict=True)], device=hf.device
        )
        mask = torch.tensor(
            [[0] * n + [1] * len(p.tokens) for n, p in zip(padding, prompts, strict=True)], device=hf.device
        )

        def run(cache):
            return hf._model_generate(
                context=context,
                attention_mask=mask,
                stop=arguments.until,
                max_length=arguments.total or width + arguments.room,
                cache=cache,
                prefill_chunk_size=self.prefill_chunk,
                **arguments.options,
            )

        ends = {hf.eot_token_id, *_as_list(hf.model.generation_config.eos_token_id)}
        try:
            tokens, measured = generate(
                self.wrapped,
                strategy,
                [
                    dataclasses.replace(prompt.reading, padding=left)
                    for prompt, left in zip(prompts, padding, strict=True)
                ],
                run,
                width,
                arguments.copies,
                ends,
                lambda made: self._answer_length(made, arguments.until),
                self.prefill_chunk,
                beginning,
            )
        except (TypeError, ValueError) as error:
            if isinstance(error, KvaccError) or "model_kwargs" not in str(error):
                raise
            raise KvaccError(f"generation arguments {instances[0].args[1]!r}: {error}") from None
        each = len(tokens) // len(instances)
        return [
            GeneratedRow(prompt, tokens[b * each, width:].tolist(), measured[b])
            for b, prompt in enumerate(prompts)
        ]

    def _answer_length(self, tokens: list[int], until: list[str]) -> int:
        """Tokens up to the first with which the text holds a stop string: transformers goes
        on with the whole batch until every row has met one."""

        def stopped(length: int) -> bool:
            text = self.prompts.hf.tok_decode(tokens[:length])
            return any(stop and stop in text for stop in until)

        return bisect.bisect_left(range(len(tokens)), True, key=lambda i: stopped(i + 1)) + stopped(
            len(tokens)
        )

    def text(self, tokens: list[int], until: list[str]) -> str:
        """The answer: thinking and stop sequences cut off as lm-eval does."""
        hf = self.prompts.hf
        end = hf.think_end_token
        if isinstance(end, int):
            if end in tokens:
                tokens = tokens[len(tokens) - tokens[::-1].index(end) :]
            return postprocess_generated_text(hf.tok_decode(tokens).lstrip(), until, think_end_token=None)
        return postprocess_generated_text(hf.tok_decode(tokens), until, think_end_token=end)


def _as_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]
