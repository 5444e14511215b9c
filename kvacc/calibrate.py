"""The smallest budget whose loss stays within a margin, per task and for the suite.

A loss is ``full``'s score minus the strategy's on the same items. A budget *holds* when the
loss is within the margin with the asked-for one-sided confidence (non-inferiority,
:mod:`kvacc.non_inferiority`); that the loss is merely not significant would be true of every
budget with few enough items. The suite is the average of the tasks, each counting once.

The search halves an ordered grid of budgets, for each task and for the suite; what one of them
has run, the others use, and so does a later search in the same folder. It supposes that more
budget is never worse. Whether that is so is checked on everything that was run, and said
where it is not; and an answer stands only when every larger budget that was tried holds too.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvacc.budget import Budget
from kvacc.config import BASELINE, CellSpec, RunConfig, config_from, plan_cells
from kvacc.errors import KvaccError, unknown
from kvacc.non_inferiority import DropTest, combine, drop_test, two_sided_p, unchanged_test
from kvacc.pairing import Items, compare, read_items, why_not_paired
from kvacc.results import Cell, read_cell
from kvacc.statistics import holm
from kvacc.strategy import strategy_classes

if TYPE_CHECKING:
    from rich.console import Console

    from kvacc.sweep import LoadModel

SUITE = "suite"


@dataclass(frozen=True)
class Tried:
    """A budget on one task, or on the suite."""

    task: str
    budget: str
    score: float
    full: float
    kept_fraction: float
    acted: bool
    """It hid an entry from some item; otherwise it says nothing about the strategy."""
    test: DropTest
    holds: bool


@dataclass(frozen=True)
class Answer:
    """The smallest budget that holds."""

    task: str
    budget: str | None
    """None: no budget of the grid holds."""
    needed: int | None
    """Without a budget: items that would show one to hold that loses nothing."""
    items: int
    contradicted: str | None = None
    """A larger budget that was tried and does not hold, so that a smaller one is not the answer."""


@dataclass(frozen=True)
class Calibration:
    """What a search found."""

    strategy: str
    margin: float
    confidence: float
    tried: list[Tried]
    """By task, the suite last; budgets from small to large."""
    answers: list[Answer]
    falls: list[str]
    """Where a larger budget scored significantly lower, in words."""
    runs: int = 0
    """Cells computed now."""


@dataclass
class _Search:
    """Halving of the grid for one target: ``low`` does not hold, ``high`` does."""

    task: str
    low: int
    high: int
    verdicts: dict[int, bool] = field(default_factory=dict)

    @property
    def next(self) -> int | None:
        return (self.low + self.high) // 2 if self.high - self.low > 1 else None

    def learn(self, index: int, holds: bool) -> None:
        self.verdicts[index] = holds
        if holds:
            self.high = index
        else:
            self.low = index


def fraction_grid(step: float = 0.05, smallest: float | None = None) -> list[Budget]:
    """Fractions below 1 in equal steps, exact: 0.05, 0.1, ... 0.95."""
    if not 0 < step <= 0.5:
        raise KvaccError(f"step {step:g} is out of range; give one above 0 and at most 0.5, such as 0.05")
    exact = Fraction(repr(float(step)))
    grid = [exact * number for number in range(1, int(1 / exact) + 1)]
    first = Fraction(repr(float(smallest))) if smallest is not None else exact
    return [Budget(amount) for amount in grid if first <= amount < 1]


def explicit_grid(values: Sequence[Any]) -> list[Budget]:
    """Budgets as given, from small to large.

    Raises:
        KvaccError: none, twice the same, or counts beside fractions, whose order depends on
            the prompt.
    """
    budgets = [Budget.parse(value) for value in values]
    if not budgets:
        raise KvaccError("give at least one budget to search among")
    if len({budget.is_fraction for budget in budgets}) > 1:
        raise KvaccError("--budgets holds counts and fractions; give only one kind, which can be ordered")
    ordered = sorted(dict.fromkeys(budgets), key=lambda budget: budget.amount)
    return [budget for budget in ordered if not (budget.is_fraction and budget.amount == 1)]


def calibrate(
    config: RunConfig,
    strategy: str,
    output: str | os.PathLike[str],
    *,
    margin: float = 0.01,
    confidence: float = 0.95,
    grid: Sequence[Budget] | None = None,
    options: Mapping[str, Any] | None = None,
    console: Console | None = None,
    load_model: LoadModel | None = None,
) -> Calibration:
    """Search the smallest budget of a strategy that holds.

    Args:
        config: says the model, tasks, shots, protocol, limit and seed, one of each but tasks;
            its own budgets are not used.
        strategy: name of a strategy with a budget.
        output: the runs' folder; cells that it holds are not computed again.
        margin: largest loss accepted, as a share (0.01 is a point).
        confidence: of the one-sided bound of the loss.
        grid: budgets from small to large; by default fractions in steps of 0.05.
        options: the strategy's options; by default those that ``config`` gives it.

    Raises:
        KvaccError: bad input, or a cell that failed.
    """
    if not 0 < margin < 1:
        raise KvaccError(f"margin {margin:g} is out of range; give one above 0 and below 1 (0.01 is a point)")
    grid = list(fraction_grid() if grid is None else grid)
    options = _options(config, strategy) if options is None else dict(options)
    _require_single(config)
    runner = _Runner(config, strategy, options, Path(output), console, load_model)
    tasks = runner.tasks
    targets = [*tasks, SUITE] if len(tasks) > 1 else list(tasks)
    # A fraction of 1 is everything, so it holds without a run; no count is known to be enough.
    searches = [_Search(target, -1, len(grid)) for target in targets]
    judged: dict[tuple[str, int], Tried] = {}

    def judge(index: int, wanted: Sequence[str]) -> None:
        found = [runner.tried(task, grid[index], margin, confidence) for task in wanted]
        judged.update({(one.task, index): one for one in found})
        if len(tasks) > 1 and all((task, index) in judged for task in tasks):
            members = [judged[task, index] for task in tasks]
            judged[SUITE, index] = _suite(members, margin, confidence)

    while open_searches := [search for search in searches if search.next is not None]:
        wanted: dict[int, dict[str, None]] = {}
        for search in open_searches:
            needed = tasks if search.task == SUITE else [search.task]
            wanted.setdefault(search.next, {}).update(dict.fromkeys(needed))
        for index, names in wanted.items():
            runner.run(grid[index], list(names))
            judge(index, list(names))
        for search in open_searches:
            search.learn(search.next, judged[search.task, search.next].holds)
    answers = [_answer(target, grid, judged, margin, runner) for target in targets]
    order = {target: place for place, target in enumerate(targets)}
    tried = [judged[key] for key in sorted(judged, key=lambda key: (order[key[0]], key[1]))]
    return Calibration(
        strategy=runner.label,
        margin=margin,
        confidence=confidence,
        tried=tried,
        answers=answers,
        falls=runner.falls({key: grid[key[1]] for key in judged if key[0] != SUITE}, confidence),
        runs=runner.computed,
    )


class _Runner:
    """Runs budgets on tasks, with one model loaded once, and compares them with full."""

    def __init__(
        self,
        config: RunConfig,
        strategy: str,
        options: Mapping[str, Any],
        output: Path,
        console: Console | None,
        load_model: LoadModel | None,
    ) -> None:
        self.config, self.strategy, self.options, self.output = config, strategy, dict(options), output
        self.console = console
        self.load_model = _loaded_once(load_model)
        self.computed = 0
        self.cells: dict[tuple[str, str], Cell] = {}
        self.items: dict[str, Items] = {}
        full = self._config(None, None)
        # What `auto` means is settled once, so that every run has the same tasks.
        self.entries = {_task_label(spec): _task_entry(spec) for spec in plan_cells(full)}
        self.tasks = list(self.entries)
        words = ", ".join(f"{name}={value}" for name, value in sorted(self.options.items()))
        self.label = f"{strategy}({words})" if words else strategy

    def _config(self, budget: Budget | None, tasks: Sequence[str] | None) -> RunConfig:
        values = self.config.model_dump(mode="json")
        values["strategies"] = [{"name": BASELINE}]
        if budget is not None:
            entry = {"name": self.strategy, "budget": _plain(budget), "budget_of": budget.of, **self.options}
            values["strategies"].append(entry)
        if tasks is not None:
            values["tasks"] = [self.entries[task] for task in tasks]
        return config_from(values)

    def run(self, budget: Budget, tasks: Sequence[str]) -> None:
        """Compute full and the budget on the tasks, as far as they are missing."""
        from kvacc.sweep import CELLS_FOLDER, run_sweep

        missing = [task for task in tasks if (task, str(budget)) not in self.cells]
        if not missing:
            return
        config = self._config(budget, missing)
        report = run_sweep(config, self.output, console=self.console, extend=True, load_model=self.load_model)
        if report.failed:
            label, reason = next(iter(report.failed.items()))
            raise KvaccError(f"the search stops at a cell that failed: {label}: {reason}")
        self.computed += len(report.computed)
        for spec in plan_cells(config):
            cell = read_cell(self.output / CELLS_FOLDER / spec.cell_id)
            key = BASELINE if spec.strategy.name == BASELINE else str(budget)
            self.cells[_task_label(spec), key] = cell
            self.items[cell.cell_id] = read_items(cell)

    def tried(self, task: str, budget: Budget, margin: float, confidence: float) -> Tried:
        cell, full = self.cells[task, str(budget)], self.cells[task, BASELINE]
        own, base = self.items[cell.cell_id], self.items[full.cell_id]
        if reason := why_not_paired(cell, own, full, base):
            raise KvaccError(f"{self.strategy} {budget} on {task} cannot be compared: {reason}")
        keys = list(own.values)
        values, before = [own.values[key] for key in keys], [base.values[key] for key in keys]
        if not all(0 <= value <= 1 for value in (*values, *before)):
            raise KvaccError(
                f"task {task!r}: {cell.task.primary_metric} is not between 0 and 1 per item, so a margin in "
                "points means nothing; leave the task out"
            )
        if compare(own, base).identical and values == before:
            test = unchanged_test(len(keys))
        else:
            clusters = [own.clusters[key] for key in keys]
            test = drop_test(before, values, clusters, margin, confidence)
        return Tried(
            task=task,
            budget=str(budget),
            score=sum(values) / len(keys),
            full=sum(before) / len(keys),
            kept_fraction=cell.measured.kept_fraction,
            acted=cell.measured.acted_items > 0,
            test=test,
            holds=test.p_within <= 1 - confidence + 1e-12,
        )

    def falls(self, tried: Mapping[tuple[str, int], Budget], confidence: float) -> list[str]:
        """Where a larger budget scored significantly lower than a smaller one."""
        pairs, p_values = [], []
        for (task, small), (other, large) in itertools.combinations(sorted(tried), 2):
            if task != other:
                continue
            one, two = (self.cells[task, str(tried[task, index])] for index in (small, large))
            lower, higher = self.items[one.cell_id], self.items[two.cell_id]
            keys = list(lower.values)
            before = [lower.values[key] for key in keys]
            now = [higher.values[key] for key in keys]
            found = two_sided_p(before, now, [lower.clusters[key] for key in keys])
            if found is not None:
                pairs.append(
                    (task, tried[task, small], tried[task, large], (sum(before) - sum(now)) / len(keys))
                )
                p_values.append(found[0])
        return [
            f"{task}: budget {large} scored {100 * fall:.1f} points below {small} (p = {p:.2g} after Holm)"
            for (task, small, large, fall), p in zip(pairs, holm(p_values), strict=True)
            if fall > 0 and p <= 1 - confidence
        ]


def _suite(members: Sequence[Tried], margin: float, confidence: float) -> Tried:
    number = len(members)
    test = combine([one.test for one in members], margin, confidence)
    if all(one.test.method == "unchanged" for one in members):
        test = unchanged_test(test.items)
    return Tried(
        task=SUITE,
        budget=members[0].budget,
        score=sum(one.score for one in members) / number,
        full=sum(one.full for one in members) / number,
        kept_fraction=sum(one.kept_fraction for one in members) / number,
        acted=any(one.acted for one in members),
        test=test,
        holds=test.p_within <= 1 - confidence + 1e-12,
    )


def _answer(
    target: str,
    grid: Sequence[Budget],
    judged: Mapping[tuple[str, int], Tried],
    margin: float,
    runner: _Runner,
) -> Answer:
    """The smallest budget such that it and every larger one tried hold."""
    indices = sorted((index for task, index in judged if task == target), reverse=True)
    holding = list(itertools.takewhile(lambda index: judged[target, index].holds, indices))
    largest = judged[target, indices[0]]
    items = largest.test.items
    if not holding:
        doubtful = any(judged[target, index].holds for index in indices)
        return Answer(target, None, largest.test.needed, items, str(grid[indices[0]]) if doubtful else None)
    smallest = holding[-1]
    below = [index for index in indices if index < smallest and judged[target, index].holds]
    blocker = max((i for i in indices if i < smallest and not judged[target, i].holds), default=None)
    contradicted = str(grid[blocker]) if below and blocker is not None else None
    return Answer(target, str(grid[smallest]), None, items, contradicted)


def _options(config: RunConfig, strategy: str) -> dict[str, Any]:
    classes = strategy_classes()
    if strategy not in classes:
        raise unknown("strategy", strategy, classes)
    if not classes[strategy].has_budget:
        raise KvaccError(f"strategy {strategy!r} has no budget to calibrate")
    entries = [entry for entry in config.strategies if entry.name == strategy]
    if len(entries) > 1:
        raise KvaccError(f"the configuration has {strategy!r} with several options; give them with --option")
    return dict(entries[0].model_extra or {}) if entries else {}


def _require_single(config: RunConfig) -> None:
    for name in ("models", "protocols", "shots"):
        values = getattr(config, name)
        if len(values) > 1:
            raise KvaccError(
                f"calibration is for one of {name}, and the configuration has {len(values)}; "
                f"choose one, such as --set {name}=[...]"
            )


def _task_label(spec: CellSpec) -> str:
    """``kvacc_needle length=1024``: the same task with other options is another task."""
    return " ".join([spec.task, *(f"{name}={value}" for name, value in sorted(spec.task_options.items()))])


def _task_entry(spec: CellSpec) -> Any:
    """The task as a configuration names it."""
    options = {**spec.task_options, **spec.task_paths}
    return {"name": spec.task, **options} if options else spec.task


def _plain(budget: Budget) -> Any:
    return str(budget) if budget.is_fraction else int(budget.amount)


def _loaded_once(load_model: LoadModel | None) -> Callable:
    """The same backend for every sweep of the search: a large model takes minutes to load."""
    kept: dict[str, Any] = {}

    def load(model: Any, config: RunConfig) -> Any:
        from kvacc import sweep

        if "lm" not in kept:
            kept["lm"] = (load_model or sweep._load_model)(model, config)
        return kept["lm"]

    return load


__all__ = [
    "SUITE", "Answer", "Calibration", "Tried", "calibrate", "explicit_grid", "fraction_grid",
]  # fmt: skip
