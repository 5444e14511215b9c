"""Perplexity of long texts by position: does a strategy fall behind as its cache overflows?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvacc.leaderboard_rows import Row
from kvacc.plots.figure import Figure, about_row, title_of
from kvacc.plots.positions import Buckets, bucket_lists, by_table, in_order, in_words, lines, middle, name_of
from kvacc.results import Cell

CAPTION = (
    "Perplexity of the tokens in each range of positions: exp of the mean negative log-likelihood in nats. "
    "Lower is better."
)
_AGREEMENT = 0.001
"""Relative difference of perplexities that nobody could see."""


def perplexity_figures(cells: Sequence[Cell], rows: Sequence[Row]) -> list[Figure]:
    """A figure for each table and protocol whose cells hold log-likelihoods by position."""
    return [
        _figure(in_order(members), protocol)
        for protocol, members in by_table(cells, rows, lambda cell: _curve(cell))
    ]


def _curve(cell: Cell) -> Buckets:
    """Buckets with ``tokens`` scored and their summed ``loglikelihood`` in nats."""
    return [bucket for bucket in bucket_lists(cell, "curve") if bucket.get("tokens")]


def perplexity(bucket: dict[str, Any]) -> float:
    """exp(-loglikelihood / tokens) of a bucket."""
    return math.exp(-bucket["loglikelihood"] / bucket["tokens"])


def _first_drawn(members: Sequence[tuple[Row, Buckets]]) -> int:
    """The position from which on a picture shows something.

    A model's first tokens have perplexities of thousands, and every strategy agrees there: drawn,
    they would press all differences into one line. What is left out ends before the last range in
    which all agree, and never leaves fewer than two ranges.
    """
    by_start: dict[int, list[float]] = {}
    for _, buckets in members:
        for bucket in buckets:
            by_start.setdefault(bucket["start"], []).append(perplexity(bucket))
    starts = sorted(by_start)
    calm = 3 * max(by_start[starts[-1]])
    first = starts[0]
    for start, following in zip(starts[:-2], starts[1:], strict=False):
        here, there = by_start[start], by_start[following]
        agree = max(there) <= (1 + _AGREEMENT) * min(there)
        if not (agree or max(here) > calm):
            break
        first = following
    return first


def _figure(members: Sequence[tuple[Row, Buckets]], protocol: str) -> Figure:
    first = _first_drawn(members)
    values = [
        {
            "name": name_of(row),
            "cell": f"#{row.cell_id}",
            "middle": middle(bucket),
            "from": bucket["start"],
            "to": bucket["end"],
            "perplexity": perplexity(bucket),
        }
        for row, buckets in members
        for bucket in buckets
        if bucket["start"] >= first
    ]
    names = list(dict.fromkeys(value["name"] for value in values))
    one = members[0][0]
    return Figure(
        kind="perplexity",
        title=title_of(one, protocol),
        chart=lines(values, "perplexity", "perplexity", names),
        description=f"Perplexity by position. {in_words(values, 'perplexity', 2)}.",
        caption=CAPTION,
        remark=f"Positions before {first} are left out: too early for differences." if first else "",
        about=about_row(one, protocol),
    )
