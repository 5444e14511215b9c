"""What the pictures by position share: one line for each strategy and budget over the text."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvacc.leaderboard_rows import Row
from kvacc.plots.figure import budget_order, inline, number, y_domain
from kvacc.plots.style import HEIGHT, WIDTH, Series
from kvacc.results import Cell

if TYPE_CHECKING:
    import altair

Buckets = Sequence[Mapping[str, Any]]


def bucket_lists(cell: Cell, *names: str) -> list[dict[str, Any]]:
    """The first list of position buckets that the cell has under one of the names, as plain values.

    Looked for in ``cell.fidelity`` and in the cell itself; cells of older versions have none.
    """
    for holder in (getattr(cell, "fidelity", None), cell):
        for name in names:
            found = getattr(holder, name, None)
            if found:
                return [b if isinstance(b, dict) else b.model_dump() for b in found]
    return []


def by_table(
    cells: Sequence[Cell], rows: Sequence[Row], buckets_of: Callable[[Cell], Buckets]
) -> list[tuple[str, list[tuple[Row, Buckets]]]]:
    """(protocol, rows with their buckets), for each table and protocol; full stands in each."""
    by_id = {cell.cell_id: cell for cell in cells}
    tables: dict[tuple, list[tuple[Row, Buckets]]] = defaultdict(list)
    for row in rows:
        buckets = buckets_of(by_id[row.cell_id])
        if len(buckets) > 1:  # one is no curve
            tables[row.group].append((row, buckets))
    found = []
    for members in tables.values():
        protocols = dict.fromkeys(row.protocol for row, _ in members if not row.is_full) or ["any"]
        found += [(p, [m for m in members if m[0].is_full or m[0].protocol == p]) for p in protocols]
    return found


def name_of(row: Row) -> str:
    """``h2o 0.2``."""
    return row.label if row.budget is None else f"{row.label} {row.budget}"


def in_order(members: Sequence[tuple[Row, Buckets]]) -> list[tuple[Row, Buckets]]:
    """``full`` first, then by strategy, larger budgets first."""
    return sorted(
        members, key=lambda item: (not item[0].is_full, item[0].label, budget_order(item[0].budget))
    )


def lines(
    values: Sequence[Mapping[str, Any]], field: str, title: str, names: Sequence[str], most: float = math.inf
) -> altair.Chart:
    """A line for each name through the middles of its buckets.

    Args:
        values: with ``name``, ``middle`` (position in tokens) and ``field``, which is not negative.
        most: what ``field`` cannot exceed.
    """
    import altair

    known = [value for value in values if value.get(field) is not None]
    series = Series(names)
    # Left to Vega, an axis of one value has a tick that is rounded to another one.
    domain = list(y_domain([value[field] for value in known], (0.0, most)))
    base = altair.Chart(inline(known)).encode(
        x=altair.X("middle:Q", title="position in tokens", scale=_positions(known)),
        y=altair.Y(f"{field}:Q", title=title, scale=altair.Scale(domain=domain, zero=False)),
        color=series.colour("name", names),
    )
    return altair.layer(
        base.mark_line(strokeWidth=1.5).encode(strokeDash=series.dash("name", names)),
        base.mark_point(size=26, filled=True, opacity=1).encode(
            shape=series.shape("name", names), href=altair.Href("cell:N")
        ),
    ).properties(width=WIDTH, height=HEIGHT)


def _positions(values: Sequence[Mapping[str, Any]]) -> altair.Scale:
    """Logarithmic where buckets double: the first ones would lie on one another."""
    import altair

    places = [value["middle"] for value in values]
    if min(places) > 0 and max(places) > 16 * min(places):
        return altair.Scale(type="log", base=2, nice=False)
    return altair.Scale(zero=True, nice=False)


def middle(bucket: Mapping[str, Any]) -> float:
    """Of the positions ``start`` to ``end`` (not included)."""
    return (bucket["start"] + bucket["end"]) / 2


def in_words(values: Sequence[Mapping[str, Any]], field: str, digits: int) -> str:
    """``h2o 0.2: 0-128 0.02, 128-256 0.05; ...``."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for value in values:
        if value.get(field) is not None:
            by_name[value["name"]].append(f"{value['from']}-{value['to']} {number(value[field], digits)}")
    return "; ".join(f"{name}: {', '.join(parts)}" for name, parts in by_name.items())
