"""Score against cost: what no other strategy beats in everything at once stands on the front.

The cost is measured, never nominal: the share of KV entries that a query reads; bytes
brought from host memory for each token, of strategies that keep their cache there; and
latency, as soon as rows have one (``Row.latency``, seconds for each generated token).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvacc.leaderboard_rows import Row, higher_is_better
from kvacc.plots.budget import (
    comparable,
    level_layers,
    levels,
    limits_of,
    not_drawn,
    point,
    score_title,
    series_of,
    shown,
)
from kvacc.plots.figure import Figure, about_row, inline, number, title_of, y_domain
from kvacc.plots.style import HEIGHT, NOTHING, WIDTH, Series
from kvacc.records import as_bytes


class Cost(NamedTuple):
    """A measured cost, the less the better."""

    field: str
    """Of :class:`Row`; null, or missing, where it was not measured."""
    title: str
    scale: float
    words: Any
    """Turns a value into text."""


COSTS = (
    Cost(
        "kept_fraction", "kept: KV entries that a query reads, %", 100, lambda share: f"{100 * share:.1f} %"
    ),
    Cost("moved_bytes_per_token", "moved from host memory for each token, KiB", 1 / 1024, as_bytes),
    Cost("latency", "latency for each token, ms", 1000, lambda seconds: f"{1000 * seconds:.2f} ms"),
)
CAPTION = (
    "The line joins what no other strategy beats in both score and cost; differences within the bars "
    "(95 %, paired with full) may be luck. Numbers are budgets of points on the front. Hollow points, not "
    "compared or non-causal, are never on the front."
)
HOST_MEMORY = " Strategies that select keep their whole cache in host memory: here is what each query reads."
NOT_MEASURED = " Latency: not measured."


def pareto_figures(rows: Sequence[Row], series: Series | None = None) -> list[Figure]:
    """For each table of the leaderboard and protocol a figure of every cost that two rows have."""
    series = series or series_of(rows)
    figures = []
    for full, members in comparable(rows):
        drawn = shown(members)
        for cost in COSTS:
            measured = [row for row in drawn if getattr(row, cost.field, None) is not None]
            if len(measured) > 1:
                figures.append(_figure(full, members, measured, cost, series))
    return figures


def front(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Places of the points that no other beats: as small in every coordinate, and smaller in one.

    Args:
        points: costs, the less the better; a score comes in negated.
    """

    def beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
        return one != other and all(a <= b for a, b in zip(one, other, strict=True))

    return [i for i, one in enumerate(points) if not any(beats(other, one) for other in points)]


def _figure(full: Row | None, members: list[Row], measured: list[Row], cost: Cost, series: Series) -> Figure:
    import altair

    one, protocol = members[0], members[0].protocol
    values = [{**point(row, full), "cost": cost.scale * getattr(row, cost.field)} for row in measured]
    best = _on_front(measured, values)
    for place, value in enumerate(values):
        value["front"] = "yes" if place in best else "no"
    marks = levels(members, full)
    ends = [value[name] for value in values for name in ("score", "low", "high")]
    domain = y_domain([*ends, *(item["level"] for item in marks)], limits_of(one))
    labels = [row.label for row in measured]
    scale = altair.Scale(domain=list(domain), zero=False)
    x = altair.X(
        "cost:Q", title=cost.title, scale=altair.Scale(zero=False, padding=14), axis=altair.Axis(tickCount=6)
    )
    y = altair.Y("score:Q", title=score_title(one), scale=scale)
    base = altair.Chart(inline(values)).encode(x=x)
    coloured = base.encode(color=series.colour("label", labels))
    filled = altair.FillOpacity(
        "compared:N", scale=altair.Scale(domain=["no", "yes"], range=[0, 1]), legend=None
    )
    layers = [
        *level_layers(marks, domain),
        base.mark_line(color=NOTHING, strokeWidth=1.5, interpolate="step-after").encode(y=y)
        .transform_filter("datum.front == 'yes'"),
        coloured.mark_rule(strokeWidth=1).encode(y=altair.Y("low:Q", scale=scale), y2=altair.Y2("high:Q"))
        .transform_filter("isValid(datum.low)"),
        coloured.mark_point(size=55, strokeWidth=1.5, opacity=1).encode(
            y=y, shape=series.shape("label", labels), fill=series.fill("label", labels),
            fillOpacity=filled, href=altair.Href("cell:N"),
        ),
        base.mark_text(align="left", dx=6, dy=-5, fontSize=9).encode(y=y, text=altair.Text("budget:N"))
        .transform_filter("datum.front == 'yes'"),
    ]  # fmt: skip
    latency = "" if any(getattr(row, "latency", None) is not None for row in members) else NOT_MEASURED
    host = HOST_MEMORY if any(row.moved_bytes_per_token is not None for row in measured) else ""
    return Figure(
        kind="pareto",
        title=title_of(one, protocol),
        chart=altair.layer(*layers).properties(width=WIDTH, height=HEIGHT),
        description=f"{score_title(one)} against {cost.title}. {_in_words(measured, values, cost)}",
        caption=f"{CAPTION}{latency}",
        remark=f"{host}{not_drawn(members)}".strip(),
        about=about_row(one, protocol),
    )


def _on_front(rows: Sequence[Row], values: Sequence[dict[str, Any]]) -> set[int]:
    places = [i for i, value in enumerate(values) if value["compared"] == "yes"]
    sign = -1 if higher_is_better(rows[0].metric) else 1
    return {places[i] for i in front([(values[i]["cost"], sign * values[i]["score"]) for i in places])}


def _in_words(rows: Sequence[Row], values: Sequence[dict[str, Any]], cost: Cost) -> str:
    def words(row: Row, value: dict[str, Any]) -> str:
        return f"{row.label} {row.budget}: {number(value['score'])} at {cost.words(getattr(row, cost.field))}"

    pairs = sorted(zip(rows, values, strict=True), key=lambda pair: (pair[1]["cost"], pair[0].label))
    best = [words(*pair) for pair in pairs if pair[1]["front"] == "yes"]
    rest = [words(*pair) for pair in pairs if pair[1]["front"] == "no"]
    return f"On the front: {'; '.join(best) or 'none'}. Not on it: {'; '.join(rest) or 'none'}."
