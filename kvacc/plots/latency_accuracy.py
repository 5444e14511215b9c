"""Accuracy lost against time per token: which strategy buys speed, and at what price.

Accuracy is the paired difference to ``full`` from results; time is the median of a probe, never of
the scoring run, which reads everything at once. Both with their intervals.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvacc.advice.cost import Cost, Setting, Wanted, read_costs, same_model
from kvacc.errors import KvaccError
from kvacc.leaderboard_rows import AT_CHANCE, Average, Row, averages
from kvacc.plots.budget import comparable
from kvacc.plots.figure import Figure, about_row, inline, number, title_of, y_domain
from kvacc.plots.pareto import front
from kvacc.plots.style import HEIGHT, NOTHING, WIDTH, Series
from kvacc.probes.records import ProbeRecord
from kvacc.results import Cell, SpecRecord

CAPTION = (
    "Bars: 95 % intervals, of the paired difference to full and of the median time; what lies within them "
    "may be luck. The line joins what no other strategy beats in both. Numbers are budgets."
)


@dataclass(frozen=True)
class _Setup:
    """A strategy as the results have it."""

    name: str
    spec: SpecRecord
    model: Mapping[str, Any]


_Costs = dict[str, tuple[Setting, dict[str, Cost]]]


def latency_accuracy_figures(
    cells: Sequence[Cell],
    rows: Sequence[Row],
    records: Sequence[ProbeRecord],
    wanted: Wanted | None = None,
) -> list[Figure]:
    """The average over the tasks that can show a loss first, then a figure for each of the tables.

    Raises:
        KvaccError: no probe is of a model and strategy of the results.
    """
    costs = _costs(cells, rows, records, wanted or Wanted())
    series = Series(sorted({row.label for row in rows}))
    figures = [_figure(*picture, costs, series) for picture in (*_of_averages(rows), *_of_tables(rows))]
    return [figure for figure in figures if figure is not None]


def _costs(
    cells: Sequence[Cell], rows: Sequence[Row], records: Sequence[ProbeRecord], wanted: Wanted
) -> _Costs:
    """By model: the setting of its probes, and the cost by the name of a strategy."""
    by_id = {cell.cell_id: cell for cell in cells}
    setups: dict[str, dict[str, _Setup]] = {}
    for row in rows:
        cell = by_id[row.cell_id]
        setups.setdefault(row.model_id, {})[_name(row)] = _Setup(_name(row), cell.spec, cell.model)
    found: _Costs = {}
    for model_id, by_name in setups.items():
        members = list(by_name.values())
        if any(same_model(members[0], record) for record in records):
            found[model_id] = read_costs(members, records, wanted)
    if not found:
        names = ", ".join(sorted({row.model for row in rows}))
        raise KvaccError(f"the probes are of other models than the results, {names}; probe it: kvacc probe")
    return found


_Entries = list[Row | Average]
_Picture = tuple[str, str, _Entries, Row, str]
"""Title, model, entries with ``full`` among them, a row for what it is about, a remark."""


def _of_tables(rows: Sequence[Row]) -> Iterator[_Picture]:
    for full, members in comparable(rows):
        if full is None:
            continue
        chance = "Full is at chance here: no loss can be shown." if AT_CHANCE in full.notes else ""
        yield title_of(full, members[0].protocol), full.model_id, [full, *members], members[0], chance


def _of_averages(rows: Sequence[Row]) -> Iterator[_Picture]:
    """Over the tasks on which ``full`` is above chance; none where there are fewer than two."""
    at_chance = {row.group for row in rows if row.is_full and AT_CHANCE in row.notes}
    telling = [row for row in rows if row.group not in at_chance]
    left_out = sorted({row.task_label for row in rows if row.group in at_chance})
    remark = f"Left out, because full is at chance there: {', '.join(left_out)}." if left_out else ""
    groups: dict[str, list[Average]] = {}
    for entry in averages(telling):
        key = (*_whose(entry), entry.task_options, entry.tasks)
        groups.setdefault(json.dumps(key, sort_keys=True, default=str), []).append(entry)
    for entries in groups.values():
        full = next((entry for entry in entries if entry.is_full), None)
        for protocol in dict.fromkeys(entry.protocol for entry in entries if not entry.is_full):
            members = [entry for entry in entries if entry.protocol == protocol]
            if full is not None:
                row = _row_like(full, protocol, telling)
                tasks = f"average of {len(full.tasks)} tasks ({', '.join(full.tasks)})"
                title = title_of(row, protocol).replace(row.task_label, tasks, 1)
                yield title, row.model_id, [full, *members], row, remark


def _row_like(entry: Average, protocol: str, rows: Sequence[Row]) -> Row:
    """A row that the average is of."""
    return next(row for row in rows if _whose(row) == _whose(entry) and row.protocol == protocol)


def _whose(entry: Row | Average) -> tuple:
    return entry.model, entry.dtype, entry.kind, entry.shots, entry.fewshot_sampler


def _figure(
    title: str,
    model: str,
    entries: _Entries,
    row: Row,
    remark: str,
    costs: _Costs,
    series: Series,
) -> Figure | None:
    if model not in costs:
        return None
    setting, by_name = costs[model]
    values = [value for entry in entries if (value := _point(entry, by_name.get(_name(entry)))) is not None]
    if sum(not value["full"] for value in values) == 0 or len(values) < 2:
        return None
    best = front([(value["time"], -value["difference"]) for value in values])
    for place, value in enumerate(values):
        value["front"] = "yes" if place in best else "no"
    missing = sorted({_name(entry) for entry in entries} - {value["name"] for value in values})
    not_drawn = f"Not drawn, without a difference or a probe: {', '.join(missing)}." if missing else ""
    return Figure(
        kind="latency",
        title=title,
        chart=_chart(values, series),
        description=f"Difference to full, points, against the time per output token. {_in_words(values)}",
        caption=CAPTION,
        remark=" ".join(text for text in (f"Time: {setting.words}.", remark, not_drawn) if text),
        about=about_row(row, row.protocol),
    )


def _point(entry: Row | Average, cost: Cost | None) -> dict[str, Any] | None:
    """An entry with its time in ms; None where one of both is not known, or it reads the future."""
    if cost is None or cost.latency is None or (isinstance(entry, Row) and not entry.causal):
        return None
    if entry.difference is None and not entry.is_full:
        return None
    return {
        "name": _name(entry),
        "label": entry.label,
        "budget": entry.budget or "",
        "full": entry.is_full,
        "time": 1000 * cost.latency.median,
        "time_low": 1000 * cost.latency.low,
        "time_high": 1000 * cost.latency.high,
        "difference": 0.0 if entry.is_full else entry.difference,
        "low": None if entry.is_full else entry.difference_low,
        "high": None if entry.is_full else entry.difference_high,
    }


def _chart(values: list[dict[str, Any]], series: Series) -> Any:
    import altair

    labels = [value["label"] for value in values]
    heights = [value[name] for value in values for name in ("difference", "low", "high")]
    widths = [value[name] for value in values for name in ("time", "time_low", "time_high")]
    y_scale = altair.Scale(domain=list(y_domain(heights)), zero=False)
    x_scale = altair.Scale(domain=list(y_domain(widths)), zero=False)
    x = altair.X("time:Q", title="time per output token, ms", scale=x_scale, axis=altair.Axis(tickCount=6))
    y = altair.Y("difference:Q", title="difference to full, points", scale=y_scale)
    base = altair.Chart(inline(values))
    coloured = base.encode(color=series.colour("label", labels))
    zero = altair.Chart(inline([{"level": 0.0}])).mark_rule(color=NOTHING, strokeDash=[3, 3])
    return altair.layer(
        zero.encode(y=altair.Y("level:Q", scale=y_scale)),
        base.mark_line(color=NOTHING, strokeWidth=1.5, interpolate="step-after")
        .encode(x=x, y=y, order=altair.Order("time:Q"))
        .transform_filter("datum.front == 'yes'"),
        coloured.mark_rule(strokeWidth=1)
        .encode(x=x, y=altair.Y("low:Q", scale=y_scale), y2=altair.Y2("high:Q"))
        .transform_filter("isValid(datum.low)"),
        coloured.mark_rule(strokeWidth=1).encode(
            x=altair.X("time_low:Q", scale=x_scale), x2=altair.X2("time_high:Q"), y=y
        ),
        coloured.mark_point(size=55, strokeWidth=1.5, opacity=1).encode(
            x=x, y=y, shape=series.shape("label", labels), fill=series.fill("label", labels)
        ),
        base.mark_text(align="left", dx=6, dy=-6, fontSize=9).encode(x=x, y=y, text="budget:N"),
    ).properties(width=WIDTH, height=HEIGHT)


def _in_words(values: Sequence[dict[str, Any]]) -> str:
    def words(value: dict[str, Any]) -> str:
        ends = "" if value["low"] is None else f" ({number(value['low'])} to {number(value['high'])})"
        time = f"{value['time']:.3g} ms ({value['time_low']:.3g} to {value['time_high']:.3g})"
        return f"{value['name']}: {number(value['difference'])}{ends} at {time}"

    ordered = sorted(values, key=lambda value: (value["time"], value["name"]))
    best = [words(value) for value in ordered if value["front"] == "yes"]
    rest = [words(value) for value in ordered if value["front"] == "no"]
    return f"On the front: {'; '.join(best)}. Not on it: {'; '.join(rest) or 'none'}."


def _name(entry: Row | Average) -> str:
    return f"{entry.label} {entry.budget}" if entry.budget else entry.label
