"""What results say about each strategy's accuracy, and which of them are no evidence.

A *candidate* is a strategy with its options and budget under one protocol. It is judged on every
task of the question: those that ``full`` answered above chance and that any candidate was run on.
A row that did not act, or cannot be paired with ``full``, is no evidence, and a candidate that
lacks it for one of the tasks is not judged at all.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvacc.advice.limits import AVERAGE, Limits
from kvacc.advice.selection import Selection, select, telling_tasks
from kvacc.errors import KvaccError, unknown
from kvacc.leaderboard_rows import (
    AT_CHANCE,
    CONTROL,
    NON_CAUSAL,
    NOT_RANKED,
    NOT_SIGNIFICANT,
    SIMULATED,
    SMOKE_TEST,
    Row,
    build,
)
from kvacc.non_inferiority import DropTest, combine, drop_test
from kvacc.pairing import Items, read_items
from kvacc.results import Cell, SpecRecord

_SAID_ELSEWHERE = (AT_CHANCE, NOT_RANKED, NOT_SIGNIFICANT, SMOKE_TEST)
"""Notes of rows that a recommendation expresses otherwise, or that do not matter to it."""


@dataclass(frozen=True)
class TaskEvidence:
    """A candidate on one task, against ``full`` on the same items."""

    task: str
    row: Row
    margin: float | None
    """Largest drop allowed, as a share; None: any."""
    test: DropTest


@dataclass(frozen=True)
class Candidate:
    """A strategy that the results allow to be judged."""

    name: str
    """``h2o 0.2``, with the options in which the results differ."""
    spec: SpecRecord
    model: Mapping[str, object]
    """Fingerprint of the model."""
    tasks: tuple[TaskEvidence, ...]
    average: DropTest | None
    """Of all tasks, each counting once; None with a single task."""
    average_margin: float | None
    difference: float
    """Mean of the tasks' differences to ``full``, in points; negative is a loss."""
    low: float
    """Lower end of its 95 % interval."""
    high: float
    kept_fraction: float
    """Mean over the tasks."""
    notes: tuple[str, ...]

    @property
    def is_full(self) -> bool:
        """True for the baseline, whose difference is 0 by definition."""
        return self.spec.strategy == "full"

    @property
    def is_control(self) -> bool:
        """True for a floor that a good strategy must beat."""
        return CONTROL in self.notes

    @property
    def frees_no_memory(self) -> bool:
        """True for a simulation, whose kept fraction says nothing about memory."""
        return SIMULATED in self.notes

    @property
    def items(self) -> int:
        """Documents over all tasks."""
        return sum(one.test.items for one in self.tasks)


@dataclass(frozen=True)
class Evidence:
    """Everything that the results say about one question."""

    model: str
    dtype: str
    protocol: str
    shots: str
    tasks: tuple[str, ...]
    full: Candidate
    candidates: tuple[Candidate, ...]
    """Without ``full``; from large budgets to small ones."""
    excluded: tuple[tuple[str, str], ...]
    """Name and reason of what cannot be judged."""
    notes: tuple[str, ...]


def read_evidence(cells: Sequence[Cell], limits: Limits, selection: Selection) -> Evidence:
    """The candidates of the selected results, with a test of each task's drop.

    Raises:
        KvaccError: nothing matches the selection, it leaves several models, protocols or versions
            of a task, ``full`` is missing, or it is at chance everywhere.
    """
    by_id = {cell.cell_id: cell for cell in cells}
    rows = select(build(cells), selection)
    compared, excluded, notes = telling_tasks(rows, bool(selection.tasks))
    _require_known(limits, compared)
    items: dict[str, Items] = {}
    candidates = []
    for by_task in _by_candidate(rows, compared, by_id):
        name = _name(next(iter(by_task.values())))
        if why := _why_no_evidence(by_task, compared):
            excluded.append((name, why))
        else:
            candidates.append(_candidate(name, by_task, compared, by_id, items, limits))
    one = next(iter(compared.values()))
    return Evidence(
        model=one.model,
        dtype=one.dtype,
        protocol=next(row.protocol for row in rows if not row.is_full),
        shots=one.shots_label,
        tasks=tuple(compared),
        full=_full(compared, by_id),
        candidates=tuple(candidates),
        excluded=tuple(sorted(excluded)),
        notes=tuple(notes),
    )


def _by_candidate(
    rows: Sequence[Row], compared: Mapping[str, Row], cells: Mapping[str, Cell]
) -> list[dict[str, Row]]:
    """Each candidate's row of every task: the one on ``full``'s items where there is one."""
    members: dict[tuple, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        full = compared.get(row.task_label)
        if row.is_full or full is None:
            continue
        spec = cells[row.cell_id].spec
        own = members[spec.strategy, json.dumps(spec.options, sort_keys=True), spec.budget, spec.budget_of]
        other = own.setdefault(row.task_label, row)
        if other is not row and row.group == full.group:
            if other.group == full.group:
                raise KvaccError(
                    f"{_name(row)} is there twice on {row.task_label} (cells {other.cell_id} and "
                    f"{row.cell_id}); name the folder of one of them"
                )
            own[row.task_label] = row
    return list(members.values())


def _name(row: Row) -> str:
    return f"{row.label} {row.budget}" if row.budget else row.label


def _require_known(limits: Limits, compared: Mapping[str, Row]) -> None:
    known = {AVERAGE, *compared, *(row.task for row in compared.values())}
    for name in limits.max_drop_of:
        if name not in known:
            raise unknown("task of --max-drop", name, known)


def _why_no_evidence(by_task: Mapping[str, Row], compared: Mapping[str, Row]) -> str | None:
    """Why a candidate cannot be judged; None when it can."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for label in compared:
        row = by_task.get(label)
        if row is None:
            reasons["not run"].append(label)
        elif not row.causal:
            return f"{NON_CAUSAL}: its scores read later tokens, which no server has"
        elif row.why_no_difference is not None:
            reasons[row.why_no_difference].append(label)
    if not reasons:
        return None
    return "; ".join(f"{why} on {', '.join(labels)}" for why, labels in reasons.items())


def _candidate(
    name: str,
    by_task: Mapping[str, Row],
    compared: Mapping[str, Row],
    cells: Mapping[str, Cell],
    items: dict[str, Items],
    limits: Limits,
) -> Candidate:
    found = []
    for label, full in compared.items():
        margin = limits.drop_of(label, full.task)
        test = _test(by_task[label], full, cells, items, margin or 0.0, limits.confidence)
        found.append(TaskEvidence(label, by_task[label], margin, test))
    rows = [one.row for one in found]
    number = len(rows)
    difference = sum(row.difference for row in rows) / number
    # Tasks are independent, so distances to the interval's ends add up in squares (MOVER).
    below = sum((row.difference - row.difference_low) ** 2 for row in rows) ** 0.5 / number
    above = sum((row.difference_high - row.difference) ** 2 for row in rows) ** 0.5 / number
    margin = limits.drop_of(AVERAGE)
    tests = [one.test for one in found]
    cell = cells[rows[0].cell_id]
    return Candidate(
        name=name,
        spec=cell.spec,
        model=cell.model,
        tasks=tuple(found),
        average=combine(tests, margin or 0.0, limits.confidence) if number > 1 else None,
        average_margin=margin if number > 1 else None,
        difference=difference,
        low=difference - below,
        high=difference + above,
        kept_fraction=sum(row.kept_fraction for row in rows) / number,
        notes=tuple(_notes(rows)),
    )


def _test(
    row: Row, full: Row, cells: Mapping[str, Cell], items: dict[str, Items], margin: float, confidence: float
) -> DropTest:
    for cell_id in (row.cell_id, full.cell_id):
        if cell_id not in items:
            items[cell_id] = read_items(cells[cell_id])
    own, base = items[row.cell_id], items[full.cell_id]
    keys = list(own.values)
    return drop_test(
        [base.values[key] for key in keys],
        [own.values[key] for key in keys],
        [own.clusters[key] for key in keys],
        margin,
        confidence,
    )


def _notes(rows: Sequence[Row]) -> Iterable[str]:
    """What is true of the strategy, and what of some of its rows, naming the tasks then."""
    where: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        for note in row.notes:
            where[note].append(row.task_label)
        if row.unreachable_share:
            share = f"{100 * row.unreachable_share:.0f} % of the scored tokens came before any compression"
            where[share].append(row.task_label)
    for note, labels in where.items():
        if note not in _SAID_ELSEWHERE:
            yield note if len(labels) == len(rows) else f"{note} ({', '.join(labels)})"


def _full(compared: Mapping[str, Row], cells: Mapping[str, Cell]) -> Candidate:
    cell = cells[next(iter(compared.values())).cell_id]
    return Candidate(
        name="full",
        spec=cell.spec,
        model=cell.model,
        tasks=(),
        average=None,
        average_margin=None,
        difference=0.0,
        low=0.0,
        high=0.0,
        kept_fraction=1.0,
        notes=(),
    )
