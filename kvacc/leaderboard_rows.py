"""The leaderboard's rows: what each cell may claim, and what it may not.

A row states its difference to ``full`` only when both answered the same prompts and
the strategy acted; otherwise it says why there is none. Rows of unequal kept
fraction are never ranked against each other, nor rows of different protocols.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvacc.budget import Budget
from kvacc.pairing import Comparison, Items, compare, environment_differences, read_items, why_not_paired
from kvacc.results import Cell
from kvacc.shots import DEFAULT_SAMPLER, shots_text
from kvacc.statistics import holm, is_at_chance
from kvacc.strategy import PROTOCOLS

FULL = "full"
GRADED = "graded"
"""The metric of retention tasks that counts parts of answers and probabilities of right options."""
KEPT_TOLERANCE = 0.01
"""Kept fractions that differ by more are unequal budgets, whatever the labels say."""

DID_NOT_ACT = "did not act"
ACTED_PARTLY = "acted on some of the items only"
NOT_RANKED = "not ranked: rows of this budget kept unequal fractions"
IDENTICAL = "identical to full: did nothing?"
AT_CHANCE = "full is at chance: cannot show a loss"
NON_CAUSAL = "non-causal"
SIMULATED = "simulated: frees no memory"
OFFLOADED = "cache in host memory"
SMOKE_TEST = "smoke test"
CONTROL = "control"
NOT_SIGNIFICANT = "interval spans 0 (ns)"

# Metrics that are shares of items or of a perfect answer: shown as percent, differences in points.
_SHARES = {"acc", "acc_norm", "acc_bytes", "exact_match", "em", "f1"}
_LOWER_IS_BETTER = ("perplexity", "bits_per_byte")
_WHERE_NOT_WHAT = ("device", "device_map")
_APART = ("length", "filler", "data_seed")
"""Task options by which averages are kept apart."""


class Row(BaseModel):
    """One cell as the leaderboard shows it."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    model: str = Field(description="Name of the model, with its revision if one was asked for.")
    dtype: str = Field(description="Number format of the weights.")
    task: str = Field(description="Task id.")
    kind: str = Field(description="benchmark, smoke or retention.")
    source: str = Field(description="Where the documents came from.")
    shots: int | None = Field(description="Few-shot examples; null is the task's own number.")
    fewshot_sampler: str = Field(
        default=DEFAULT_SAMPLER, description="How examples were chosen: default or first_n, as in lm-eval."
    )
    task_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the task that differ from its defaults."
    )
    strategy: str = Field(description="Name of the strategy.")
    options: dict[str, Any] = Field(description="Every hyper-parameter except the budget.")
    label: str = Field(description="Strategy with the options in which rows of it differ.")
    budget: str | None = Field(description="Entries kept as asked for; null for full.")
    sparsity: float = Field(description="1 - kept fraction.")
    protocol: str = Field(description="stream, context or serve; any for full, which they do not change.")
    items: int = Field(description="Documents scored.")
    metric: str = Field(description="The metric of score.")
    score: float = Field(description="Average over the items, in the metric's unit (accuracy: 0 to 1).")
    stderr: float | None = Field(description="Standard error of score, clustered where items are.")
    chance: float | None = Field(description="Score of guessing.")
    graded: float | None = Field(
        default=None, description="Of retention tasks: score with parts of answers counted, 0 to 1."
    )
    graded_stderr: float | None = Field(default=None, description="Standard error of graded.")
    unit: str = Field(description="Unit of the differences: points (hundredths) or the metric's own.")
    difference: float | None = Field(description="Score minus full's on the same items, in unit.")
    difference_low: float | None = Field(description="Lower end of its 95 % interval.")
    difference_high: float | None = Field(description="Upper end of its 95 % interval.")
    interval_method: str | None = Field(description="tango, clustered t or paired t.")
    why_no_difference: str | None = Field(description="Why difference is null; null for full.")
    flips_lost: int | None = Field(description="Items right under full and wrong here.")
    flips_gained: int | None = Field(description="Items wrong under full and right here.")
    p_value: float | None = Field(default=None, description='Two-sided, of "no difference"; null for full.')
    p_method: str | None = Field(default=None, description="Exact McNemar, sign flips of clusters, or t.")
    p_holm: float | None = Field(default=None, description="p_value adjusted for all rows compared (Holm).")
    detectable_drop: float | None = Field(
        default=None, description="Smallest true drop such items would show, two-sided, 80 % power, in unit."
    )
    kept_fraction: float = Field(description="Visible entries / tokens seen, as measured.")
    acted_share: float = Field(description="Share of documents on which the strategy hid an entry.")
    unreachable_share: float = Field(description="Share of scored tokens predicted before any compression.")
    moved_bytes_per_token: float | None = Field(
        description="Bytes brought from host memory per scored token; null unless the strategy selects."
    )
    attention_mass: float | None = Field(description="Share of the true attention on what was read.")
    recall: float | None = Field(description="Share of the true top entries that were read.")
    kl: float | None = Field(
        default=None, description="KL(full || strategy), nats per scored token; null where not measured."
    )
    agreement: float | None = Field(
        default=None, description="Share of scored tokens with full's most likely token."
    )
    loglikelihood_difference: float | None = Field(
        default=None, description="Strategy minus full, nats per scored token."
    )
    rank: int | None = Field(description="Place within budget and protocol; null when that would be unfair.")
    causal: bool = Field(description="False when a score could depend on later tokens.")
    notes: list[str] = Field(description="What a reader of the row must know.")
    limit: int | None = Field(description="First items of the task used; null is all.")
    seed: int = Field(description="Seed of the few-shot sampler.")
    task_version: str = Field(description="Version of the task.")
    data_fingerprint: str = Field(description="sha256 over the documents.")
    model_id: str = Field(description="The model as asked for, apart from its device; JSON.")
    strategy_repr: str = Field(description="The exact constructor call.")
    cell_id: str = Field(description="The cell's folder.")

    @property
    def is_full(self) -> bool:
        """True for the baseline."""
        return self.strategy == FULL

    @property
    def scale(self) -> int:
        """What turns the score into the unit that people read: 100 for shares."""
        return 100 if self.unit == "points" else 1

    @property
    def spans_zero(self) -> bool:
        """True when the interval does not exclude "no difference"."""
        return self.difference_low is not None and self.difference_low <= 0 <= self.difference_high

    @property
    def group(self) -> tuple:
        """Rows of one group stand in one table: same model, task and items."""
        return (
            self.model, self.model_id, -1 if self.shots is None else self.shots, self.fewshot_sampler,
            self.task,
            # Short prompts before long ones.
            self.task_options.get("length", 0), self.metric,
            -1 if self.limit is None else self.limit, self.seed, self.data_fingerprint, self.task_version,
            _options_key(self.task_options),
        )  # fmt: skip

    @property
    def task_label(self) -> str:
        """``kvacc_needle length=1024``: the task with its options."""
        return " ".join([self.task, *option_words(self.task_options)])

    @property
    def shots_label(self) -> str:
        """``5-shot``, or ``5-shot first_n``: examples, and how they were chosen."""
        return shots_text(self.shots, self.fewshot_sampler)


class Average(BaseModel):
    """A strategy's average over every task of one kind, each task counting once."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    model: str = Field(description="Name of the model.")
    dtype: str = Field(description="Number format of the weights.")
    kind: str = Field(description="benchmark, smoke or retention.")
    shots: int | None = Field(description="Few-shot examples.")
    fewshot_sampler: str = Field(default=DEFAULT_SAMPLER, description="How examples were chosen.")
    task_options: dict[str, Any] = Field(default_factory=dict, description="Options that all the tasks have.")
    tasks: list[str] = Field(description="The tasks averaged, with options in which they differ.")
    tasks_at_chance: list[str] = Field(description="Those of them on which full is at chance.")
    label: str = Field(description="Strategy with the options in which rows of it differ.")
    budget: str | None = Field(description="Entries kept as asked for; null for full.")
    protocol: str = Field(description="stream, context or serve; any for full.")
    score: float | None = Field(description="Average of the tasks' scores, in percent.")
    graded: float | None = Field(default=None, description="Average of the graded scores, in percent.")
    difference: float | None = Field(description="Average of the differences to full, in points.")
    difference_low: float | None = Field(description="Lower end of its 95 % interval.")
    difference_high: float | None = Field(description="Upper end of its 95 % interval.")
    kept_fraction: float | None = Field(description="Average of the kept fractions.")
    moved_bytes_per_token: float | None = Field(description="Average over the tasks.")
    attention_mass: float | None = Field(description="Average over the tasks.")
    recall: float | None = Field(description="Average over the tasks.")
    why_none: str | None = Field(description="Why there is no average; null when there is.")

    @property
    def is_full(self) -> bool:
        """True for the baseline, which no protocol changes."""
        return self.protocol == "any"


def build(cells: Iterable[Cell]) -> list[Row]:
    """A row for every cell, in the order in which tables show them.

    ``full`` comes first in its group; then larger budgets before smaller ones, and
    within a budget and protocol the higher score, rows that cannot be ranked last.

    Raises:
        KvaccError: a cell's samples are damaged.
    """
    by_id = {cell.cell_id: cell for cell in cells}
    cells = [by_id[cell_id] for cell_id in sorted(by_id)]
    items = {cell.cell_id: read_items(cell) for cell in cells}
    baselines: dict[tuple, list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.spec.strategy == FULL:
            baselines[_what_was_asked(cell)].append(cell)
    labels = _labels(cells)
    rows = [_row(cell, baselines, items, labels[cell.cell_id]) for cell in cells]
    return _ranked(_with_holm(rows))


def averages(rows: Sequence[Row]) -> list[Average]:
    """Each strategy's average over the tasks of one kind, where that is fair.

    The tasks are those of ``full`` (same model, shots, sampler, limit and seed), two at the
    least; where ``full`` was not run at all, those of any strategy, and there are no
    differences. A strategy has an average only when it ran on all of them, on the same
    items, and acted on each; otherwise the entry says what is missing. Tasks are
    independent, so the distances from difference to interval end add up in squares
    (MOVER, Zou and Donner, Statistics in Medicine 27, 2008, 1693-1702).
    """
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        if row.unit == "points":
            # Scores at different lengths are different questions, and averaged apart.
            where = json.dumps({k: row.task_options.get(k) for k in _APART}, sort_keys=True)
            shots = row.shots, row.fewshot_sampler
            groups[row.model, row.model_id, row.kind, shots, row.limit, row.seed, where].append(row)
    result = []
    for members in groups.values():
        common = _common_options(members)
        full = {_part(row, common): row for row in members if row.is_full}
        tasks = sorted(full or {_part(row, common) for row in members})
        if len(tasks) < 2:
            continue
        entries: dict[tuple, dict[str, Row]] = defaultdict(dict)
        for row in members:
            options = json.dumps(row.options, sort_keys=True)
            whose = () if row.is_full else (row.strategy, options, row.budget, row.protocol)
            entries[whose][_part(row, common)] = row
        found = [_average(tasks, full, by_task, common) for by_task in entries.values()]
        result += sorted(found, key=_average_order)
    return result


def higher_is_better(metric: str) -> bool:
    """False for perplexities and bits per byte."""
    return not any(word in metric for word in _LOWER_IS_BETTER)


def _row(cell: Cell, baselines: dict[tuple, list[Cell]], items: dict[str, Items], label: str) -> Row:
    spec, task, measured = cell.spec, cell.task, cell.measured
    own = items[cell.cell_id]
    full = cell if spec.strategy == FULL else _baseline(cell, baselines)
    comparison, reason = _compared(cell, full, baselines, items)
    difference = comparison.difference if comparison else None
    flipped = comparison.flips if comparison else None
    unit = "points" if task.primary_metric.split(",")[0] in _SHARES else task.primary_metric
    scale = 100 if unit == "points" else 1
    graded = cell.scores.get(GRADED)
    return Row(
        model=_model_name(cell),
        dtype=str(cell.model.get("dtype") or spec.model.get("dtype") or "").removeprefix("torch."),
        task=task.name,
        kind=task.kind,
        source=task.source,
        shots=spec.shots,
        fewshot_sampler=spec.fewshot_sampler,
        task_options=spec.task_options,
        strategy=spec.strategy,
        options=spec.options,
        label=label,
        budget=_budget_label(cell),
        sparsity=_rounded(1 - measured.kept_fraction),
        protocol="any" if spec.strategy == FULL else spec.protocol,
        items=task.num_items,
        metric=task.primary_metric,
        score=_rounded(cell.scores[task.primary_metric].value),
        stderr=_rounded(_stderr(cell, own)),
        chance=task.chance,
        graded=_rounded(graded.value) if graded else None,
        graded_stderr=_rounded(graded.stderr) if graded else None,
        unit=unit,
        difference=_rounded(difference.value, scale) if difference else None,
        difference_low=_rounded(difference.low, scale) if difference else None,
        difference_high=_rounded(difference.high, scale) if difference else None,
        interval_method=difference.method if difference else None,
        why_no_difference=reason,
        flips_lost=flipped.lost if flipped else None,
        flips_gained=flipped.gained if flipped else None,
        p_value=_rounded(comparison.p_value) if comparison else None,
        p_method=comparison.p_method if comparison else None,
        detectable_drop=_rounded(comparison.detectable, scale) if comparison else None,
        kept_fraction=_rounded(measured.kept_fraction),
        acted_share=_rounded(measured.acted_share),
        unreachable_share=_rounded(measured.unreachable_share),
        moved_bytes_per_token=_rounded(measured.moved_bytes_per_token),
        attention_mass=_rounded(measured.attention_mass),
        recall=_rounded(measured.recall),
        kl=cell.fidelity.kl if cell.fidelity else None,
        agreement=_rounded(cell.fidelity.agreement) if cell.fidelity else None,
        loglikelihood_difference=_rounded(cell.fidelity.loglikelihood_difference) if cell.fidelity else None,
        rank=None,
        causal=cell.strategy.causal,
        notes=_notes(cell, full, comparison, reason, items),
        limit=spec.limit,
        seed=spec.seed,
        task_version=task.version,
        data_fingerprint=task.data_fingerprint,
        model_id=_model_id(cell),
        strategy_repr=cell.strategy.repr,
        cell_id=cell.cell_id,
    )


def _compared(
    cell: Cell, full: Cell | None, baselines: dict[tuple, list[Cell]], items: dict[str, Items]
) -> tuple[Comparison | None, str | None]:
    """The comparison with full, or why there is none; (None, None) for full itself."""
    if full is cell:
        return None, None
    if cell.measured.acted_items == 0:
        return None, DID_NOT_ACT
    if full is None:
        return None, _why_no_baseline(cell, baselines)
    reason = why_not_paired(cell, items[cell.cell_id], full, items[full.cell_id])
    if reason is not None:
        return None, reason
    comparison = compare(items[cell.cell_id], items[full.cell_id])
    if comparison.difference is None:
        return None, "too few independent items for an interval"
    return comparison, None


def _notes(
    cell: Cell, full: Cell | None, comparison: Comparison | None, reason: str | None, items: dict[str, Items]
) -> list[str]:
    """What a reader of the row must know, the gravest first."""
    own, metric = items[cell.cell_id], cell.task.primary_metric
    score, average = cell.scores[metric].value, own.mean()
    differing = environment_differences(cell, full) if comparison else []
    truncated = cell.measured.truncated_requests
    offloads, dense_layers = cell.strategy.offloads, _dense_layers_note(cell.spec.options)
    said = {
        DID_NOT_ACT: reason == DID_NOT_ACT,
        f"not compared: {reason}": reason not in (None, DID_NOT_ACT),
        ACTED_PARTLY: 0 < cell.measured.acted_items < cell.task.num_items,
        IDENTICAL: comparison is not None and comparison.identical,
        AT_CHANCE: full is not None and _at_chance(full, items[full.cell_id]),
        NOT_SIGNIFICANT: comparison is not None and comparison.difference.spans_zero,
        NON_CAUSAL: not cell.strategy.causal,
        SIMULATED: full is not cell and not offloads and not cell.strategy.physical_eviction,
        OFFLOADED: offloads,
        dense_layers: dense_layers != "",
        CONTROL: cell.strategy.is_control,
        SMOKE_TEST: cell.task.kind == "smoke",
        f"the items average {average}, not the score {score}": average is not None
        and higher_is_better(metric)
        and abs(average - score) > 1e-6,
        f"{truncated} prompts were cut from the left to fit the model's context": truncated > 0,
        f"full ran with another {', '.join(differing)}": bool(differing),
    }
    notes = [note for note, holds in said.items() if holds]
    # A warning such as "non-causal: ..." explains a note that is already there.
    return notes + [text for text in cell.warnings if text not in notes and text.split(":")[0] not in notes]


def _dense_layers_note(options: dict[str, Any]) -> str:
    """Which layers the strategy leaves alone, although they count in the kept fraction; "" without any."""
    count = options.get("dense_layers")
    # A strategy of the user's own may mean something else by this name.
    if not isinstance(count, int) or count < 1:
        return ""
    return "layer 0 reads everything" if count == 1 else f"layers 0-{count - 1} read everything"


def _stderr(cell: Cell, items: Items) -> float | None:
    """From the items, because a stored one ignores clusters; stored when items have no value."""
    return items.stderr() if items.values else cell.scores[cell.task.primary_metric].stderr


def _ranked(rows: list[Row]) -> list[Row]:
    """Rows in table order, with a rank where all rows of a budget keep equally much."""
    places: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        if not row.is_full and row.causal and row.why_no_difference != DID_NOT_ACT:
            places[row.group, row.budget, row.protocol].append(row)
    changed: dict[str, Row] = {}
    for members in places.values():
        kept = [row.kept_fraction for row in members]
        if max(kept) - min(kept) > KEPT_TOLERANCE:
            for row in members:
                changed[row.cell_id] = row.model_copy(update={"notes": [*row.notes, NOT_RANKED]})
        elif len(members) > 1:
            for row in members:
                better = sum(_goodness(other) > _goodness(row) for other in members)
                changed[row.cell_id] = row.model_copy(update={"rank": better + 1})
    return sorted((changed.get(row.cell_id, row) for row in rows), key=_table_order)


def _with_holm(rows: list[Row]) -> list[Row]:
    """The p-values adjusted for their number: of many rows some differ by chance alone."""
    compared = [row for row in rows if row.p_value is not None]
    p_values = holm([row.p_value for row in compared])
    adjusted = {row.cell_id: p for row, p in zip(compared, p_values, strict=True)}
    return [
        row.model_copy(update={"p_holm": _rounded(adjusted[row.cell_id])}) if row.cell_id in adjusted else row
        for row in rows
    ]


def _table_order(row: Row) -> tuple:
    unfair = not row.causal or row.why_no_difference == DID_NOT_ACT
    return (
        row.group, not row.is_full, budget_order(row.budget), _protocol_order(row.protocol), unfair,
        -_goodness(row), row.label, row.cell_id,
    )  # fmt: skip


def _average_order(entry: Average) -> tuple:
    return budget_order(entry.budget), _protocol_order(entry.protocol), entry.label


def _protocol_order(protocol: str) -> int:
    return PROTOCOLS.index(protocol) if protocol in PROTOCOLS else -1


def _goodness(row: Row) -> float:
    return row.score if higher_is_better(row.metric) else -row.score


def option_words(options: dict[str, Any]) -> list[str]:
    """``["length=1024", "depths=0.1,0.9"]``"""
    return [
        f"{name}={','.join(f'{part:g}' for part in value) if isinstance(value, list) else value}"
        for name, value in options.items()
    ]


def _options_key(options: dict[str, Any]) -> str:
    return json.dumps(options, sort_keys=True)


def _common_options(rows: Sequence[Row]) -> dict[str, Any]:
    """The options that every row has with the same value."""
    first, *rest = (row.task_options for row in rows)
    return {k: v for k, v in first.items() if all(k in other and other[k] == v for other in rest)}


def _part(row: Row, common: dict[str, Any]) -> str:
    """What the row's task is called in an average: with the options that not all rows have."""
    own = {name: value for name, value in row.task_options.items() if name not in common}
    return " ".join([row.task, *option_words(own)])


def _average(
    tasks: Sequence[str], full: dict[str, Row], by_task: dict[str, Row], common: dict[str, Any]
) -> Average:
    one = next(iter(by_task.values()))
    missing = [task for task in tasks if task not in by_task]
    reasons = {
        task: row.why_no_difference
        for task, row in sorted(by_task.items())
        if row.why_no_difference and (full or row.why_no_difference == DID_NOT_ACT)
    }
    why = None
    if missing:
        why = f"not run on {', '.join(missing)}"
    elif reasons:
        first = next(iter(reasons.values()))
        why = f"{first} on {', '.join(task for task, reason in reasons.items() if reason == first)}"
    difference = low = high = None
    if why is None and full and not one.is_full:
        compared = [by_task[task] for task in tasks]
        difference = sum(row.difference for row in compared) / len(tasks)
        below = sum((row.difference - row.difference_low) ** 2 for row in compared) ** 0.5 / len(tasks)
        above = sum((row.difference_high - row.difference) ** 2 for row in compared) ** 0.5 / len(tasks)
        low, high = difference - below, difference + above

    def mean(field: str) -> float | None:
        values = [getattr(by_task[task], field) for task in tasks] if why is None else [None]
        return None if None in values else sum(values) / len(tasks)

    return Average(
        model=one.model,
        dtype=one.dtype,
        kind=one.kind,
        shots=one.shots,
        fewshot_sampler=one.fewshot_sampler,
        task_options=common,
        tasks=list(tasks),
        tasks_at_chance=[task for task in tasks if task in full and AT_CHANCE in full[task].notes],
        label=one.label,
        budget=one.budget,
        protocol=one.protocol,
        score=_rounded(mean("score"), 100),
        graded=_rounded(mean("graded"), 100),
        difference=_rounded(difference),
        difference_low=_rounded(low),
        difference_high=_rounded(high),
        kept_fraction=_rounded(mean("kept_fraction")),
        moved_bytes_per_token=_rounded(mean("moved_bytes_per_token")),
        attention_mass=_rounded(mean("attention_mass")),
        recall=_rounded(mean("recall")),
        why_none=why,
    )


def _baseline(cell: Cell, baselines: dict[tuple, list[Cell]]) -> Cell | None:
    """The full cell of the same question; full does not depend on the protocol."""
    candidates = baselines.get(_what_was_asked(cell), [])
    return min(candidates, key=lambda c: (c.spec.protocol != cell.spec.protocol, c.cell_id), default=None)


def _why_no_baseline(cell: Cell, baselines: dict[tuple, list[Cell]]) -> str:
    same_task = [
        other for found in baselines.values() for other in found
        if (_model_id(other), other.spec.task) == (_model_id(cell), cell.spec.task)
    ]  # fmt: skip
    options = {_options_key(other.spec.task_options): other.spec.task_options for other in same_task}
    if options and _options_key(cell.spec.task_options) not in options:
        found = "; ".join(" ".join(option_words(asked)) or "none" for asked in options.values())
        own = " ".join(option_words(cell.spec.task_options)) or "none"
        return f"full ran with task options {found}, this with {own}"
    for name in ("shots", "fewshot_sampler", "limit", "seed"):
        found = sorted({str(getattr(other.spec, name)) for other in same_task})
        if found and str(getattr(cell.spec, name)) not in found:
            return f"full ran with {name} {', '.join(found)}, this with {getattr(cell.spec, name)}"
    return "full was not run on this task"


def _what_was_asked(cell: Cell) -> tuple:
    spec = cell.spec
    shots = spec.shots, spec.fewshot_sampler
    return _model_id(cell), spec.task, shots, spec.limit, spec.seed, _options_key(spec.task_options)


def _model_id(cell: Cell) -> str:
    asked = {k: v for k, v in cell.spec.model.items() if k not in _WHERE_NOT_WHAT and v is not None}
    return json.dumps(asked, sort_keys=True, default=str)


def _model_name(cell: Cell) -> str:
    name = str(cell.model.get("name") or cell.spec.model.get("pretrained") or "unknown model")
    revision = cell.spec.model.get("revision")
    return f"{name}@{revision}" if revision else name


def _budget_label(cell: Cell) -> str | None:
    spec = cell.spec
    if spec.budget is None or spec.strategy == FULL:
        return None
    return spec.budget if spec.budget_of == "prompt" else f"{spec.budget} of {spec.budget_of}"


def budget_order(label: str | None) -> tuple:
    """Full first, then fractions, then counts, each from large to small."""
    if label is None:
        return (0, 0.0, "")
    budget = Budget.parse(label.split(" ")[0])
    return (1 if budget.is_fraction else 2, -float(budget.amount), label)


def _at_chance(cell: Cell, items: Items) -> bool:
    metric = cell.task.primary_metric
    return higher_is_better(metric) and is_at_chance(
        cell.scores[metric].value, _stderr(cell, items), cell.task.chance
    )


def _rounded(number: float | None, scale: int = 1) -> float | None:
    # Six decimals are far below any standard error, and hide differences of summation order.
    return None if number is None else round(scale * number, 6) + 0.0


def _labels(cells: Sequence[Cell]) -> dict[str, str]:
    """``h2o``, or ``h2o recent_fraction=0.1`` where the table holds h2o with several options.

    A non-causal strategy carries that in its label, so that no table can omit it.
    """
    options_of: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for cell in cells:
        options_of[cell.spec.strategy].append(cell.spec.options)
    labels = {}
    for cell in cells:
        used = options_of[cell.spec.strategy]
        names = sorted({name for options in used for name in options})
        varying = [name for name in names if len({repr(options.get(name)) for options in used}) > 1]
        parts = [f"{name}={cell.spec.options[name]}" for name in varying if name in cell.spec.options]
        if not cell.strategy.causal:
            parts.append(f"({NON_CAUSAL})")
        labels[cell.cell_id] = " ".join([cell.spec.strategy, *parts])
    return labels
