"""Fidelity by position: how far a strategy's next-token distributions are from ``full``'s."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvacc.leaderboard_rows import Row
from kvacc.plots.figure import Figure, about_row, title_of
from kvacc.plots.positions import Buckets, bucket_lists, by_table, in_order, in_words, lines, middle, name_of
from kvacc.results import Cell

CAPTION = (
    "Mean over the scored tokens in each range of positions. KL divergence: KL(full || strategy) of the "
    "next-token distributions, in nats; 0 is full itself. Agreement: share of tokens with the same most "
    "likely token. Attention mass: share of the true attention on what was read, over the layers that act."
)


def fidelity_figures(cells: Sequence[Cell], rows: Sequence[Row]) -> list[Figure]:
    """A figure for each table and protocol whose cells were compared with full token by token."""
    figures = []
    for protocol, members in by_table(cells, rows, lambda cell: bucket_lists(cell, "by_position")):
        strategies = [(row, buckets) for row, buckets in in_order(members) if not row.is_full]
        if strategies:
            figures.append(_figure(strategies, protocol))
    return figures


def _figure(members: Sequence[tuple[Row, Buckets]], protocol: str) -> Figure:
    import altair

    values: list[dict[str, Any]] = [
        {
            "name": name_of(row),
            "cell": f"#{row.cell_id}",
            "middle": middle(bucket),
            "from": bucket["start"],
            "to": bucket["end"],
            "kl": bucket.get("kl"),
            "agreement": _percent(bucket.get("agreement")),
            "mass": _percent(bucket.get("mass")),
        }
        for row, buckets in members
        for bucket in buckets
    ]
    names = list(dict.fromkeys(value["name"] for value in values))
    measures = [
        ("kl", "KL divergence in nats", 4),
        ("agreement", "agreement in %", 1),
        ("mass", "attention mass in %", 1),
    ]
    known = [m for m in measures if any(value[m[0]] is not None for value in values)]
    panels = [lines(values, f, title, names, most=math.inf if f == "kl" else 100.0) for f, title, _ in known]
    one = members[0][0]
    return Figure(
        kind="fidelity",
        title=title_of(one, protocol),
        chart=altair.vconcat(*panels, spacing=14),
        description=" ".join(
            f"{title}, by position: {in_words(values, f, digits)}." for f, title, digits in known
        ),
        caption=CAPTION,
        about=about_row(one, protocol),
    )


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
