"""Score by budget: a line for each strategy, a bar for each paired interval, ``full`` as a level."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvacc.leaderboard_rows import AT_CHANCE, DID_NOT_ACT, Row
from kvacc.plots.figure import Figure, about_row, budget_order, inline, number, title_of, y_domain
from kvacc.plots.style import HEIGHT, NOTHING, WIDTH, Series

if TYPE_CHECKING:
    import altair

CAPTION = (
    "Bars: 95 % interval of the paired difference to full, drawn from full's score; one that crosses "
    "full's line shows neither a loss nor a gain. Hollow: not compared with full, or non-causal."
)


def budget_figures(rows: Sequence[Row], series: Series | None = None) -> list[Figure]:
    """A figure for each table of the leaderboard and protocol that has rows beside ``full``.

    Args:
        rows: from :func:`kvacc.leaderboard_rows.build`.
        series: colours by label, where other pictures share them.
    """
    series = series or series_of(rows)
    return [_figure(full, members, series) for full, members in comparable(rows)]


def series_of(rows: Sequence[Row]) -> Series:
    """Colours and shapes of the labels of ``rows``, ``full`` excepted."""
    return Series(sorted({row.label for row in rows if not row.is_full}))


def comparable(rows: Sequence[Row]) -> Iterator[tuple[Row | None, list[Row]]]:
    """``full`` (None where it was not run) and the rows of one protocol on the same items."""
    for _, members in itertools.groupby(rows, key=lambda row: row.group):
        block = list(members)
        full = next((row for row in block if row.is_full), None)
        for protocol in dict.fromkeys(row.protocol for row in block if not row.is_full):
            yield full, [row for row in block if row.protocol == protocol]


def shown(members: Sequence[Row]) -> list[Row]:
    """Rows that stand for their strategy: one that did not act would show full's score as its own."""
    return [row for row in members if row.why_no_difference != DID_NOT_ACT]


def point(row: Row, full: Row | None) -> dict[str, Any]:
    """A row in the unit that people read, with the ends of its interval around full's score."""
    has_interval = full is not None and row.difference_low is not None
    level = full.scale * full.score if has_interval else 0.0
    return {
        "label": row.label,
        "budget": row.budget,
        "score": row.scale * row.score,
        "low": level + row.difference_low if has_interval else None,
        "high": level + row.difference_high if has_interval else None,
        "compared": "yes" if has_interval and row.causal else "no",
        "kind": "share" if budget_order(row.budget)[0] == 1 else "count",
        "cell": f"#{row.cell_id}",
    }


def levels(members: Sequence[Row], full: Row | None) -> list[dict[str, Any]]:
    """Horizontal reference lines: full's score and chance; one line where they would overprint."""
    row = full or members[0]
    found = []
    if full is not None:
        found.append({"level": full.scale * full.score, "name": "full", "dashed": "no"})
    if row.chance is not None:
        found.append({"level": row.scale * row.chance, "name": "chance", "dashed": "yes"})
    return found


def level_layers(found: Sequence[dict[str, Any]], domain: tuple[float, float]) -> list[altair.Chart]:
    """Lines and their names, which stand right of the plot."""
    import altair

    if not found:
        return []
    span = domain[1] - domain[0]
    near = len(found) == 2 and abs(found[0]["level"] - found[1]["level"]) < 0.07 * span
    # Names that would overprint move apart, the upper one up.
    shift = 0.035 * span if near else 0.0
    upper = max(item["level"] for item in found)
    named = [{**item, "at": item["level"] + (shift if item["level"] == upper else -shift)} for item in found]
    base = altair.Chart(inline(named))
    dash = altair.StrokeDash(
        "dashed:N", scale=altair.Scale(domain=["no", "yes"], range=[[1, 0], [3, 3]]), legend=None
    )
    return [
        base.mark_rule(color=NOTHING, strokeWidth=1.5).encode(y=altair.Y("level:Q"), strokeDash=dash),
        base.mark_text(align="left", dx=4).encode(
            x=altair.value(WIDTH), y=altair.Y("at:Q"), text=altair.Text("name:N")
        ),
    ]


def in_words(members: Sequence[Row], full: Row | None) -> str:
    """``full 69.0. h2o: 0.2 63.0 (55.9 to 67.7), ...``: what the picture shows, for a text reader."""
    parts = [f"{item['name']} {number(item['level'])}" for item in levels(members, full)]
    for label, rows in itertools.groupby(sorted(members, key=_by_label), key=lambda row: row.label):
        values = (point(row, full) for row in rows)
        parts.append(f"{label}: {', '.join(_value_in_words(value) for value in values)}")
    return "; ".join(parts) + "."


def score_title(row: Row) -> str:
    """``acc in %``, or the metric alone where it is no share."""
    metric = row.metric.split(",")[0]
    return f"{metric} in %" if row.scale == 100 else metric


def limits_of(row: Row) -> tuple[float, float] | None:
    """What a score cannot exceed: 0 and 100 for shares in %."""
    return (0.0, 100.0) if row.scale == 100 else None


def not_drawn(members: Sequence[Row]) -> str:
    """Which rows are missing from a picture, because they did not act."""
    idle = [f"{row.label} {row.budget}" for row in members if row.why_no_difference == DID_NOT_ACT]
    return f" Not drawn, because they did not act: {', '.join(idle)}." if idle else ""


def _by_label(row: Row) -> tuple:
    return row.label, budget_order(row.budget)


def _value_in_words(value: dict[str, Any]) -> str:
    ends = "" if value["low"] is None else f" ({number(value['low'])} to {number(value['high'])})"
    return f"{value['budget'] or 'no budget'} {number(value['score'])}{ends}"


def _figure(full: Row | None, members: list[Row], series: Series) -> Figure:
    import altair

    drawn = shown(members)
    one, protocol = members[0], members[0].protocol
    values = [point(row, full) for row in drawn]
    budgets = [row.budget for row in sorted(drawn, key=lambda row: budget_order(row.budget), reverse=True)]
    marks = levels(members, full)
    ends = [value[name] for value in values for name in ("score", "low", "high")]
    domain = y_domain([*ends, *(item["level"] for item in marks)], limits_of(one))
    labels = [row.label for row in drawn]
    x = altair.X("budget:N", sort=list(dict.fromkeys(budgets)), title="budget: KV entries kept")
    scale = altair.Scale(domain=list(domain), zero=False)
    y = altair.Y("score:Q", title=score_title(one), scale=scale)
    base = altair.Chart(inline(values)).encode(
        x=x, xOffset=series.offset("label", labels), color=series.colour("label", labels)
    )
    filled = altair.FillOpacity(
        "compared:N", scale=altair.Scale(domain=["no", "yes"], range=[0, 1]), legend=None
    )
    layers = [
        *level_layers(marks, domain),
        base.mark_line(strokeWidth=1.5).encode(
            y=y, strokeDash=series.dash("label", labels), detail=altair.Detail("kind:N")
        ),
        base.mark_rule(strokeWidth=1.5).encode(y=altair.Y("low:Q", scale=scale), y2=altair.Y2("high:Q"))
        .transform_filter("isValid(datum.low)"),
        base.mark_point(size=55, strokeWidth=1.5, opacity=1).encode(
            y=y, shape=series.shape("label", labels), fill=series.fill("label", labels),
            fillOpacity=filled, href=altair.Href("cell:N"),
        ),
    ]  # fmt: skip
    at_chance = " Full is at chance here: no loss can be shown." if full and AT_CHANCE in full.notes else ""
    return Figure(
        kind="budget",
        title=title_of(one, protocol),
        chart=altair.layer(*layers).properties(width=WIDTH, height=HEIGHT),
        description=f"{score_title(one)} by budget. {in_words(drawn, full)}{at_chance}",
        caption=CAPTION,
        remark=f"{at_chance}{not_drawn(members)}".strip(),
        about=about_row(one, protocol),
    )
