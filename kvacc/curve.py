"""Perplexity by position over long texts: ``full`` beside every strategy.

A cell of texts scored as a whole (``kvacc_longtext``) holds the sum of log-likelihoods at each
bucket of positions of a window. Perplexity there is ``exp(-sum / tokens)``: what the model makes of
a token that has so many before it. Under a budget the later buckets suffer first.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvacc.errors import KvaccError
from kvacc.leaderboard_rows import Row, build
from kvacc.results import Cell, CurveRecord

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Curve:
    """One cell's curve, and the row that says what it is."""

    row: Row
    buckets: list[CurveRecord]

    @property
    def name(self) -> str:
        """``full``, or ``h2o 0.2``."""
        return self.row.label if self.row.budget is None else f"{self.row.label} {self.row.budget}"


def curves(cells: Sequence[Cell]) -> list[list[Curve]]:
    """The curves of each model and set of texts, ``full`` first, in the leaderboard's order.

    Raises:
        KvaccError: no cell has a curve, or a cell's samples are damaged.
    """
    by_id = {cell.cell_id: cell for cell in cells if cell.curve}
    if not by_id:
        raise KvaccError(
            "no cell scores texts as a whole, so there is no curve; run the task kvacc_longtext first"
        )
    tables: dict[tuple, list[Curve]] = {}
    for row in build(by_id.values()):
        tables.setdefault(row.group, []).append(Curve(row, by_id[row.cell_id].curve))
    return list(tables.values())


def perplexity(bucket: CurveRecord) -> float:
    """``exp(-loglikelihood / tokens)``; infinity where that is too large to state."""
    surprise = -bucket.loglikelihood / bucket.tokens
    return math.exp(surprise) if surprise < 700 else math.inf


def positions(bucket: CurveRecord) -> str:
    """``512-1023``, or ``0``: the positions of a bucket, both ends included."""
    last = bucket.end - 1
    return str(bucket.start) if last == bucket.start else f"{bucket.start}-{last}"


def table_lines(table: Sequence[Curve]) -> list[list[str]]:
    """Rows of text: positions, tokens, and the perplexity of each curve; titles first.

    All curves of a table are over the same texts and windows, so their tokens agree.
    """
    by_start = [{bucket.start: bucket for bucket in curve.buckets} for curve in table]
    lines = [["positions", "tokens", *(curve.name for curve in table)]]
    for start in sorted(set().union(*by_start)):
        found = [buckets.get(start) for buckets in by_start]
        one = next(bucket for bucket in found if bucket is not None)
        values = ["-" if bucket is None else f"{perplexity(bucket):.2f}" for bucket in found]
        lines.append([positions(one), str(one.tokens), *values])
    return lines


def heading(table: Sequence[Curve]) -> str:
    """Which model and texts a table is of."""
    row = table[0].row
    return f"{row.model} ({row.dtype}), {row.task}, {row.items} texts, perplexity by position of a window"


def render_table(tables: Sequence[Sequence[Curve]]) -> Table:
    """Terminal tables, one below the other."""
    from rich.table import Table
    from rich.text import Text

    page = Table.grid(padding=0)
    page.add_column(overflow="fold")
    for table in tables:
        titles, *lines = table_lines(table)
        shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for title in titles:
            shown.add_column(title, justify="right")
        for line in lines:
            shown.add_row(*line)
        page.add_row(Text(heading(table), style="bold"))
        page.add_row(shown)
        page.add_row("")
    return page


def to_markdown(tables: Sequence[Sequence[Curve]]) -> str:
    """The same as Markdown tables."""
    lines = []
    for table in tables:
        titles, *rows = table_lines(table)
        lines += [f"{heading(table)}:", "", "| " + " | ".join(titles) + " |"]
        lines += ["|" + " --: |" * len(titles), *("| " + " | ".join(row) + " |" for row in rows), ""]
    return "\n".join(lines)


def to_csv(tables: Sequence[Sequence[Curve]]) -> str:
    """One line per cell and bucket, with the cell's id."""
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(
        [
            "model",
            "task",
            "strategy",
            "budget",
            "start",
            "end",
            "tokens",
            "loglikelihood",
            "perplexity",
            "cell_id",
        ]
    )
    for table in tables:
        for curve in table:
            row = curve.row
            for bucket in curve.buckets:
                writer.writerow(
                    [
                        row.model, row.task, row.label, row.budget or "", bucket.start, bucket.end,
                        bucket.tokens, bucket.loglikelihood, perplexity(bucket), row.cell_id,
                    ]
                )  # fmt: skip
    return output.getvalue()
