"""How ``kvacc results`` shows cells and differences on a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvacc.results import Cell
from kvacc.shots import DEFAULT_SAMPLER, shots_text
from kvacc.sweep_progress import as_duration

if TYPE_CHECKING:
    from kvacc.store.diff import CellDifference

NOTHING = "-"
_VARYING = "(not the same in all cells)"
_SECTIONS = ("spec", "task", "model", "strategy", "measured", "fidelity", "environment", "timing")
_SAMPLE_COLUMNS = (
    "doc_id",
    "option",
    "loglikelihood",
    "greedy",
    "response",
    "target",
    "kept_fraction",
    "acted",
)


def cells_view(rows: Sequence[dict[str, Any]]) -> Table:
    """One line per cell, from rows of the table ``cells``."""
    table = _table()
    for title in ("cell", "model", "strategy", "budget", "protocol", "task"):
        table.add_column(title, no_wrap=title == "cell", overflow="fold")
    for title in ("shots", "items", "metric", "score", "kept", "time", "warnings"):
        table.add_column(title, justify="left" if title == "metric" else "right")
    options = _telling_options(rows)
    for row, extra in zip(rows, options, strict=True):
        table.add_row(
            *map(
                Text,
                (
                    row["cell_id"],
                    row["model"],
                    " ".join([row["strategy"], *extra]),
                    _budget(row),
                    row["protocol"],
                    _task(row),
                    _shots(row),
                    str(row["items"]),
                    row["metric"],
                    _score(row["score"], row["stderr"]),
                    f"{row['kept_fraction']:.1%}",
                    as_duration(row["seconds"]),
                    str(row["warning_count"] or NOTHING),
                ),
            )
        )
    table.caption = Text(f"{len(rows)} cell{'' if len(rows) == 1 else 's'}")
    table.caption_justify = "left"
    return table


def cell_view(cell: Cell, samples: int) -> Group:
    """Everything of a cell, and the first rows of its samples."""
    record = cell.record()
    parts: list[Any] = [Text(f"cell {cell.cell_id} in {cell.folder}", style="bold")]
    scores = _table("metric", "score", title="scores")
    for metric, score in sorted(cell.scores.items()):
        mark = " (primary)" if metric == cell.task.primary_metric else ""
        scores.add_row(Text(metric + mark), Text(_score(score.value, score.stderr)))
    for section in _SECTIONS:
        if record.get(section) is not None:
            parts.append(_fields(section, record[section]))
        if section == "strategy":
            parts.append(scores)
    parts += [Text(f"warning: {warning}") for warning in cell.warnings]
    table = cell.load_samples()
    if samples:
        metrics = [name for name in table.column_names if name.startswith("metric_")]
        columns = [name for name in (*_SAMPLE_COLUMNS, *metrics) if table[name].null_count < len(table)]
        head = rows_view(table.select(columns).slice(0, samples).to_pylist(), columns)
        head.title = f"samples ({min(samples, len(table))} of {len(table)} rows)"
        head.title_justify = "left"
        parts.append(head)
    return Group(*parts)


def diff_view(found: CellDifference, shown: int) -> Group:
    """One pair of cells: what changed, and which settings differ."""
    parts: list[Any] = [Text(f"A  {_label(found.a)}"), Text(f"B  {_label(found.b)}"), Text("")]
    if found.why_not is not None:
        parts.append(Text(f"not compared item by item: {found.why_not}"))
    else:
        parts += [Text(line) for line in _outcome(found, shown)]
    parts.append(_settings(found.settings))
    return Group(*parts)


def run_diff_view(found: Sequence[CellDifference], only_a: Sequence[Cell], only_b: Sequence[Cell]) -> Group:
    """Two runs: a line per pair of cells, then what one run alone has, and settings that differ."""
    table = _table()
    for title in ("cell", "strategy", "budget", "protocol", "task"):
        table.add_column(title)
    for title in ("score A", "score B", "B - A", "flips", "largest log-likelihood difference"):
        table.add_column(title, justify="right")
    settings: dict[str, tuple[Any, Any]] = {}
    for one in found:
        for name, values in one.settings.items():
            settings[name] = values if settings.get(name, values) == values else (_VARYING, _VARYING)
        spec, metric = one.a.spec, one.a.task.primary_metric
        same = "identical" if one.is_identical else _signed(one)
        values = (
            one.a.cell_id,
            spec.strategy,
            spec.budget or NOTHING,
            spec.protocol,
            f"{spec.task} {shots_text(spec.shots, spec.fewshot_sampler)}",
            f"{one.a.scores[metric].value:.4f}",
            f"{one.b.scores[metric].value:.4f}" if metric in one.b.scores else NOTHING,
            f"not compared: {one.why_not}" if one.why_not else same,
            NOTHING if one.why_not else f"{len(one.lost)}/{len(one.gained)}",
            NOTHING if one.loglikelihood_max is None else f"{one.loglikelihood_max:.2g}",
        )
        table.add_row(*map(Text, values))
    identical = sum(one.is_identical for one in found)
    parts: list[Any] = [
        table,
        Text(f"{len(found)} cells compared, {identical} of them identical in every answer"),
    ]
    for name, cells in (("A", only_a), ("B", only_b)):
        if cells:
            parts.append(Text(f"only in {name}: {len(cells)} cells, such as {_label(cells[0])}"))
    parts.append(_settings(settings))
    return Group(*parts)


def rows_view(rows: Sequence[dict[str, Any]], columns: Sequence[str] = ()) -> Table:
    """Any rows, numbers to the right."""
    names = list(columns or (rows[0] if rows else ()))
    table = _table()
    for name in names:
        numeric = any(isinstance(row[name], (int, float)) and not isinstance(row[name], bool) for row in rows)
        table.add_column(Text(name), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_value(row[name])) for name in names))
    if not rows:
        table.caption = Text("no row")
    return table


def _outcome(found: CellDifference, shown: int) -> list[str]:
    metric = found.a.task.primary_metric
    lines = [
        f"{metric}: A {found.a.scores[metric].value:.4f}, B {found.b.scores[metric].value:.4f}; "
        f"B - A {_signed(found)} on {found.items} items"
    ]
    if found.difference is not None:
        lines[0] += f" (95 % interval, {found.difference.method})"
    lines.append(f"values that differ: {found.changed} of {found.items} items")
    for name, documents in (("lost (right in A, wrong in B)", found.lost), ("gained", found.gained)):
        if documents:
            more = f" and {len(documents) - shown} more" if len(documents) > shown else ""
            some = ", ".join(map(str, documents[:shown]))
            lines.append(f"{name}: {len(documents)} documents{': ' if some else ''}{some}{more}")
    if found.loglikelihood_max is not None:
        lines.append(
            f"log-likelihoods: largest difference {found.loglikelihood_max:.3g} nats, average "
            f"{found.loglikelihood_mean:.3g}, over {found.loglikelihoods} requests"
        )
    if found.is_identical:
        lines.append("identical in every answer")
    return lines


def _signed(found: CellDifference) -> str:
    if found.difference is None:
        return NOTHING
    value, low, high, _ = found.difference
    return f"{value:+.4f} [{low:+.4f}, {high:+.4f}]"


def _settings(settings: dict[str, tuple[Any, Any]]) -> Any:
    if not settings:
        return Text("no setting differs")
    table = _table("setting", "A", "B", title="settings that differ")
    for name, (old, new) in settings.items():
        table.add_row(*(Text(text) for text in (name, _value(old), _value(new))))
    return table


def _label(cell: Cell) -> str:
    spec = cell.spec
    budget = f" {spec.budget}" if spec.budget is not None else ""
    model = cell.model.get("name") or spec.model.get("pretrained")
    shots = shots_text(spec.shots, spec.fewshot_sampler)
    return f"{cell.cell_id}: {model} {spec.strategy}{budget} {spec.protocol} {spec.task} {shots}"


def _fields(title: str, record: dict[str, Any]) -> Table:
    table = _table(title=title)
    table.show_header = False
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in record.items():
        table.add_row(Text(name), Text(_value(value)))
    return table


def _telling_options(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Of each row's options those in which rows of its strategy differ."""
    parsed = [json.loads(row["options"] or "{}") for row in rows]
    used: dict[str, list[dict[str, Any]]] = {}
    for row, options in zip(rows, parsed, strict=True):
        used.setdefault(row["strategy"], []).append(options)
    return [
        [f"{name}={value}" for name, value in options.items()
         if len({repr(other.get(name)) for other in used[row["strategy"]]}) > 1]
        for row, options in zip(rows, parsed, strict=True)
    ]  # fmt: skip


def _task(row: dict[str, Any]) -> str:
    options = json.loads(row.get("task_options") or "{}")
    return " ".join([row["task"], *(f"{name}={_value(value)}" for name, value in options.items())])


def _shots(row: dict[str, Any]) -> str:
    """``5``, or ``5 first_n``."""
    if row["shots"] is None:
        return NOTHING
    sampler = row["fewshot_sampler"]
    return str(row["shots"]) if sampler == DEFAULT_SAMPLER else f"{row['shots']} {sampler}"


def _budget(row: dict[str, Any]) -> str:
    if row["budget"] is None:
        return NOTHING
    return row["budget"] if row["budget_of"] == "prompt" else f"{row['budget']} of {row['budget_of']}"


def _score(value: float, stderr: float | None) -> str:
    return f"{value:.4f}" if stderr is None else f"{value:.4f} ± {stderr:.4f}"


def _value(value: Any) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return (
        json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, (dict, list)) else str(value)
    )


def _table(*titles: str, title: str | None = None) -> Table:
    return Table(
        *titles, box=box.SIMPLE, title=title, title_justify="left", title_style="bold", pad_edge=False
    )
