"""Run a sweep: every planned cell, each written as soon as it is done.

A run's folder holds ``run.json`` (what was asked for, written before anything is
computed) and ``cells/<cell_id>/`` (see :mod:`kvacc.results`). Nothing else is
remembered: a sweep that was killed, at any time, is resumed by running it again,
because finished cells are found by their id and skipped. Two sweeps in one folder
do no harm: a cell appears whole or not at all, and the first one stays.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvacc
from kvacc import results, task_catalog
from kvacc.config import CellSpec, ModelEntry, RunConfig, plan_cells
from kvacc.errors import KvaccError
from kvacc.records import fidelity_words, selection_words
from kvacc.sweep_progress import SweepProgress, as_duration, reporting

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.api.task import Task
    from rich.console import Console

RUN_FILE = "run.json"
CELLS_FOLDER = "cells"
_RUN_SCHEMA = 1
_SHOWN_DIFFERENCES = 3
_SOURCE_WORDS = {"hub": "the hub", "folder": "a folder", "embedded": "kvacc itself"}
_WITHOUT_INFLUENCE = ("max_batch_tokens", "device", "device_map")
"""Settings that do not change which cells there are."""
_DOCUMENTS_WEIGHED = 20

LoadModel = Callable[[ModelEntry, RunConfig], "LM"]
TaskKey = tuple[str, str, str, int, str]
"""What decides a task's prompts: name, options, the tokenizer it is made for, shots and their sampler."""
_DOCUMENTS = slice(0, 3)
"""The part of it that decides the documents."""


@dataclass
class SweepReport:
    """What a sweep did."""

    folder: Path
    """The run's folder."""
    planned: int
    """Cells that the configuration asks for."""
    computed: list[str] = field(default_factory=list)
    """Ids of the cells computed now."""
    skipped: list[str] = field(default_factory=list)
    """Ids of the cells that were finished already."""
    damaged: list[str] = field(default_factory=list)
    """What was wrong with cells that had to be computed again."""
    failed: dict[str, str] = field(default_factory=dict)
    """Cells that could not be computed, by label, with the reason."""


def run_sweep(
    config: RunConfig,
    output_dir: str | os.PathLike[str],
    *,
    console: Console | None = None,
    extend: bool = False,
    load_model: LoadModel | None = None,
) -> SweepReport:
    """Compute every cell of ``config`` that ``output_dir`` does not hold yet.

    Args:
        config: from :func:`kvacc.config.load_config`.
        output_dir: the run's folder, made when needed.
        console: where progress is shown; by default the standard error stream.
        extend: add the cells to a folder made by another configuration.
        load_model: gives the backend for a model; by default :class:`kvacc.KvaccLM`. With another
            one, retention tasks count their length by words, because its tokenizer is not known.

    Returns:
        What was computed, skipped and refused. A cell that fails for a reason that the
        user can mend is listed in ``failed``; the others are still computed.

    Raises:
        KvaccError: documents cannot be reached, the folder cannot be written or holds
            another configuration's run, or a model cannot be loaded.
        KeyboardInterrupt: passed on; what was finished stays.
    """
    from rich.console import Console

    console = console or Console(stderr=True)
    folder = Path(output_dir)
    cells = plan_cells(config)
    report = SweepReport(folder, planned=len(cells))
    run = _run_entry(config, cells)
    _refuse_other_run(folder, run, extend)
    progress = SweepProgress(console, 0, 0)
    for line in _sources(cells):
        progress.say(line)

    finished, pending = _sort_out(folder / CELLS_FOLDER, cells, report)
    for message in report.damaged:
        progress.say(f"computed again: {message}")
    report.skipped = [spec.cell_id for spec in cells if spec.cell_id in finished]
    if finished:
        progress.say(f"{len(finished)} of {len(cells)} cells are finished already")
    # Before any model is loaded: what is wrong with a task or the folder shows in seconds.
    with task_catalog.quiet_lm_eval():
        tasks = _load_tasks(pending, config, None if load_model else _load_tokenizer)
        _refuse_changed_documents([spec for spec in cells if spec.cell_id in finished], finished, tasks)
    _claim(folder, run, extend)
    if not pending:
        return report
    _require_writable(folder / CELLS_FOLDER)
    with task_catalog.quiet_lm_eval():
        work = {spec.cell_id: _work(spec, tasks[_task_key(spec)]) for spec in pending}

    with SweepProgress(console, len(pending), sum(work.values())) as progress, _resumable(report, progress):
        for model, specs in _by_model(pending):
            lm = (load_model or _load_model)(model, config)
            _run_model(lm, specs, tasks, finished, work, progress, report)
            del lm
            _free_memory()
    for label, reason in report.failed.items():
        progress.say(f"failed: {label}: {reason}")
    return report


def _run_model(
    lm: LM,
    specs: Sequence[CellSpec],
    tasks: dict[TaskKey, Task],
    finished: dict[str, results.Cell],
    work: dict[str, float],
    progress: SweepProgress,
    report: SweepReport,
) -> None:
    from kvacc.evaluation import evaluate_cell, fingerprint_of

    fingerprint = fingerprint_of(lm, specs[0])
    _refuse_changed_model(specs[0], finished, fingerprint)
    cells_folder = report.folder / CELLS_FOLDER
    for spec in specs:
        progress.start_cell(spec.label, work[spec.cell_id])
        if _is_finished(cells_folder, spec):
            report.skipped.append(spec.cell_id)
            progress.finish_cell("finished by another sweep")
            continue
        try:
            with reporting(lm, progress), _explained_memory(spec):
                result = evaluate_cell(spec, lm, tasks[_task_key(spec)], model_fingerprint=fingerprint)
        except KvaccError as error:
            report.failed[spec.label] = str(error)
            progress.finish_cell(f"failed: {error}")
            continue
        results.write_cell(cells_folder, result)
        report.computed.append(spec.cell_id)
        progress.finish_cell(_outcome(result))


def _load_model(model: ModelEntry, config: RunConfig) -> LM:
    from kvacc.backend import KvaccLM

    given = {name: value for name, value in model.model_dump().items() if value is not None}
    return KvaccLM(**given, max_batch_tokens=config.max_batch_tokens)


def _load_tokenizer(model: ModelEntry) -> Any:
    from kvacc.models import load_tokenizer

    names = ("revision", "trust_remote_code", "gguf_file")
    return load_tokenizer(model.pretrained, **{name: getattr(model, name) for name in names})


def _task_key(spec: CellSpec) -> TaskKey:
    # Only a task that is generated depends on the model: its length counts the model's tokens.
    generated = task_catalog.find_task(spec.task).generator is not None
    model = json.dumps(spec.model.identity(), sort_keys=True) if generated else ""
    options = json.dumps(spec.task_options, sort_keys=True)
    return spec.task, options, model, spec.shots, spec.fewshot_sampler


def _load_tasks(
    pending: Sequence[CellSpec], config: RunConfig, load_tokenizer: Callable[[ModelEntry], Any] | None
) -> dict[TaskKey, Task]:
    """lm-eval's task for each key, generated ones by the model's own tokenizer.

    Raises:
        KvaccError: its documents cannot be loaded or made, or are too few for the shots.
    """
    from kvacc.evaluation import require_shots

    tasks: dict[TaskKey, Task] = {}
    tokenizers: dict[str, Any] = {}
    for spec in pending:
        key = _task_key(spec)
        if key not in tasks:
            model = key[2]
            if model and load_tokenizer and model not in tokenizers:
                tokenizers[model] = load_tokenizer(spec.model)
            tasks[key] = task_catalog.load_tasks(
                [spec.task],
                data_dir=config.data_dir,
                num_fewshot=spec.shots,
                seed=config.seed,
                fewshot_sampler=spec.fewshot_sampler if spec.shots else None,
                options=spec.task_settings,
                tokenizer=tokenizers.get(model),
            )[spec.task]
        require_shots(spec, tasks[key])
    return tasks


def _work(spec: CellSpec, task: Task) -> float:
    """Characters to read, roughly: documents x their average length x prompts' examples."""
    documents = task.eval_docs
    number = len(documents) if spec.limit is None else min(spec.limit, len(documents))
    weighed = [len(str(documents[index])) for index in range(min(number, _DOCUMENTS_WEIGHED))]
    return number * (sum(weighed) / max(len(weighed), 1)) * (spec.shots + 1)


def _sort_out(
    cells_folder: Path, cells: Sequence[CellSpec], report: SweepReport
) -> tuple[dict[str, results.Cell], list[CellSpec]]:
    """Finished cells by id, and those still to compute."""
    finished, pending = {}, []
    for spec in cells:
        try:
            cell = results.find_cell(cells_folder, spec.cell_id)
        except KvaccError as error:
            report.damaged.append(str(error))
            cell = None
        if cell is None:
            pending.append(spec)
        else:
            finished[spec.cell_id] = cell
    return finished, pending


def _is_finished(cells_folder: Path, spec: CellSpec) -> bool:
    try:
        return results.find_cell(cells_folder, spec.cell_id) is not None
    except KvaccError:
        return False


def _by_model(cells: Sequence[CellSpec]) -> Iterator[tuple[ModelEntry, list[CellSpec]]]:
    while cells:
        model = cells[0].model
        yield model, [spec for spec in cells if spec.model == model]
        cells = [spec for spec in cells if spec.model != model]


def _sources(cells: Sequence[CellSpec]) -> Iterator[str]:
    """One line for each source of documents: which tasks, from where, and why."""
    groups: dict[tuple[str, str], dict[str, None]] = {}
    for spec in cells:
        groups.setdefault((spec.source, spec.why_source), {})[spec.task] = None
    for (source, why), tasks in groups.items():
        yield f"data: {', '.join(tasks)} from {_SOURCE_WORDS[source]}: {why}"


def _outcome(result: results.CellResult) -> str:
    metric = result.task.primary_metric
    score = result.scores[metric]
    error = "" if score.stderr is None else f" ± {score.stderr:.3f}"
    measured = result.measured
    parts = [
        f"{metric} {score.value:.3f}{error}",
        f"kept {measured.kept_fraction:.3f}",
        *selection_words(measured.moved_bytes_per_token, measured.attention_mass, measured.recall),
        *(fidelity_words(result.fidelity.kl, result.fidelity.agreement) if result.fidelity else ()),
        f"acted on {measured.acted_items}/{result.task.num_items} items",
        as_duration(result.timing.seconds),
    ]
    return ", ".join(parts)


def _run_entry(config: RunConfig, cells: Sequence[CellSpec]) -> dict[str, Any]:
    return {"config": config.model_dump(mode="json"), "cells": {spec.cell_id: spec.label for spec in cells}}


def _refuse_other_run(folder: Path, run: dict[str, Any], extend: bool) -> list[dict[str, Any]]:
    """The runs that ``folder`` holds already, if this one may join them.

    Raises:
        KvaccError: it holds another configuration's run, or is no folder.
    """
    path = folder / RUN_FILE
    with _explained_writing(folder):
        if folder.exists() and not folder.is_dir():
            raise KvaccError(f"output folder {folder} is a file; choose another --output")
        if not path.exists():
            return []
        known = _read_run(path)
    if not extend and not _is_among(run, known):
        raise KvaccError(
            f"{folder} holds a run of another configuration ({_difference(known, run)}); "
            "give another --output, or --extend to add these cells to it"
        )
    return known


def _is_among(run: dict[str, Any], known: Sequence[dict[str, Any]]) -> bool:
    return any(set(other["cells"]) == set(run["cells"]) for other in known)


def _claim(folder: Path, run: dict[str, Any], extend: bool) -> None:
    """Write ``run.json``, or see that it has this run already.

    Raises:
        KvaccError: the folder cannot be written, or holds another configuration's run.
    """
    path = folder / RUN_FILE
    content = {"schema_version": _RUN_SCHEMA, "kvacc": kvacc.__version__, "runs": [run]}
    with _explained_writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Two sweeps that extend a folder at once would each write the runs that it has read.
        with results.exclusive(folder) as alone:
            if alone:
                for leftover in folder.glob(f".{RUN_FILE}-*"):
                    leftover.unlink(missing_ok=True)
            results.remove_leftovers(folder / CELLS_FOLDER)
            if not path.exists() and _write(path, content, replace=False):
                return
            known = _refuse_other_run(folder, run, extend)
            if not _is_among(run, known):
                _write(path, {**content, "runs": [*known, run]}, replace=True)


def _read_run(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version, schema, runs = content["kvacc"], content["schema_version"], content["runs"]
        readable = bool(runs) and all(isinstance(run["cells"], dict) for run in runs)
    except (ValueError, KeyError, TypeError):
        readable = False
    if not readable:
        raise KvaccError(f"{path} is damaged; choose another --output, or delete this file to keep the cells")
    if schema != _RUN_SCHEMA or version != kvacc.__version__:
        raise KvaccError(
            f"{path.parent} holds a run of kvacc {version}, and this is {kvacc.__version__}; "
            "give another --output, so that no table mixes them unseen"
        )
    return runs


def _difference(known: Sequence[dict[str, Any]], run: dict[str, Any]) -> str:
    """How this run differs from the one it is closest to, in words."""
    here = _flat(run["config"])
    candidates = []
    for other in known:
        there = _flat(other["config"])
        keys = [
            key for key in [*here, *(k for k in there if k not in here)] if here.get(key) != there.get(key)
        ]
        keys = [key for key in keys if key.rpartition(".")[2] not in _WITHOUT_INFLUENCE]
        candidates.append(
            [f"{key} is {_shown(here, key)} here but {_shown(there, key)} there" for key in keys]
        )
    differences = min(candidates, key=len)
    if not differences:
        # The same words with another meaning: tasks: auto found other documents.
        others = set().union(*(other["cells"] for other in known))
        new = next((label for cell_id, label in run["cells"].items() if cell_id not in others), None)
        return "the same file, but its cells are fewer now" if new is None else f"the cell {new!r} is new"
    more = len(differences) - _SHOWN_DIFFERENCES
    tail = f", and {more} more" if more > 0 else ""
    return ", ".join(differences[:_SHOWN_DIFFERENCES]) + tail


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Nested values by dotted path."""
    if isinstance(value, dict) and value:
        parts = value.items()
    elif isinstance(value, list) and value:
        parts = enumerate(value)
    else:
        return {path: value}
    flat: dict[str, Any] = {}
    for key, part in parts:
        flat |= _flat(part, f"{path}.{key}" if path else str(key))
    return flat


def _shown(flat: dict[str, Any], key: str) -> str:
    return json.dumps(flat[key]) if key in flat else "absent"


def _refuse_changed_documents(
    specs: Sequence[CellSpec], finished: dict[str, results.Cell], tasks: dict[TaskKey, Task]
) -> None:
    # Examples come from the same documents, so another number of shots says as much of them.
    loaded = {key[_DOCUMENTS]: task for key, task in tasks.items()}
    prints: dict[tuple, str] = {}
    for spec in specs:
        key, cell = _task_key(spec)[_DOCUMENTS], finished[spec.cell_id]
        if key not in loaded:
            continue
        if key not in prints:
            prints[key] = task_catalog.data_fingerprint(loaded[key], spec.limit)
        if prints[key] != cell.task.data_fingerprint:
            raise KvaccError(
                f"the documents of task {cell.task.name!r} have changed since cell {cell.cell_id} was "
                "computed; give another --output"
            )


def _refuse_changed_model(
    spec: CellSpec, finished: dict[str, results.Cell], fingerprint: dict[str, Any]
) -> None:
    for cell in finished.values():
        if cell.spec.model == spec.model.identity() and cell.model != fingerprint:
            raise KvaccError(
                f"model {spec.model.pretrained!r} has changed since cell {cell.cell_id} was computed; "
                "give another --output"
            )


def _require_writable(folder: Path) -> None:
    with _explained_writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Named as cells are while they are written, so that a later run removes one left by a kill.
        probe = folder / results.temporary_name("probe")
        probe.mkdir()
        probe.rmdir()


def _write(path: Path, content: dict[str, Any], *, replace: bool) -> bool:
    """Write JSON in one step. Without ``replace``: False when the file is there already."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(temporary, path)
            return True
        try:
            # A link never overwrites: of two sweeps that start at once, one makes the file.
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError:
            # This file system has no links.
            os.replace(temporary, path)
        return True
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _explained_writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise KvaccError(
            f"cannot write to output folder {folder}: {reason}; choose another --output"
        ) from None


@contextlib.contextmanager
def _explained_memory(spec: CellSpec) -> Iterator[None]:
    from kvacc.engine.scoring import is_out_of_memory

    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        _free_memory()
        first = str(error).splitlines()[0]
        raise KvaccError(
            f"{spec.label}: out of memory ({first}); set max_batch_tokens lower, or a smaller dtype"
        ) from None


@contextlib.contextmanager
def _resumable(report: SweepReport, progress: SweepProgress) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        done = len(report.computed) + len(report.skipped)
        progress.say(
            f"stopped with {done} of {report.planned} cells done; the same command goes on from here"
        )
        raise


def _free_memory() -> None:
    """Give a model's memory back before the next one is loaded."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
