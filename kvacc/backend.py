"""The lm-eval backend ``kvacc``: any Hugging Face decoder under a KV-cache strategy.

    lm_eval.simple_evaluate(model="kvacc",
        model_args="pretrained=smollm2-135m,strategy=h2o,budget=0.2,protocol=stream", ...)

Tokenisation, chat templates and stop sequences are those of lm-eval's own ``hf``
backend, which this class extends; how a continuation is scored and how text is
generated is the engine's. The requests of one document are scored together, so its
options share one budget and one pass over their common tokens.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from kvacc.budget import EVERYTHING
from kvacc.calibration import calibration_text
from kvacc.engine.fidelity import Meter, References
from kvacc.engine.generation import Generated, generate
from kvacc.engine.memory import MOST_PROMPT_TOKENS, batch_tokens_for
from kvacc.engine.plan import Request
from kvacc.engine.prefill import (
    read_in_chunks,
    require_chunk,
    require_chunked_prefill,
    require_state_carried,
)
from kvacc.engine.scoring import Score, is_out_of_memory, score_documents
from kvacc.engine.shared_prompt import Beginning, can_share, plan_batches
from kvacc.engine.stepping import RowReading
from kvacc.engine.wrapped import WrappedModel
from kvacc.errors import KvaccError, nearest
from kvacc.models import load_model, load_tokenizer, resolve
from kvacc.records import (
    SELECTION,
    RequestRecord,
    fidelity_of,
    fidelity_words,
    mean_fidelity,
    mean_selection,
    selection_of,
    selection_words,
    weighted_mean,
)
from kvacc.strategy import Strategy, make_strategy
from kvacc.task_catalog import context_boundary

HF_OPTIONS = (
    "max_length", "truncation", "add_bos_token", "prefix_token_id", "think_end_token",
    "enable_thinking", "chat_template_args",
)  # fmt: skip
"""Arguments of lm-eval's ``hf`` backend that are passed on to it."""


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A request as tokens, with what has to be reported about it."""

    instance: Instance
    request: Request
    prompt_tokens: int
    truncated: int

    @property
    def unreachable(self) -> int:
        """Scored queries read with the full cache."""
        return max(0, self.request.dense - self.request.first_scored)


@dataclasses.dataclass(frozen=True)
class _GeneratedRow:
    """What was generated after one prompt; ``tokens`` go on until the whole batch had stopped."""

    prompt: list[int]
    reading: RowReading
    truncated: int
    tokens: list[int]
    measured: Generated


@dataclasses.dataclass(frozen=True)
class _GeneratedBatch:
    """Rows, their stop strings, transformers' arguments, and what ended the answers, as text."""

    rows: list[_GeneratedRow]
    until: list[str]
    options: dict[str, Any]
    limits: str


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
        max_batch_tokens: padded tokens per forward pass; as the free memory allows when not given.
        fidelity: compare every scored token's distribution with ``full``'s, too: divergence,
            agreement, attention mass kept (:mod:`kvacc.engine.fidelity`). ``full`` runs once for a
            request, whatever is compared with it afterwards.
        window: tokens of a window in which whole texts are scored; the model's context by default.
        prefill_chunk: tokens of a prompt that a generation reads in one pass; all by default. It
            bounds the memory of long prompts and changes no result.
        batch_size: rows per pass of a generation; scoring is batched by tokens.
            ``max_batch_size`` is lm-eval's own argument and changes nothing.
        device, dtype, revision, device_map, trust_remote_code, gguf_file: how the model is
            loaded, see :func:`kvacc.models.load_model`.

    Raises:
        KvaccError: a model, strategy, protocol or option that cannot be used.
    """

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
            strategy = self._strategy_from(strategy, budget, budget_of, options)
        elif options:
            raise KvaccError(f"unknown option {next(iter(options))!r} beside a ready strategy")
        if not isinstance(fidelity, bool):
            raise KvaccError(f"fidelity {fidelity!r} is neither true nor false; give one of them")
        self.fidelity = fidelity
        self.window = None if window is None else _positive("window", window, "nothing")
        self.prefill_chunk = require_chunk(prefill_chunk)
        self.references = References()
        self.meter = Meter()
        """What was summed over all tokens scored since the records were cleared."""
        self.use(strategy, protocol, tail_tokens)
        automatic = batch_size is None or str(batch_size).startswith("auto")
        self.rows_per_batch = 0 if automatic else _positive("batch_size", batch_size, "auto")
        if max_batch_tokens is not None:
            max_batch_tokens = _positive("max_batch_tokens", max_batch_tokens, "nothing")
        if for_hf.get("max_length") is not None:
            for_hf["max_length"] = _positive("max_length", for_hf["max_length"], "nothing")
        self.label = pretrained if isinstance(pretrained, str) else type(pretrained).__name__
        if isinstance(pretrained, str):
            source = {"revision": revision, "trust_remote_code": trust_remote_code, "gguf_file": gguf_file}
            model = load_model(pretrained, dtype=dtype, device=device, device_map=device_map, **source)
            tokenizer = tokenizer or load_tokenizer(pretrained, **source)
        elif tokenizer is None:
            raise KvaccError("a loaded model needs its tokenizer: give tokenizer=")
        else:
            model = pretrained
        self.wrapped = WrappedModel(model, calibration=self._calibration_tokens)
        if self.prefill_chunk is not None:
            require_state_carried(model, lambda *read: read_in_chunks(self.wrapped, *read))
        with _no_warning_of_a_loaded_model():
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

    @staticmethod
    def _strategy_from(name: str, budget: Any, budget_of: str, options: dict[str, Any]) -> Strategy:
        try:
            return make_strategy(name, budget, budget_of, **options)
        except KvaccError as error:
            if "has no option" not in str(error):
                raise
            unknown = next(o for o in options if f"option {o!r}" in str(error))
            hint = nearest(unknown, (*HF_OPTIONS, *_ARGUMENTS))
            raise KvaccError(f"{error}{hint and f'; or the backend argument{hint}'}") from None

    def use(self, strategy: Strategy, protocol: str, tail_tokens: int | None = None) -> None:
        """Switch to another strategy; the model stays loaded and no state is carried over.
        ``tail_tokens`` stays as it was when not given."""
        strategy.require_protocol(protocol)
        require_chunked_prefill(strategy, self.prefill_chunk)
        if tail_tokens is None:
            tail_tokens = self.tail_tokens
        if not isinstance(tail_tokens, int) or tail_tokens < 0:
            raise KvaccError(f"tail_tokens {tail_tokens!r} is not a whole number of at least 0")
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
        records = self.records
        tokens = [r.scored_tokens for r in records]
        scored = sum(tokens)
        selection = mean_selection(records, tokens)
        selection["moved_bytes_per_token"] = selection.pop("moved_bytes")
        self._log_what_it_did()
        return info | {
            "kvacc_strategy": repr(self.strategy),
            "kvacc_strategy_file_sha256": self.strategy.file_sha256,
            "kvacc_protocol": self.protocol,
            "kvacc_causal": self.strategy.causal,
            "kvacc_requests_acted_on": sum(r.acted for r in records),
            "kvacc_requests": len(records),
            "kvacc_kept_fraction": weighted_mean([r.kept_fraction for r in records], tokens),
            "kvacc_unreachable_share": sum(r.unreachable_tokens for r in records) / scored
            if scored
            else None,
            "kvacc_truncated_requests": sum(r.truncated_tokens > 0 for r in records),
            **{f"kvacc_{name}": value for name, value in selection.items() if value is not None},
            **self._fidelity_info(),
        }

    def _fidelity_info(self) -> dict[str, float]:
        """Means over the scored tokens, where fidelity was measured."""
        found = {f"kvacc_{name}": value for name, value in _per_token(self.records).items()}
        return {name: value for name, value in found.items() if value is not None}

    def _log_what_it_did(self) -> None:
        """A line for each task beside lm-eval's table, which has no place for it."""
        for task in dict.fromkeys(r.task for r in self.records):
            mine = [r for r in self.records if r.task == task]
            scored = sum(r.scored_tokens for r in mine) or 1
            kept = weighted_mean([r.kept_fraction for r in mine], [r.scored_tokens for r in mine]) or 0.0
            acted = sum(r.acted for r in mine)
            out = sum(r.unreachable_tokens for r in mine) / scored
            means = mean_selection(mine, [r.scored_tokens for r in mine])
            words = selection_words(*(means[name] for name in SELECTION))
            fidelity = _per_token(mine)
            words += fidelity_words(fidelity["kl"], fidelity["agreement"])
            parts = [f"kept {kept:.1%}", *words, f"acted on {acted} of {len(mine)} requests"]
            notes = "" if self.strategy.causal else ", non-causal: it reads later tokens"
            if self.strategy.has_budget and not acted:
                notes += ", did not act: this is the full cache's score"
            logging.getLogger("lm_eval.kvacc").info(
                f"{task}: {self.strategy.name}, {self.protocol}: {', '.join(parts)}, "
                f"{out:.0%} of scored tokens out of reach{notes}"
            )

    # Scoring

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(sum of the continuation's log-probabilities, every token was the most likely)."""
        encoded = [self._encode(instance) for instance in requests]
        documents = self._prepare(requests, encoded)
        scores = self._score(documents, requests, "loglikelihood", disable_tqdm)
        answers = [(s.loglikelihood, s.greedy) for s in scores]
        for instance, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", instance.args, answer)
        return answers

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, override_bs=None):
        """lm-eval's inner interface, for callers that have tokens already."""
        instances = [
            Instance("loglikelihood", {}, pair or ("", ""), i, metadata=(None, None, None))
            for i, (pair, _, _) in enumerate(requests)
        ]
        documents = self._prepare(instances, [(context, target) for _, context, target in requests])
        scores = self._score(documents, instances, "loglikelihood", disable_tqdm)
        return [(s.loglikelihood, s.greedy) for s in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows of the model's context length (or ``window``)."""
        if self.protocol != "stream":
            raise KvaccError(
                f"a text scored as a whole has no prompt to compress, so protocol {self.protocol!r} "
                "means nothing for it; use protocol=stream"
            )
        length = self.max_length if self.window is None else min(self.window, self.max_length)
        windows: list[_Prepared] = []
        counts = []
        for instance in requests:
            tokens = self.tok_encode(instance.args[0])
            pairs = [
                utils.make_disjoint_window(window)
                for window in utils.get_rolling_token_windows(
                    token_list=tokens,
                    prefix_token=self.prefix_token_id,
                    max_seq_len=length,
                    context_len=1,
                )
            ]
            counts.append(len(pairs))
            for context, target in pairs:
                inputs = (*context, *target)[:-1]
                # The text itself is what gets compressed: a fraction refers to its window.
                request = Request(inputs, tuple(target), dense=0, compressed=len(inputs))
                windows.append(_Prepared(instance, request, len(context), 0))
        answers, scores = (
            [],
            iter(self._score([[w] for w in windows], None, "loglikelihood_rolling", disable_tqdm)),
        )
        position = 0
        for instance, count in zip(requests, counts, strict=True):
            parts = [next(scores) for _ in range(count)]
            total = sum(s.loglikelihood for s in parts)
            answers.append(total)
            self._record_rolling(instance, windows[position : position + count], parts, total)
            self.cache_hook.add_partial("loglikelihood_rolling", instance.args, total)
            position += count
        return answers

    def _encode(self, instance: Instance) -> tuple[list[int], list[int]]:
        """lm-eval's own split into context and continuation tokens."""
        context, continuation = instance.args
        if context == "":
            target = self.tok_encode(continuation, add_special_tokens=False)
            if target and self.prefix_token_id == target[0]:
                return target[:1], target[1:]
            return [self.prefix_token_id], target
        return self._encode_pair(context, continuation)

    def _prepare(self, instances: Sequence[Instance], encoded: Sequence[tuple[list[int], list[int]]]):
        """Documents of prepared requests. Options of a document get one compressed length."""
        documents: dict[Any, list[_Prepared]] = {}
        for number, (instance, (context, target)) in enumerate(zip(instances, encoded, strict=True)):
            prepared = self._cut(instance, context, target)
            # A request without a prompt (acc_mutual_info's) must not set the budget of the others.
            known = instance.metadata is not None and instance.doc_id is not None and instance.args[0] != ""
            key = (instance.task_name, instance.doc_id) if known else number
            documents.setdefault(key, []).append(prepared)
        return [self._one_budget(document) for document in documents.values()]

    def _cut(self, instance: Instance, context: list[int], target: list[int]) -> _Prepared:
        #   CTX      CONT         the model reads all but the last token, from the left as
        #   0 1 2 3|4 5 6 7 8 9   much as fits; the continuation's tokens are predicted at
        #         ^ ^ ^ ^ ^ ^     the marked places
        if not target:
            raise KvaccError(
                f"request {instance.idx} of document {instance.doc_id} in {instance.task_name!r} has "
                f"an empty continuation after tokenisation: {instance.args[1]!r}"
            )
        if len(target) > self.max_length:
            raise KvaccError(
                f"a continuation of {len(target)} tokens is longer than the model's context of "
                f"{self.max_length}: give a larger max_length, or leave the document out"
            )
        inputs = (context + target)[-(self.max_length + 1) :][:-1]
        truncated = len(context) + len(target) - 1 - len(inputs)
        prompt = len(inputs) - (len(target) - 1)
        dense = self._dense_tokens(instance, context, prompt, truncated)
        request = Request(tuple(inputs), tuple(target), dense, compressed=dense or prompt)
        return _Prepared(instance, request, prompt, truncated)

    def _dense_tokens(self, instance: Instance, context: list[int], prompt: int, truncated: int) -> int:
        """Tokens read with the full cache before the strategy acts."""
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
        before = self.tok_encode(text[:end])
        common = next(
            (i for i, (a, b) in enumerate(zip(before, context, strict=False)) if a != b), len(before)
        )
        return min(max(1, common - truncated), prompt)

    @staticmethod
    def _one_budget(document: list[_Prepared]) -> list[_Prepared]:
        # WinoGrande's options stand inside the context: the shortest sets the budget of all,
        # so that no option is read with more of it than another.
        shared = min(p.request.compressed for p in document)
        return [
            dataclasses.replace(p, request=dataclasses.replace(p.request, compressed=shared))
            for p in document
        ]

    def _score(
        self, documents: list[list[_Prepared]], instances: Sequence[Instance] | None, kind: str, quiet: bool
    ) -> list[Score]:
        """Scores in the order of ``instances`` (of the documents when None); keeps records."""
        total = sum(map(len, documents))
        quiet = quiet or self.progress is not None or self.rank != 0
        with tqdm(total=total, disable=quiet, desc=f"{self.strategy.name}: {kind}") as bar:
            scores = score_documents(
                self.wrapped,
                [[p.request for p in document] for document in documents],
                self.strategy,
                self.max_batch_tokens,
                self._advance(bar, total),
                # Texts scored as a whole are also summed by position.
                meter=self._metered() if self.fidelity or kind == "loglikelihood_rolling" else None,
            )
        flat = [
            (prepared, score)
            for document, answers in zip(documents, scores, strict=True)
            for prepared, score in zip(document, answers, strict=True)
        ]
        if instances is None:
            return [score for _, score in flat]
        by_instance = {id(prepared.instance): (prepared, score) for prepared, score in flat}
        ordered = [by_instance[id(instance)] for instance in instances]
        for prepared, score in ordered:
            self.records.append(self._record(prepared, kind, score))
        return [score for _, score in ordered]

    def _metered(self) -> Meter:
        self.meter.references = self.references if self.fidelity else None
        return self.meter

    def _advance(self, bar: tqdm, total: int) -> Callable[[int], None]:
        """What to call with the number of requests just finished."""
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            bar.update(count)
            if self.progress:
                self.progress(done, total)

        return advance

    def _record(self, prepared: _Prepared, kind: str, score: Score) -> RequestRecord:
        instance, request = prepared.instance, prepared.request
        return RequestRecord(
            task=instance.task_name,
            doc_id=instance.doc_id,
            option=instance.idx,
            kind=kind,
            prompt_tokens=prepared.prompt_tokens,
            scored_tokens=len(request.targets),
            truncated_tokens=prepared.truncated,
            budget_entries=self._entries(request.compressed, len(request.tokens)),
            kept_fraction=score.kept_fraction,
            acted=score.hidden,
            unreachable_tokens=prepared.unreachable if self.strategy.has_budget else 0,
            bos_tokens=self._leading_bos(request.tokens),
            loglikelihood=score.loglikelihood,
            greedy=score.greedy,
            **selection_of(score),
            **fidelity_of(score),
            compared_tokens=0 if score.kl is None else len(request.targets),
        )

    def _leading_bos(self, tokens: Sequence[int]) -> int:
        # Chat templates may use the same token to open every turn; only the first are meant.
        return next(
            (i for i, token in enumerate(tokens) if token != self.tokenizer.bos_token_id), len(tokens)
        )

    def _entries(self, compressed: int, seen: int) -> int | None:
        """The budget that held at the end of a request of ``seen`` tokens; None without a limit."""
        entries = self.strategy.budget.entries(compressed, seen) if self.strategy.has_budget else EVERYTHING
        return None if entries == EVERYTHING else entries

    def _record_rolling(
        self, instance: Instance, windows: list[_Prepared], scores: list[Score], total: float
    ) -> None:
        if not windows:  # an empty text: nothing to score, and nothing hidden
            nothing = _Prepared(instance, Request((), (), dense=0, compressed=1), 0, 0)
            record = self._record(nothing, "loglikelihood_rolling", Score(total, True, 1.0, False))
            self.records.append(record)
            return
        counts = [len(w.request.targets) for w in windows]
        scored = sum(counts)
        kept = sum(s.kept_fraction * n for s, n in zip(scores, counts, strict=True)) / scored
        greedy, hidden = all(s.greedy for s in scores), any(s.hidden for s in scores)
        measured = mean_selection(scores, counts) | mean_fidelity(scores, counts)
        merged = Score(total, greedy, kept, hidden, **measured)
        record = self._record(windows[0], "loglikelihood_rolling", merged)
        compared = 0 if merged.kl is None else scored
        self.records.append(dataclasses.replace(record, scored_tokens=scored, compared_tokens=compared))

    # Generation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Text generated after each prompt, up to its stop sequences."""
        groups: dict[str, list[int]] = {}
        for number, instance in enumerate(requests):
            groups.setdefault(repr(sorted(instance.args[1].items())), []).append(number)
        texts: list[str] = [""] * len(requests)
        records: list[RequestRecord | None] = [None] * len(requests)
        quiet = disable_tqdm or self.progress is not None or self.rank != 0
        with tqdm(total=len(requests), disable=quiet, desc=f"{self.strategy.name}: generate_until") as bar:
            advance = self._advance(bar, len(requests))
            for numbers in groups.values():
                alike = [requests[n] for n in numbers]
                for which, made in self._in_batches(alike):
                    for k, (text, record) in zip(which, made, strict=True):
                        texts[numbers[k]], records[numbers[k]] = text, record
                    advance(len(which))
        self.records += self._compared_with_full(requests, records) if self.fidelity else records
        for instance, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", instance.args, text)
        return texts

    def _in_batches(
        self, instances: list[Instance]
    ) -> Iterator[tuple[list[int], list[tuple[str, RequestRecord]]]]:
        """Numbers of instances with equal generation arguments, and what was generated for them."""
        prompts = []
        for instance in instances:
            tokens, reading, _ = self._reading(instance)
            prompts.append(Request(tuple(tokens), tuple(tokens[-1:]), reading.dense, reading.compressed))
        share = can_share(self.wrapped, self.strategy)
        room = self._generation_options(instances[0])[2] if instances else 0
        waiting = plan_batches(prompts, self.strategy, share, self._rows_for, room)
        beginning: Beginning | None = None
        group: int | None = None
        while waiting:
            batch = waiting.pop(0)
            try:
                if batch.group != group or beginning is None:
                    beginning, group = None, batch.group  # its memory is free before the next is read
                    if batch.shared:
                        first = prompts[batch.prompts[0]]
                        beginning = Beginning(
                            self.wrapped, self.strategy, first, batch.shared, self.prefill_chunk
                        )
                made = self._generate_batch([instances[n] for n in batch.prompts], beginning)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or (len(batch.prompts) == 1 and not batch.shared):
                    raise
                # Those that wait would not fit either, and would say so late in their generation.
                most = len(batch.prompts) // 2
                rest = [part for each in waiting for part in each.smaller(max(1, most))]
                waiting = [*batch.smaller(most), *rest]
                continue
            yield batch.prompts, made

    def _rows_for(self, prompt_tokens: int) -> int:
        """Rows of a generation from prompts of that length."""
        return self.rows_per_batch or max(1, min(16, self.max_prompt_tokens // max(1, prompt_tokens)))

    def _generate_batch(
        self, instances: list[Instance], beginning: Beginning | None = None
    ) -> list[tuple[str, RequestRecord]]:
        """One batch with equal generation arguments."""
        made = self._generate(instances, self.strategy, beginning=beginning)
        if self.fidelity and self.strategy.name == "full" and _is_greedy(made.options):
            self._keep_answers(made)
        out = []
        for instance, one in zip(instances, made.rows, strict=True):
            record = RequestRecord(
                task=instance.task_name,
                doc_id=instance.doc_id,
                option=instance.idx,
                kind="generate_until",
                prompt_tokens=len(one.prompt),
                scored_tokens=one.measured.tokens,
                truncated_tokens=one.truncated,
                budget_entries=self._entries(one.reading.compressed, len(one.prompt) + one.measured.tokens),
                kept_fraction=one.measured.kept_fraction,
                acted=one.measured.hidden,
                # The first token comes from the prompt's last query.
                unreachable_tokens=int(one.reading.dense >= len(one.prompt) and self.strategy.has_budget),
                bos_tokens=self._leading_bos(one.prompt),
                **selection_of(one.measured),
            )
            out.append((self._text(one.tokens, made.until), record))
        return out

    def _keep_answers(self, made: _GeneratedBatch) -> None:
        for one in made.rows:
            self.references.add_answer(one.prompt, made.limits, one.tokens[: one.measured.tokens])

    def _compared_with_full(
        self, instances: list[Instance], records: list[RequestRecord]
    ) -> list[RequestRecord]:
        """The records with the fidelity on the tokens of ``full``'s own greedy answers, which the
        strategy reads under its protocol and budget as it would have generated them."""
        if self.strategy.name == "full":
            return records
        documents: list[list[Request]] = []
        numbers: list[int] = []
        for number, instance in enumerate(instances):
            prompt, reading, _ = self._reading(instance)
            answer = self._answer_of_full(instance, prompt)
            if answer:
                tokens = (*prompt, *answer[:-1])
                request = Request(tokens, tuple(answer), reading.dense, reading.compressed)
                documents.append([request])
                numbers.append(number)
        scores = score_documents(
            self.wrapped, documents, self.strategy, self.max_batch_tokens, meter=self._metered()
        )
        out = list(records)
        for number, [request], [score] in zip(numbers, documents, scores, strict=True):
            # What a selection moved is measured where it ran, in the generation.
            found = fidelity_of(score) | selection_of(score) | {"moved_bytes": records[number].moved_bytes}
            found["compared_tokens"] = len(request.targets)
            out[number] = dataclasses.replace(records[number], **found)
        return out

    def _answer_of_full(self, instance: Instance, prompt: list[int]) -> list[int]:
        """The tokens that ``full`` generates greedily after the prompt; made once."""
        _, until, room, total = self._generation_options(instance)
        limits = _limits(until, room, total)
        if self.references.answer(prompt, limits) is None:
            self._keep_answers(self._generate([instance], make_strategy("full"), greedy=True))
        return self.references.answer(prompt, limits)

    def _generation_options(self, instance: Instance) -> tuple[dict[str, Any], list[str], int, int | None]:
        """transformers' arguments, stop strings, most new tokens, and longest text if one is set."""
        options = normalize_gen_kwargs(instance.args[1], self.max_gen_toks)
        end = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(options.pop("until", None), eos=end)
        room = options.pop("max_gen_toks")
        if "cache_implementation" in options:
            raise KvaccError(
                "generation argument cache_implementation: the strategy is the cache; leave it out"
            )
        if "prefill_chunk_size" in options:
            raise KvaccError(
                "generation argument prefill_chunk_size: give the model prefill_chunk, which is checked "
                "against the strategy"
            )
        if self.max_length - room < 1:
            raise KvaccError(
                f"max_gen_toks {room} leaves no room for a prompt in a context of {self.max_length} tokens"
            )
        return options, until, room, options.pop("max_length", None)

    def _reading(self, instance: Instance) -> tuple[list[int], RowReading, int]:
        """The prompt as it fits the context, how it is read, and the tokens cut off."""
        room = self._generation_options(instance)[2]
        whole = self._prompt(instance)
        prompt = whole[-(self.max_length - room) :]
        cut = len(whole) - len(prompt)
        dense = self._dense_tokens(instance, whole, len(prompt), cut)
        return prompt, RowReading(0, dense, dense or len(prompt)), cut

    def _generate(
        self,
        instances: list[Instance],
        strategy: Strategy,
        greedy: bool = False,
        beginning: Beginning | None = None,
    ) -> _GeneratedBatch:
        """Generate under a strategy; ``greedy`` takes the most likely token, whatever the task asks."""
        options, until, room, total = self._generation_options(instances[0])
        if greedy:
            options = {name: value for name, value in options.items() if name not in _SAMPLING}
            options["do_sample"] = False
        readings = [self._reading(instance) for instance in instances]
        prompts = [prompt for prompt, _, _ in readings]
        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        pad = self.tokenizer.pad_token_id
        context = torch.tensor(
            [[pad] * n + p for n, p in zip(padding, prompts, strict=True)], device=self.device
        )
        mask = torch.tensor(
            [[0] * n + [1] * len(p) for n, p in zip(padding, prompts, strict=True)], device=self.device
        )
        rows = [
            dataclasses.replace(reading, padding=left)
            for (_, reading, _), left in zip(readings, padding, strict=True)
        ]

        def run(cache):
            return self._model_generate(
                context=context,
                attention_mask=mask,
                stop=until,
                max_length=total or width + room,
                cache=cache,
                prefill_chunk_size=self.prefill_chunk,
                **options,
            )

        copies = max(options.get("num_beams", 1), options.get("num_return_sequences", 1))
        ends = {self.eot_token_id, *_as_list(self.model.generation_config.eos_token_id)}
        try:
            tokens, measured = generate(
                self.wrapped,
                strategy,
                rows,
                run,
                width,
                copies,
                ends,
                lambda made: self._answer_length(made, until),
                self.prefill_chunk,
                beginning,
            )
        except (TypeError, ValueError) as error:
            if isinstance(error, KvaccError) or "model_kwargs" not in str(error):
                raise
            raise KvaccError(f"generation arguments {instances[0].args[1]!r}: {error}") from None
        each = len(tokens) // len(instances)
        made = [
            _GeneratedRow(prompt, row, cut, tokens[b * each, width:].tolist(), measured[b])
            for b, ((prompt, _, cut), row) in enumerate(zip(readings, rows, strict=True))
        ]
        return _GeneratedBatch(made, until, options, _limits(until, room, total))

    def _answer_length(self, tokens: list[int], until: list[str]) -> int:
        """Tokens up to the first with which the text holds a stop string: transformers goes
        on with the whole batch until every row has met one."""

        def stopped(length: int) -> bool:
            text = self.tok_decode(tokens[:length])
            return any(stop and stop in text for stop in until)

        return bisect.bisect_left(range(len(tokens)), True, key=lambda i: stopped(i + 1)) + stopped(
            len(tokens)
        )

    def _text(self, tokens: list[int], until: list[str]) -> str:
        """The answer: thinking and stop sequences cut off as lm-eval does."""
        end = self.think_end_token
        if isinstance(end, int):
            if end in tokens:
                tokens = tokens[len(tokens) - tokens[::-1].index(end) :]
            return postprocess_generated_text(self.tok_decode(tokens).lstrip(), until, think_end_token=None)
        return postprocess_generated_text(self.tok_decode(tokens), until, think_end_token=end)

    def _prompt(self, instance: Instance) -> list[int]:
        return self.tok_encode(instance.args[0]) or [self.prefix_token_id]


@contextlib.contextmanager
def _no_warning_of_a_loaded_model() -> Iterator[None]:
    """lm-eval warns that loading options are ignored for a loaded model: they were used before."""
    logger = logging.getLogger(HFLM.__module__)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _positive(name: str, value: Any, otherwise: str) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1 or number != float(value):
        raise KvaccError(f"{name} {value!r} is not a whole number of at least 1; give one, or {otherwise}")
    return number


_SAMPLING = (
    "do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p", "num_beams", "num_return_sequences",
)  # fmt: skip
"""Arguments of ``generate`` that make it other than greedy."""


def _is_greedy(options: dict[str, Any]) -> bool:
    copies = max(options.get("num_beams", 1), options.get("num_return_sequences", 1))
    return not options.get("do_sample") and copies == 1


def _limits(until: list[str], room: int, total: int | None) -> str:
    return repr((until, room, total))


def _per_token(records: Sequence[RequestRecord]) -> dict[str, float | None]:
    """Fidelity averaged over the scored tokens of requests that were compared with ``full``."""
    known = [record for record in records if record.kl is not None]
    tokens = [record.compared_tokens for record in known]
    means = mean_fidelity(known, tokens)
    total = means["loglikelihood_difference"]
    return means | {"loglikelihood_difference": None if total is None else total / sum(tokens)}


def _as_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]


_ARGUMENTS = tuple(
    name for name in KvaccLM.__init__.__annotations__ if name not in ("options", "return", "tokenizer")
)
