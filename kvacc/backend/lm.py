"""The class that lm-eval calls: it holds the model and what runs on it, and keeps the records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from kvacc.backend.arguments import (
    HF_OPTIONS,
    positive,
    require_tail_tokens,
    rows_of,
    strategy_from,
    true_or_false,
)
from kvacc.backend.batches import in_batches
from kvacc.backend.comparison import compared_with_full, keep_answers
from kvacc.backend.generation import Generator
from kvacc.backend.loading import model_and_tokenizer, no_warning_of_a_loaded_model
from kvacc.backend.progress import counted
from kvacc.backend.prompts import Prompts
from kvacc.backend.recording import Recorder
from kvacc.backend.requests import Prepared, prepare, windows_of
from kvacc.backend.summary import log_lines, model_info
from kvacc.calibration import calibration_text
from kvacc.engine.fidelity import Meter, References
from kvacc.engine.memory import MOST_PROMPT_TOKENS, batch_tokens_for
from kvacc.engine.plan import Request
from kvacc.engine.prefill import (
    read_in_chunks,
    require_chunk,
    require_chunked_prefill,
    require_state_carried,
)
from kvacc.engine.scoring import Score, score_documents
from kvacc.engine.shared_prompt import Beginning, alone_is_faster
from kvacc.engine.wrapped import WrappedModel
from kvacc.errors import KvaccError
from kvacc.models import resolve
from kvacc.records import RequestRecord
from kvacc.strategy import Strategy


@register_model("kvacc")
class KvaccLM(HFLM):
    """A decoder under a strategy, as an lm-eval model.

    Args:
        pretrained: name on the hub, folder, alias such as ``smollm2-135m``, or a loaded
            model (then ``tokenizer`` too).
        strategy: a name, with ``budget``, ``budget_of`` and the strategy's own options
            as further arguments, or a :class:`~kvacc.strategy.Strategy`.
        protocol: ``stream``, ``context`` or ``serve``; when compression acts.
        tail_tokens: in ``context``, prompt tokens left uncompressed where the task does
            not say where its context segment ends (at most half of the prompt).
        max_batch_tokens: tokens per forward pass (padded ones in models that are given rows); as the
            free memory allows when not given.
        fidelity: compare every scored token's distribution with ``full``'s, too: divergence,
            agreement, attention mass kept (:mod:`kvacc.engine.fidelity`). ``full`` runs once for a
            request, whatever is compared with it afterwards.
        window: tokens of a window in which whole texts are scored; the model's context by default.
        prefill_chunk: tokens of a prompt that a generation reads in one pass; all by default. It
            bounds the memory of long prompts and changes no result.
        prepack_weights: on a processor, in float32, multiply by a second copy of the weights in the
            layout that its kernels want (:mod:`kvacc.engine.prepacked`), where memory allows. False
            multiplies as PyTorch does by itself; answers differ in their last bits.
        batch_size: rows per pass of a generation; scoring is batched by tokens.
            ``max_batch_size`` is lm-eval's own argument and changes nothing.
        device, dtype, revision, device_map, trust_remote_code, gguf_file: how the model is
            loaded, see :func:`kvacc.models.load_model`.

    Raises:
        KvaccError: a model, strategy, protocol or option that cannot be used.
    """

    # Where lm-eval finds it, by a name registered before this module is imported (kvacc/__init__.py).
    __module__ = "kvacc.backend"

    def __init__(
        self,
        pretrained: str | torch.nn.Module,
        strategy: str | Strategy = "full",
        budget: Any = None,
        budget_of: str = "prompt",
        protocol: str = "stream",
        tail_tokens: int = 32,
        batch_size: int | str | None = "auto",
        max_batch_size: int | None = None,
        max_batch_tokens: int | None = None,
        fidelity: bool = False,
        window: int | None = None,
        prefill_chunk: int | None = None,
        prepack_weights: bool = True,
        device: str | None = None,
        dtype: str | None = None,
        revision: str | None = None,
        device_map: Any = None,
        trust_remote_code: bool = False,
        gguf_file: str | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        for_hf = {name: options.pop(name) for name in HF_OPTIONS if name in options}
        if isinstance(strategy, str):
            # Before the model loads: a typing mistake should not cost minutes.
            strategy = strategy_from(strategy, budget, budget_of, options, _ARGUMENTS)
        elif options:
            raise KvaccError(f"unknown option {next(iter(options))!r} beside a ready strategy")
        self.fidelity = true_or_false("fidelity", fidelity)
        self.prepack_weights = true_or_false("prepack_weights", prepack_weights)
        self.window = None if window is None else positive("window", window, "nothing")
        self.prefill_chunk = require_chunk(prefill_chunk)
        self.references = References()
        self.meter = Meter()
        """What was summed over all tokens scored since the records were cleared."""
        self.use(strategy, protocol, tail_tokens)
        self.rows_per_batch = rows_of(batch_size)
        if max_batch_tokens is not None:
            max_batch_tokens = positive("max_batch_tokens", max_batch_tokens, "nothing")
        if for_hf.get("max_length") is not None:
            for_hf["max_length"] = positive("max_length", for_hf["max_length"], "nothing")
        self.label = pretrained if isinstance(pretrained, str) else type(pretrained).__name__
        model, tokenizer = model_and_tokenizer(
            pretrained,
            tokenizer,
            dtype=dtype,
            device=device,
            device_map=device_map,
            revision=revision,
            trust_remote_code=trust_remote_code,
            gguf_file=gguf_file,
        )
        self.wrapped = WrappedModel(model, calibration=self._calibration_tokens)
        if self.prefill_chunk is not None:
            require_state_carried(model, lambda *read: read_in_chunks(self.wrapped, *read))
        with no_warning_of_a_loaded_model():
            super().__init__(
                model, backend="causal", tokenizer=tokenizer, batch_size=self.rows_per_batch or 1, **for_hf
            )
        self.max_batch_tokens = max_batch_tokens or batch_tokens_for(self.wrapped.model)
        self.max_prompt_tokens = max_batch_tokens or batch_tokens_for(self.wrapped.model, MOST_PROMPT_TOKENS)
        self.pretrained = resolve(pretrained) if isinstance(pretrained, str) else ""
        self.revision = revision
        self.progress: Callable[[int, int], None] | None = None
        self.num_fewshot: int | None = None
        """Examples in the prompts, when the caller knows; else counted by blank lines."""

    def use(self, strategy: Strategy, protocol: str, tail_tokens: int | None = None) -> None:
        """Switch to another strategy; the model stays loaded and no state is carried over.
        ``tail_tokens`` stays as it was when not given."""
        strategy.require_protocol(protocol)
        require_chunked_prefill(strategy, self.prefill_chunk)
        tail_tokens = require_tail_tokens(self.tail_tokens if tail_tokens is None else tail_tokens)
        self.strategy = strategy
        self.protocol = protocol
        self.tail_tokens = tail_tokens
        self.clear_records()  # they speak of the strategy before

    def _calibration_tokens(self, source: str) -> list[int]:
        return self.tok_encode(calibration_text(source))

    def clear_records(self) -> None:
        """Forget what was recorded and summed; what ``full`` answered stays."""
        self.records: list[RequestRecord] = []
        self.meter.clear()

    def set_cache_hook(self, cache_hook: Any) -> None:
        """lm-eval's request cache, which is refused.

        Raises:
            KvaccError: ``--use_cache`` was given.
        """
        if getattr(cache_hook, "dbdict", None) is not None:
            raise KvaccError(
                "--use_cache answers one strategy's requests with another's results (its key ignores the "
                "model and the strategy); leave it out, and use `kvacc run` to resume"
            )
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """Into lm-eval's results: what ran, and what it kept."""
        info = super().get_model_info() if self.pretrained else {}
        logger = logging.getLogger("lm_eval.kvacc")
        for line in log_lines(self.strategy, self.protocol, self.records):
            logger.info(line)
        return info | model_info(self.strategy, self.protocol, self.records)

    # Each is made when needed: what it holds may have been changed since.

    def _prompts(self) -> Prompts:
        return Prompts(self, self.protocol, self.tail_tokens, self.num_fewshot)

    def _generator(self) -> Generator:
        return Generator(self._prompts(), self.wrapped, self.prefill_chunk)

    def _recorder(self) -> Recorder:
        return Recorder(self.strategy, self.tokenizer.bos_token_id)

    def _counted(
        self, total: int, kind: str, disable_tqdm: bool
    ) -> AbstractContextManager[Callable[[int], None]]:
        quiet = disable_tqdm or self.progress is not None or self.rank != 0
        return counted(total, f"{self.strategy.name}: {kind}", quiet, self.progress)

    def _prepacked(self) -> AbstractContextManager[None]:
        return self.wrapped.prepacked.used() if self.prepack_weights else nullcontext()

    def _metered(self) -> Meter:
        self.meter.references = self.references if self.fidelity else None
        return self.meter

    # Scoring

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(sum of the continuation's log-probabilities, every token was the most likely)."""
        prompts = self._prompts()
        encoded = [prompts.with_continuation(instance) for instance in requests]
        answers = self._answers(requests, encoded, disable_tqdm)
        for instance, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", instance.args, answer)
        return answers

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, override_bs=None):
        """lm-eval's inner interface, for callers that have tokens already."""
        instances = [
            Instance("loglikelihood", {}, pair or ("", ""), i, metadata=(None, None, None))
            for i, (pair, _, _) in enumerate(requests)
        ]
        return self._answers(instances, [(context, target) for _, context, target in requests], disable_tqdm)

    def _answers(
        self,
        instances: Sequence[Instance],
        encoded: Sequence[tuple[list[int], list[int]]],
        disable_tqdm: bool,
    ) -> list[tuple[float, bool]]:
        """lm-eval's answers in the order of the instances; keeps records."""
        scored = self._score(prepare(self._prompts(), instances, encoded), "loglikelihood", disable_tqdm)
        by_instance = {id(prepared.instance): (prepared, score) for prepared, score in scored}
        ordered = [by_instance[id(instance)] for instance in instances]
        recorder = self._recorder()
        self.records += [recorder.scored(prepared, score) for prepared, score in ordered]
        return [(score.loglikelihood, score.greedy) for _, score in ordered]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows of the model's context length (or ``window``)."""
        if self.protocol != "stream":
            raise KvaccError(
                f"a text scored as a whole has no prompt to compress, so protocol {self.protocol!r} "
                "means nothing for it; use protocol=stream"
            )
        length = self.max_length if self.window is None else min(self.window, self.max_length)
        texts = [windows_of(self, instance, length) for instance in requests]
        alone = [[window] for windows in texts for window in windows]
        scored = iter(self._score(alone, "loglikelihood_rolling", disable_tqdm))
        recorder = self._recorder()
        answers = []
        for instance, windows in zip(requests, texts, strict=True):
            scores = [next(scored)[1] for _ in windows]
            total = sum(s.loglikelihood for s in scores)
            answers.append(total)
            self.records.append(recorder.rolling(instance, windows, scores, total))
            self.cache_hook.add_partial("loglikelihood_rolling", instance.args, total)
        return answers

    def _score(
        self, documents: list[list[Prepared]], kind: str, disable_tqdm: bool
    ) -> list[tuple[Prepared, Score]]:
        """Every request with its score, document after document."""
        with self._counted(sum(map(len, documents)), kind, disable_tqdm) as advance, self._prepacked():
            scores = score_documents(
                self.wrapped,
                [[p.request for p in document] for document in documents],
                self.strategy,
                self.max_batch_tokens,
                advance,
                # Texts scored as a whole are also summed by position.
                meter=self._metered() if self.fidelity or kind == "loglikelihood_rolling" else None,
            )
        return [
            pair
            for document, answers in zip(documents, scores, strict=True)
            for pair in zip(document, answers, strict=True)
        ]

    # Generation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Text generated after each prompt, up to its stop sequences."""
        groups: dict[str, list[int]] = {}
        for number, instance in enumerate(requests):
            groups.setdefault(repr(sorted(instance.args[1].items())), []).append(number)
        texts: list[str] = [""] * len(requests)
        records: list[RequestRecord | None] = [None] * len(requests)
        with self._counted(len(requests), "generate_until", disable_tqdm) as advance, self._prepacked():
            for numbers in groups.values():
                for which, made in self._in_batches([requests[n] for n in numbers]):
                    for k, (text, record) in zip(which, made, strict=True):
                        texts[numbers[k]], records[numbers[k]] = text, record
                    advance(len(which))
        if self.fidelity and self.strategy.name != "full":
            with self._prepacked():
                records = compared_with_full(
                    self._generator(), self.references, self._score_again, requests, records
                )
        self.records += records
        for instance, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", instance.args, text)
        return texts

    def _in_batches(
        self, instances: list[Instance]
    ) -> Iterator[tuple[list[int], list[tuple[str, RequestRecord]]]]:
        """Numbers of instances with equal generation arguments, and what was generated for them."""
        generator = self._generator()
        room = generator.arguments(instances[0]).room
        return in_batches(
            self.wrapped,
            self.strategy,
            [generator.read(instance).alone for instance in instances],
            room,
            lambda tokens: self._rows_for(tokens, room),
            self.prefill_chunk,
            lambda numbers, beginning: self._generate_batch([instances[n] for n in numbers], beginning),
        )

    def _rows_for(self, prompt_tokens: int, new_tokens: int) -> int:
        """Rows of a generation from prompts of that length."""
        if self.rows_per_batch:
            return self.rows_per_batch
        rows = max(1, min(16, self.max_prompt_tokens // max(1, prompt_tokens)))
        on_processor = self.wrapped.device.type == "cpu"
        return 1 if on_processor and alone_is_faster(prompt_tokens, new_tokens, rows) else rows

    def _generate_batch(
        self, instances: list[Instance], beginning: Beginning | None = None
    ) -> list[tuple[str, RequestRecord]]:
        """One batch with equal generation arguments."""
        generator, recorder = self._generator(), self._recorder()
        arguments = generator.arguments(instances[0])
        rows = generator.generate(instances, arguments, self.strategy, beginning)
        if self.fidelity and self.strategy.name == "full" and arguments.is_greedy:
            keep_answers(self.references, rows, arguments)
        return [
            (generator.text(row.tokens, arguments.until), recorder.generated(instance, row))
            for instance, row in zip(instances, rows, strict=True)
        ]

    def _score_again(self, documents: list[list[Request]]) -> list[list[Score]]:
        """Scores of what was generated, compared with ``full``."""
        return score_documents(
            self.wrapped, documents, self.strategy, self.max_batch_tokens, meter=self._metered()
        )


_ARGUMENTS = tuple(
    name for name in KvaccLM.__init__.__annotations__ if name not in ("options", "return", "tokenizer")
)
