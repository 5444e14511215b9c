"""Measure every case of a configuration: one group at a time, each written when it is done.

A run's folder holds a file for each case (:mod:`kvacc.probes.store`) and nothing else. A run
that was killed, at any time, is resumed by running it again: finished cases are skipped, and
at most the group in flight is lost. A case that cannot run, because memory ends or the model
has too few positions, is a result like any other: its record says why.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvacc
from kvacc.config import ModelEntry
from kvacc.errors import KvaccError
from kvacc.probes.cases import Group, PlannedCase, case_id, plan_groups
from kvacc.probes.config import ProbeConfig
from kvacc.probes.records import CapacityRecord, ProbeRecord
from kvacc.probes.searches import SearchJob, outcome_of, search_capacity, search_jobs
from kvacc.probes.store import find_capacity, find_probe, write_capacity, write_probe
from kvacc.sweep_progress import SweepProgress, as_duration

if TYPE_CHECKING:
    from rich.console import Console

    from kvacc.probes.measuring import Measured
    from kvacc.probes.probed_model import ProbedModel
    from kvacc.results import EnvironmentRecord

LoadModel = Callable[[ModelEntry], "ProbedModel"]
OF_A_CASE = ("latency", "memory", "transfers")
"""The measures that a case's record has; the others have records of their own."""
_WORK_OF_A_SEARCH = 50_000
"""In tokens, as :func:`_work` has it."""


@dataclass
class ProbeReport:
    """What a probe run did."""

    folder: Path
    """The run's folder."""
    planned: int = 0
    """Cases that the configuration asks for."""
    records: list[ProbeRecord] = field(default_factory=list)
    """Of every case, those of earlier runs included."""
    capacities: list[CapacityRecord] = field(default_factory=list)
    """What was found to fit a limit, that of earlier runs included."""
    measured: list[str] = field(default_factory=list)
    """Ids of the cases measured now."""
    skipped: list[str] = field(default_factory=list)
    """Ids of the cases that were finished already."""
    damaged: list[str] = field(default_factory=list)
    """What was wrong with records that had to be made again."""

    refused: dict[str, str] = field(default_factory=dict)
    """Searches that could not be made, by label, with the reason; they have no record."""

    @property
    def failures(self) -> dict[str, str]:
        """Case id -> why it could not run, of cases with a record."""
        return {record.case_id: record.failure for record in self.records if record.failure}


@dataclass
class _Job:
    """A group, and which of its cases are still to be measured."""

    group: Group
    environment: EnvironmentRecord
    ids: list[str]
    missing: list[int] = field(default_factory=list)

    @property
    def planned(self) -> list[PlannedCase]:
        return [self.group.cases[place] for place in self.missing]


def run_probes(
    config: ProbeConfig,
    output_dir: str | os.PathLike[str],
    *,
    console: Console | None = None,
    load_model: LoadModel | None = None,
) -> ProbeReport:
    """Measure every case of ``config`` that ``output_dir`` has no record of yet.

    Args:
        config: from :func:`kvacc.probes.config.load_probe_config`.
        output_dir: the run's folder, made when needed.
        console: where progress is shown; by default the standard error stream.
        load_model: gives the model; by default
            :func:`kvacc.probes.probed_model.load_probed_model`.

    Raises:
        KvaccError: the folder cannot be written, or has records of another kvacc or of another
            model of that name, or a model cannot be loaded.
        KeyboardInterrupt: passed on; what was finished stays.
    """
    from rich.console import Console

    from kvacc.environment import environment_of
    from kvacc.models import resolve_device
    from kvacc.probes.probed_model import load_probed_model

    environment = functools.cache(lambda device: environment_of(resolve_device(device)))
    jobs, searches = _jobs(config, environment), search_jobs(config, environment)
    report = ProbeReport(Path(output_dir), planned=sum(len(job.ids) for job in jobs) + len(searches))
    _require_folder(report.folder)
    finished = _sort_out(jobs, report)
    pending = [job for job in jobs if job.missing]
    open_searches = [job for job in searches if _missing(find_capacity, job.case_id, report)]
    work = sum(map(_work, pending)) + _WORK_OF_A_SEARCH * len(open_searches)
    progress = SweepProgress(console or Console(stderr=True), len(pending) + len(open_searches), work)
    with _resumable(report, progress):
        for message in report.damaged:
            progress.say(f"measured again: {message}")
        if report.skipped:
            progress.say(f"{len(report.skipped)} of {report.planned} cases are measured already")
        for entry in config.models:
            of_model = [job for job in pending if job.group.entry == entry]
            searches_of_model = [job for job in open_searches if job.search.entry == entry]
            if not of_model and not searches_of_model:
                continue
            model = (load_model or load_probed_model)(entry)
            fingerprint = model.fingerprint()
            _refuse_changed_model(entry, fingerprint, finished)
            for job in of_model:
                _run_job(config, job, model, fingerprint, report, progress)
            for job in searches_of_model:
                _run_search(config, job, model, report, progress)
            del model
            gc.collect()
    report.records = [_found(report.folder, each) for job in jobs for each in job.ids]
    found = (find_capacity(report.folder, job.case_id) for job in searches)
    report.capacities = [record for record in found if record is not None]
    return report


def _jobs(config: ProbeConfig, environment: Callable[[str | None], EnvironmentRecord]) -> list[_Job]:
    measures = sorted(set(config.measures) & set(OF_A_CASE))
    settings: dict[str, Any] = {"measures": measures}
    if "latency" in measures:
        settings |= {"repeats": config.repeats, "warmup": config.warmup, "seed": config.seed}
    jobs = []
    for group in plan_groups(config) if measures else ():
        here = environment(group.entry.device)
        device = f"{here.processor}, {here.device}"
        ids = [case_id(planned.case, device, settings) for planned in group.cases]
        jobs.append(_Job(group, here, ids))
    return jobs


def _sort_out(jobs: Sequence[_Job], report: ProbeReport) -> list[ProbeRecord]:
    """The finished records; notes in each job which are missing."""
    finished = []
    for job in jobs:
        job.missing = [place for place, each in enumerate(job.ids) if _missing(find_probe, each, report)]
        there = set(range(len(job.ids))) - set(job.missing)
        finished += [_found(report.folder, job.ids[place]) for place in sorted(there)]
    return finished


def _missing(find: Callable[[Path, str], Any], identity: str, report: ProbeReport) -> bool:
    """Is there no usable record yet? Notes what was found.

    Raises:
        KvaccError: the record was made by another version of kvacc.
    """
    try:
        record = find(report.folder, identity)
    except KvaccError as error:
        report.damaged.append(str(error))
        return True
    if record is None:
        return True
    if record.environment.kvacc != kvacc.__version__:
        raise KvaccError(
            f"{report.folder} holds probes of kvacc {record.environment.kvacc}, and this is "
            f"{kvacc.__version__}; give another --output, so that no table mixes them unseen"
        )
    report.skipped.append(identity)
    return False


def _run_job(
    config: ProbeConfig,
    job: _Job,
    model: ProbedModel,
    fingerprint: dict[str, Any],
    report: ProbeReport,
    progress: SweepProgress,
) -> None:
    from kvacc.probes.clocks import clock_rates
    from kvacc.probes.measuring import measure_group, runs_of_a_case

    began, started = time.monotonic(), datetime.now(UTC).isoformat(timespec="milliseconds")
    total = runs_of_a_case(config) * len(job.missing)
    done = itertools.count(1)
    progress.start_cell(job.group.label, _work(job))
    measured = measure_group(config, job.planned, model, lambda: progress.requests(next(done), total))
    clocks = clock_rates(str(model.device))
    for place, each in zip(job.missing, measured, strict=True):
        record = _record(job, place, each, fingerprint, clocks, started)
        write_probe(report.folder, record)
        report.measured.append(record.case_id)
    failed = sum(each.failure is not None for each in measured)
    outcome = f"{len(measured)} cases" + (f", {failed} could not run" if failed else "")
    progress.finish_cell(f"{outcome}, {as_duration(time.monotonic() - began)}")


def _run_search(
    config: ProbeConfig,
    job: SearchJob,
    model: ProbedModel,
    report: ProbeReport,
    progress: SweepProgress,
) -> None:
    began = time.monotonic()
    progress.start_cell(job.search.label, _WORK_OF_A_SEARCH)
    try:
        record = search_capacity(config, job, model)
    except KvaccError as error:
        report.refused[job.search.label] = str(error)
        progress.finish_cell(f"could not run: {error}")
        return
    write_capacity(report.folder, record)
    report.measured.append(record.case_id)
    progress.finish_cell(f"{outcome_of(record)}, {as_duration(time.monotonic() - began)}")


def _record(
    job: _Job, place: int, each: Measured, fingerprint: dict[str, Any], clocks: str | None, started: str
) -> ProbeRecord:
    return ProbeRecord(
        case_id=job.ids[place],
        case=each.planned.case,
        fingerprint=fingerprint,
        latency=each.latency,
        memory=each.memory,
        transfers=each.transfers,
        failure=each.failure,
        environment=job.environment,
        clocks=clocks,
        # One moment for all that were timed in turns: only these may be compared.
        started=started,
    )


def _work(job: _Job) -> float:
    """Tokens, roughly: a decoded token takes a pass of its own."""
    group = job.group
    return len(job.missing) * (group.prompt_tokens * group.batch + 20 * group.output_tokens)


def _found(folder: Path, each: str) -> ProbeRecord:
    record = find_probe(folder, each)
    if record is None:
        raise KvaccError(f"the record of case {each} is gone from {folder}; run the same command again")
    return record


def _refuse_changed_model(
    entry: ModelEntry, fingerprint: dict[str, Any], finished: Sequence[ProbeRecord]
) -> None:
    for record in finished:
        if record.case.model == entry.identity() and record.fingerprint != fingerprint:
            raise KvaccError(
                f"model {entry.pretrained!r} has changed since case {record.case_id} was measured; "
                "give another --output"
            )


def _require_folder(folder: Path) -> None:
    """Before minutes are spent on measuring what could not be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror or str(error)
        writable = False
    else:
        reason = "no permission"
    if not writable:
        raise KvaccError(f"cannot write to output folder {folder}: {reason}; choose another --output")


@contextlib.contextmanager
def _resumable(report: ProbeReport, progress: SweepProgress) -> Iterator[SweepProgress]:
    try:
        with progress:
            yield progress
    except KeyboardInterrupt:
        done = len(report.measured) + len(report.skipped)
        progress.say(
            f"stopped with {done} of {report.planned} cases done; the same command goes on from here"
        )
        raise
