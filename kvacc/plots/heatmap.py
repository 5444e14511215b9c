"""Retention: how often a fact is recalled, by its depth in the text and the text's length."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvacc.errors import KvaccError
from kvacc.leaderboard_rows import Row
from kvacc.pairing import metric_column
from kvacc.plots.figure import Figure, about_row, budget_order, inline, number
from kvacc.plots.style import NOTHING
from kvacc.results import METRIC_PREFIX, Cell
from kvacc.statistics import is_at_chance, items_stderr

if TYPE_CHECKING:
    import pyarrow

CAPTION = (
    "Share recalled in %, by depth of the fact (0: start of the text, 100: its end) and length of the text. "
    "\u2020: at chance, cannot be told from guessing."
)
_CELL = 34
_COLUMNS = 3


def heatmap_figures(cells: Sequence[Cell], rows: Sequence[Row], metric: str | None = None) -> list[Figure]:
    """A figure for each task whose samples carry depth and length, with a panel for each
    strategy and budget.

    Args:
        cells, rows: of the same results.
        metric: a metric of the samples such as ``graded``; by default the one of the table.

    Raises:
        KvaccError: no cell with depths has this metric.
    """
    by_id = {cell.cell_id: cell for cell in cells}
    groups: dict[tuple, list[tuple[Row, list[dict[str, Any]]]]] = defaultdict(list)
    known: set[str] = set()
    for row in rows:
        cell = by_id[row.cell_id]
        table = cell.load_samples()
        column, available = _column(cell, table, metric)
        known |= available
        squares = _squares(cell, table, column) if column else []
        if squares:
            groups[_group(row, column)].append((row, squares))
    if metric is not None and not groups and known:
        raise KvaccError(
            f"no samples with depths have the metric {metric!r}; they have {', '.join(sorted(known))}"
        )
    return [figure for (*_, column), members in groups.items() for figure in _figures(members, column)]


def _group(row: Row, column: str) -> tuple:
    """Texts of all lengths stand in one figure; every other option of the task parts it."""
    options = {name: value for name, value in row.task_options.items() if name != "length"}
    told = json.dumps(options, sort_keys=True, default=str)
    return row.model, row.model_id, row.task, told, row.shots_label, str(row.limit), row.seed, column


def _column(cell: Cell, table: pyarrow.Table, metric: str | None) -> tuple[str | None, set[str]]:
    """The samples column to show, and the metrics that there are, where documents have depths."""
    if "depth" not in table.column_names or table["depth"].null_count == table.num_rows:
        return None, set()
    there = [name for name in table.column_names if name.startswith(METRIC_PREFIX)]
    wanted = metric_column(cell) if metric is None else METRIC_PREFIX + metric
    return (wanted if wanted in there else None), {name.removeprefix(METRIC_PREFIX) for name in there}


def _squares(cell: Cell, table: pyarrow.Table, column: str) -> list[dict[str, Any]]:
    """Mean and standard error by depth and length, each document counting once."""
    names = ["doc_id", "depth", "length", "cluster", column]
    if "length" not in table.column_names:
        names.remove("length")
    documents = {row["doc_id"]: row for row in table.select(names).to_pylist()}
    places: dict[tuple[float, int | None], list[dict[str, Any]]] = defaultdict(list)
    for row in documents.values():
        if row["depth"] is not None and row[column] is not None:
            places[row["depth"], row.get("length")].append(row)
    squares = []
    for (depth, length), members in sorted(places.items(), key=lambda item: (item[0][1] or 0, item[0][0])):
        values = [row[column] for row in members]
        clusters = [row["cluster"] or row["doc_id"] for row in members]
        mean = sum(values) / len(values)
        stderr = items_stderr(values, clusters)
        chance = is_at_chance(mean, stderr, cell.task.chance)
        squares.append(
            {
                "depth": 100 * depth,
                "length": length,
                "value": 100 * mean,
                "items": len(values),
                "chance": chance,
            }
        )
    return squares


def _figures(members: list[tuple[Row, list[dict[str, Any]]]], column: str) -> list[Figure]:
    """One figure for each protocol; ``full``, which they do not change, stands in each."""
    protocols = [row.protocol for row, _ in members if not row.is_full] or ["any"]
    return [
        _figure([(r, s) for r, s in members if r.is_full or r.protocol == protocol], protocol, column)
        for protocol in dict.fromkeys(protocols)
    ]


def _figure(members: list[tuple[Row, list[dict[str, Any]]]], protocol: str, column: str) -> Figure:
    import altair

    members = sorted(
        members, key=lambda item: (not item[0].is_full, item[0].label, budget_order(item[0].budget))
    )
    values = [
        {
            **square,
            "panel": _panel(row),
            "depth": number(square["depth"], 0),
            "length": _length(square["length"]),
            "text": number(square["value"], 0) + ("\u2020" if square["chance"] else ""),
            "cell": f"#{row.cell_id}",
        }
        for row, squares in members
        for square in squares
    ]
    panels = list(dict.fromkeys(value["panel"] for value in values))
    depths = sorted({value["depth"] for value in values}, key=float)
    lengths = sorted({value["length"] for value in values}, key=_by_length)
    base = altair.Chart(inline(values)).encode(
        x=altair.X("depth:N", sort=depths, title="depth in %"),
        y=altair.Y("length:N", sort=lengths, title="tokens"),
    )
    colour = altair.Color(
        "value:Q",
        scale=altair.Scale(scheme="viridis", domain=[0, 100]),
        legend=altair.Legend(title="recalled, %", orient="bottom", gradientLength=160),
    )
    # White on the dark half of the scale, black on the bright one: at least 4.5:1 everywhere.
    ink = altair.condition("datum.value < 58", altair.value("#ffffff"), altair.value("#000000"))
    chart = (
        altair.layer(
            base.mark_rect(stroke=NOTHING, strokeWidth=0.5).encode(color=colour, href=altair.Href("cell:N")),
            base.mark_text(fontSize=10).encode(text=altair.Text("text:N"), color=ink),
        )
        .properties(width=_CELL * len(depths), height=26 * len(lengths))
        .facet(facet=altair.Facet("panel:N", sort=panels, title=None), columns=_COLUMNS)
    )
    one = members[0][0]
    metric = column.removeprefix(METRIC_PREFIX)
    return Figure(
        kind="heatmap",
        title=f"{one.model}, {one.task}, {one.shots_label}, {protocol}: {metric}",
        chart=chart,
        description=_in_words(values, panels, one.chance),
        caption=CAPTION,
        remark=_remark(values, one.chance),
        about=about_row(one, protocol),
    )


def _panel(row: Row) -> str:
    return row.label if row.budget is None else f"{row.label} {row.budget}"


def _length(length: int | None) -> str:
    return "not told" if length is None else str(length)


def _by_length(text: str) -> float:
    return float(text) if text.isdigit() else -1.0


def _remark(values: list[dict[str, Any]], chance: float | None) -> str:
    fewest, most = min(v["items"] for v in values), max(v["items"] for v in values)
    items = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    guess = "Chance is not known." if chance is None else f"Chance: {number(100 * chance)}."
    return f"{guess} {items} items in a square."


def _in_words(values: list[dict[str, Any]], panels: list[str], chance: float | None) -> str:
    parts = []
    for panel in panels:
        squares = [v for v in values if v["panel"] == panel]
        lines = defaultdict(list)
        for square in squares:
            lines[square["length"]].append(f"depth {square['depth']} %: {square['text']}")
        parts.append(panel + ": " + "; ".join(f"{n} tokens: {', '.join(v)}" for n, v in lines.items()))
    guess = "" if chance is None else f"Chance {number(100 * chance)}. "
    return f"Share recalled in %. {guess}" + ". ".join(parts) + "."
