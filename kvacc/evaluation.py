"""Evaluate one cell: lm-eval scores the documents, the backend says what the strategy did.

:func:`evaluate_cell` joins the two into one row per request, and computes what a
reader needs beside the score: the kept fraction as measured, the share of documents
on which the strategy acted, and standard errors from the documents' own scores.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
import math
import numbers
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvacc import task_catalog
from kvacc.environment import environment_of
from kvacc.errors import KvaccError
from kvacc.fidelity import curve_records, fidelity_record
from kvacc.records import FIDELITY, SELECTION, RequestRecord, mean_selection
from kvacc.results import (
    METRIC_PREFIX,
    WHERE,
    CellResult,
    CurveRecord,
    FidelityRecord,
    MeasuredRecord,
    Score,
    SpecRecord,
    StrategyRecord,
    TaskRecord,
    TimingRecord,
)

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.api.task import Task

    from kvacc.config import CellSpec

BOOTSTRAP_DRAWS = 1000
_NO_FILTER = "none"


def evaluate_cell(
    spec: CellSpec, lm: LM, task: Task, *, model_fingerprint: dict[str, Any] | None = None
) -> CellResult:
    """Score one task under one strategy.

    Args:
        spec: what to run; its model is the one that ``lm`` holds.
        lm: a backend with ``use``, ``records``, ``clear_records``, ``fidelity``, ``window`` and
            ``num_fewshot``; with a ``meter`` too, if it measures fidelity or scores whole texts.
        task: from ``task_catalog.load_tasks``, with the number of shots set.
        model_fingerprint: what ``kvacc.models.fingerprint`` says, if known already.

    Returns:
        The cell with its samples, ready for ``results.write_cell``.

    Raises:
        KvaccError: the task has no documents or not enough few-shot examples, or a
            score is not a finite number.
    """
    from lm_eval.evaluator import evaluate

    info = task_catalog.find_task(spec.task)
    require_shots(spec, task)
    lm.fidelity = spec.fidelity
    lm.window = spec.task_options.get("window")
    lm.use(spec.strategy, spec.protocol, spec.tail_tokens)
    # Where the context segment of a prompt ends depends on how many examples it begins with.
    lm.num_fewshot = spec.shots
    lm.clear_records()
    # The sampler is one random stream: without this, a second cell would get other prompts.
    task.set_fewshot_seed(spec.seed)
    started = datetime.datetime.now(datetime.UTC)
    begin = time.perf_counter()
    with _quiet_evaluator(), task_catalog.quiet_lm_eval():
        outcome = evaluate(
            lm=lm,
            task_dict={"tasks": {spec.task: task}, "groups": {}},
            limit=spec.limit,
            # lm-eval's standard errors come from a process pool and can print as 0.0.
            bootstrap_iters=0,
            log_samples=True,
        )
    seconds = time.perf_counter() - begin

    documents = _documents(outcome["samples"][spec.task])
    records = _records_by_instance(spec, task, lm.records)
    rows = _rows(spec, task, documents, records)
    values = _values_by_metric(outcome["samples"][spec.task])
    scores = _scores(spec.task, task, outcome["results"][spec.task], values, rows)
    _add_metric_columns(rows, values, scores)
    measured = _measured(rows, records)
    fidelity = _fidelity(lm, rows, records)
    return CellResult(
        cell_id=spec.cell_id,
        spec=SpecRecord(**spec.asked()),
        task=TaskRecord(
            name=spec.task,
            version=str(outcome["versions"].get(spec.task, "")),
            kind=str(info.kind),
            source=str(spec.source),
            data_fingerprint=task_catalog.data_fingerprint(task, spec.limit),
            num_items=len(documents),
            metrics=sorted(scores),
            primary_metric=_primary_metric(info.default_metric, scores),
            chance=info.chance,
            # Cells are published: the fingerprint names the documents, a path only the machine.
            why_source="data folder" if spec.source == "folder" and not spec.task_paths else spec.why_source,
        ),
        model=model_fingerprint or fingerprint_of(lm, spec),
        scores=scores,
        measured=measured,
        strategy=StrategyRecord(
            causal=spec.strategy.causal,
            physical_eviction=spec.strategy.physical_eviction,
            is_control=spec.strategy.is_control,
            offloads=getattr(spec.strategy, "offloads", False),
            repr=repr(spec.strategy),
        ),
        environment=environment_of(str(lm.device)),
        timing=TimingRecord(seconds=seconds, started=started.isoformat(timespec="seconds")),
        fidelity=fidelity,
        curve=_curve(lm, records),
        warnings=[
            *_warnings(spec, info, measured, len(documents)),
            *_fidelity_warnings(spec, records),
            *_calibration_warnings(spec, info),
        ],
        samples=rows,
    )


def fingerprint_of(lm: LM, spec: CellSpec) -> dict[str, Any]:
    """What exactly the loaded model is."""
    from kvacc.models import fingerprint

    return fingerprint(lm.model, spec.model.pretrained)


def score_stderr(
    values: Sequence[Any],
    clusters: Sequence[str],
    aggregate: Callable[[Sequence[Any]], float],
    score: float,
) -> float | None:
    """Standard error of a score from its documents' values.

    A mean has a formula, which counts documents of one cluster together; anything else
    is bootstrapped by drawing clusters. None when it cannot be known: fewer than two
    documents. Zero only when all documents have the same value.
    """
    from kvacc.statistics import items_stderr

    if len(values) < 2:
        return None
    if not is_mean(values, score):
        return _bootstrap_stderr(values, clusters, aggregate)
    return items_stderr(values, clusters)


def is_mean(values: Sequence[Any], score: float) -> bool:
    """True when the score is the average of the documents' values."""
    if not all(isinstance(value, numbers.Real) for value in values):
        return False
    average = math.fsum(values) / len(values)
    return math.isclose(average, score, rel_tol=1e-9, abs_tol=1e-12)


def _bootstrap_stderr(
    values: Sequence[Any], clusters: Sequence[str], aggregate: Callable[[Sequence[Any]], float]
) -> float | None:
    members: dict[str, list[Any]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        members.setdefault(cluster, []).append(value)
    groups = list(members.values())
    if len(groups) < 2:
        groups = [[value] for value in values]
    draw = random.Random(0)
    scores = []
    for _ in range(BOOTSTRAP_DRAWS):
        chosen = draw.choices(groups, k=len(groups))
        scores.append(float(aggregate([value for group in chosen for value in group])))
    spread = statistics.stdev(scores)
    return spread if math.isfinite(spread) else None


def require_shots(spec: CellSpec, task: Task) -> None:
    """Raise KvaccError unless the task has documents, and examples enough for the prompts."""
    if not len(task.eval_docs):
        raise KvaccError(f"task {spec.task!r} has no documents; check the data folder, or leave the task out")
    loaded = task.config.num_fewshot or 0
    if loaded != spec.shots:
        raise KvaccError(f"task {spec.task!r} runs {loaded}-shot only, but {spec.shots} shots were asked for")
    if spec.shots:
        available = len(task.fewshot_docs() or ())
        # One more than needed, because the document itself is never its own example.
        if available <= spec.shots:
            raise KvaccError(
                f"task {spec.task!r} has {available} documents to draw examples from, too few for "
                f"{spec.shots} shots; ask for at most {max(available - 1, 0)}"
            )
        _require_sampler(spec, task)


def _require_sampler(spec: CellSpec, task: Task) -> None:
    """Raise RuntimeError if the task would build other prompts than the cell will say."""
    from lm_eval.api.samplers import get_sampler

    if type(task.sampler) is not get_sampler(spec.fewshot_sampler):
        found = type(task.sampler).__name__
        raise RuntimeError(f"task {spec.task!r} was loaded with a {found}, not with {spec.fewshot_sampler}")


def _documents(samples: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """lm-eval's samples by document; of several filters the first."""
    documents: dict[int, dict[str, Any]] = {}
    for sample in samples:
        documents.setdefault(sample["doc_id"], sample)
    return documents


def _values_by_metric(samples: Sequence[dict[str, Any]]) -> dict[str, dict[int, Any]]:
    """Each metric's value for each document; a filter's name follows the metric's."""
    values: dict[str, dict[int, Any]] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            name = metric if sample["filter"] == _NO_FILTER else f"{metric},{sample['filter']}"
            values.setdefault(name, {})[sample["doc_id"]] = sample[metric]
    return values


def _records_by_instance(spec: CellSpec, task: Task, records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """The backend's record of each of the task's requests."""
    known: dict[tuple[int | None, int], RequestRecord] = {}
    for record in records:
        known.setdefault((record.doc_id, record.option), record)
    for instance in task.instances:
        if (instance.doc_id, instance.idx) not in known:
            raise RuntimeError(
                f"the backend has no record of {spec.task} document {instance.doc_id}, option {instance.idx}"
            )
    return [known[instance.doc_id, instance.idx] for instance in task.instances]


def _rows(
    spec: CellSpec, task: Task, documents: dict[int, dict[str, Any]], records: Sequence[RequestRecord]
) -> list[dict[str, Any]]:
    """One row per request: lm-eval's answer joined with the backend's record of it."""
    rows = []
    for instance, record in zip(task.instances, records, strict=True):
        sample = documents[instance.doc_id]
        rows.append(
            {
                "doc_id": instance.doc_id,
                "doc_hash": sample["doc_hash"],
                # Of this request's own prompt: options of one document can differ in it.
                "prompt_hash": hashlib.sha256(instance.args[0].encode()).hexdigest(),
                "target_hash": sample["target_hash"],
                "cluster": task_catalog.cluster_key(spec.task, instance.doc, instance.doc_id),
                "option": instance.idx,
                "kind": record.kind,
                **_answer(instance.request_type, instance.resps[0]),
                # Of a text scored as a whole, the target is the text: its hash is enough.
                "target": "" if record.kind == "loglikelihood_rolling" else str(sample["target"]),
                "kept_fraction": record.kept_fraction,
                "acted": record.acted,
                "prompt_tokens": record.prompt_tokens,
                "scored_tokens": record.scored_tokens,
                "unreachable_tokens": record.unreachable_tokens,
                "truncated_tokens": record.truncated_tokens,
                "budget_entries": record.budget_entries,
                "bos_tokens": record.bos_tokens,
                **{name: getattr(record, name) for name in (*SELECTION, *FIDELITY)},
                **_where(spec, instance.doc),
            }
        )
    return rows


def _where(spec: CellSpec, doc: dict[str, Any]) -> dict[str, Any]:
    """Depth and length of a retention document; another task's fields of these names mean something else."""
    generated = task_catalog.find_task(spec.task).generator is not None
    return {name: doc.get(name) if generated else None for name in WHERE}


def _answer(kind: str, response: Any) -> dict[str, Any]:
    if kind == "generate_until":
        return {"loglikelihood": None, "greedy": None, "response": str(response)}
    if kind == "loglikelihood_rolling":
        value = response[0] if isinstance(response, (tuple, list)) else response
        return {"loglikelihood": float(value), "greedy": None, "response": None}
    loglikelihood, greedy = response
    return {"loglikelihood": float(loglikelihood), "greedy": bool(greedy), "response": None}


def _scores(
    name: str,
    task: Task,
    results: dict[str, Any],
    values: dict[str, dict[int, Any]],
    rows: Sequence[dict[str, Any]],
) -> dict[str, Score]:
    clusters = {row["doc_id"]: row["cluster"] for row in rows}
    scores = {}
    for metric, by_document in values.items():
        key = metric if "," in metric else f"{metric},{_NO_FILTER}"
        value = results.get(key)
        if not isinstance(value, numbers.Real):
            continue
        if not math.isfinite(value):
            raise KvaccError(
                f"task {name!r}: {metric} is {value}; the model's outputs overflowed: try dtype: float32"
            )
        aggregate = task.aggregation().get(metric.partition(",")[0])
        stderr = score_stderr(
            list(by_document.values()), [clusters[doc_id] for doc_id in by_document], aggregate, value
        )
        scores[metric] = Score(value=float(value), stderr=stderr)
    return scores


def _add_metric_columns(
    rows: Sequence[dict[str, Any]], values: dict[str, dict[int, Any]], scores: dict[str, Score]
) -> None:
    """``metric_<name>`` for every metric that averages over documents, so that cells can be paired.

    Null where a document has no part in the metric, such as the accuracy at another depth.
    """
    for metric, score in scores.items():
        if is_mean(list(values[metric].values()), score.value):
            for row in rows:
                value = values[metric].get(row["doc_id"])
                row[METRIC_PREFIX + metric] = None if value is None else float(value)


def _primary_metric(preferred: str | None, scores: dict[str, Score]) -> str:
    if preferred in scores:
        return preferred
    # A generation task's metrics carry the filter's name.
    with_filter = [metric for metric in scores if metric.partition(",")[0] == preferred]
    return (with_filter or list(scores))[0]


def _measured(rows: Sequence[dict[str, Any]], records: Sequence[RequestRecord]) -> MeasuredRecord:
    scored = sum(row["scored_tokens"] for row in rows)
    kept = math.fsum(row["kept_fraction"] * row["scored_tokens"] for row in rows)
    unreachable = sum(row["unreachable_tokens"] for row in rows)
    documents = {row["doc_id"] for row in rows}
    acted = {row["doc_id"] for row in rows if row["acted"]}
    budgets = [row["budget_entries"] for row in rows if row["budget_entries"] is not None]
    selection = mean_selection(records, [record.scored_tokens for record in records])
    return MeasuredRecord(
        kept_fraction=kept / scored if scored else 1.0,
        acted_share=len(acted) / len(documents),
        acted_items=len(acted),
        budget_entries_median=statistics.median(budgets) if budgets else None,
        unreachable_share=unreachable / scored if scored else 0.0,
        truncated_requests=sum(row["truncated_tokens"] > 0 for row in rows),
        scored_tokens=scored,
        prompt_tokens_median=statistics.median(row["prompt_tokens"] for row in rows),
        bos_tokens_median=statistics.median(row["bos_tokens"] for row in rows),
        moved_bytes_per_token=selection.pop("moved_bytes"),
        **selection,
    )


def _fidelity(
    lm: LM, rows: Sequence[dict[str, Any]], records: Sequence[RequestRecord]
) -> FidelityRecord | None:
    meter = getattr(lm, "meter", None)
    if meter is None:
        return None
    return fidelity_record(records, [row["cluster"] for row in rows], meter, lm.wrapped.layers)


def _curve(lm: LM, records: Sequence[RequestRecord]) -> list[CurveRecord] | None:
    meter = getattr(lm, "meter", None)
    whole_texts = all(record.kind == "loglikelihood_rolling" for record in records)
    return curve_records(meter) if meter is not None and records and whole_texts else None


def _fidelity_warnings(spec: CellSpec, records: Sequence[RequestRecord]) -> list[str]:
    if not spec.fidelity or spec.strategy.name == "full":
        return []
    unknown = sum(record.kl is None for record in records)
    return [f"fidelity could not be measured on {unknown} of {len(records)} requests"] if unknown else []


def _calibration_warnings(spec: CellSpec, info: Any) -> list[str]:
    """A strategy must not have prepared itself on the text that it is judged by."""
    prose = info.kind == task_catalog.LONGTEXT and spec.source == str(task_catalog.TaskSource.EMBEDDED)
    if prose and spec.strategy.options().get("calibration") == "prose":
        return ["calibrated on the evaluated text: give the task other texts, or another calibration"]
    return []


def _warnings(spec: CellSpec, info: Any, measured: MeasuredRecord, documents: int) -> list[str]:
    found = []
    if spec.strategy.has_budget and measured.acted_items == 0:
        found.append(
            "did not act: the strategy hid no entry from any scored token, so this is no result about it"
        )
    if not spec.strategy.causal:
        found.append("non-causal: scores depend on later tokens")
    if measured.truncated_requests:
        found.append(
            f"{measured.truncated_requests} prompts were cut from the left to fit the model's context"
        )
    if info.kind == "smoke":
        found.append("smoke test: shows that the machinery works, not what a strategy costs")
    if spec.limit is not None and documents < spec.limit:
        found.append(f"limit {spec.limit} is above the {documents} documents of the task; all were used")
    return found


@contextlib.contextmanager
def _quiet_evaluator() -> Iterator[None]:
    """Hold back two things that would break up the sweep's display: lm-eval's own bar while it
    builds prompts, and its warning that metrics per depth cover only the documents at that depth."""
    import lm_eval.api.task as module

    bar = module.tqdm
    logger = logging.getLogger("lm_eval.evaluator_utils")
    level = logger.level
    module.tqdm = lambda documents, *args, **kwargs: documents
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        module.tqdm = bar
        logger.setLevel(level)
