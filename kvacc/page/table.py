"""The page's tables: the same columns and words as the Markdown leaderboard, with sort values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvacc.leaderboard import (
    AVERAGE_COLUMNS,
    COLUMNS,
    EXPLANATION,
    FIDELITY_EXPLANATION,
    GRADED_EXPLANATION,
    SELECTION_EXPLANATION,
    Column,
    heading_of,
    known_columns,
    tasks_averaged,
)
from kvacc.leaderboard_rows import DID_NOT_ACT, NOT_SIGNIFICANT, Average, Row
from kvacc.plots.figure import budget_order
from kvacc.strategy import PROTOCOLS

_NAMES = ("strategy", "budget", "protocol")
"""Columns that are no measurement: they do not link to a configuration."""
_FIRST = ("strategy", "budget", "protocol", "score", "difference", "flips", "kept", "graded", "rank", "notes")
"""Columns that a reader must not have to scroll for; the others follow."""
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_BAR_WIDTH = 60


@dataclass(frozen=True)
class Cell:
    """One table cell."""

    text: str
    sort: float | None
    """What JavaScript sorts by where the text's leading number would mislead; None elsewhere."""
    right: bool
    link: str | None = None
    bar: dict[str, float] | None = None
    is_note: bool = False


@dataclass(frozen=True)
class Line:
    """One table row, and what filters ask for."""

    cells: list[Cell]
    cell_id: str
    label: str
    strategy: str
    protocol: str
    protocol_order: int
    budget: str
    is_full: bool
    style: str


@dataclass(frozen=True)
class Section:
    """Rows that may be compared: one model, task and set of items."""

    heading: str
    model: str
    task: str
    shots: str
    score: float
    columns: list[Column]
    lines: list[Line]


def sections(rows: Sequence[Row], with_flips: set[str]) -> list[Section]:
    """A section for each table of the leaderboard.

    Args:
        with_flips: ids of cells whose flipped items the page holds.
    """
    # "ns" stands beside the interval already.
    notes = Column(
        "notes", lambda row: "; ".join(n for n in row.notes if n != NOT_SIGNIFICANT), to_right=False
    )
    known = {column.title: column for column in [*known_columns(COLUMNS, rows), notes]}
    columns = [known[title] for title in _FIRST if title in known]
    columns += [column for column in known.values() if column not in columns]
    reach = max(
        [abs(end) for row in rows for end in (row.difference_low, row.difference_high) if end] or [1.0]
    )
    found = []
    for _, members in itertools.groupby(rows, key=lambda row: row.group):
        block = list(members)
        first = block[0]
        lines = [_line(row, columns, reach, with_flips) for row in block]
        found.append(
            Section(
                heading_of(first),
                first.model,
                first.task,
                first.shots_label,
                first.score,
                columns,
                lines,
            )
        )
    return found


def average_sections(entries: Sequence[Average]) -> list[dict[str, Any]]:
    """Heading, columns and lines of each table of averages."""
    columns = known_columns(AVERAGE_COLUMNS, entries)
    return [
        {
            "heading": heading,
            "columns": columns,
            "lines": [[Cell(c.cell(e), _sort(c, e), c.to_right) for c in columns] for e in group],
        }
        for heading, group in itertools.groupby(entries, key=tasks_averaged)
    ]


def filters(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Name, label and choices of each filter."""
    protocols = {row.protocol for row in rows if not row.is_full}
    budgets = sorted({row.budget for row in rows if row.budget is not None}, key=budget_order)
    choices = {
        "model": sorted({row.model for row in rows}),
        "task": sorted({row.task for row in rows}),
        "shots": sorted({row.shots_label for row in rows}, key=lambda text: (len(text), text)),
        "protocol": sorted(protocols, key=_protocol_order),
        "budget": budgets,
        "strategy": sorted({row.label for row in rows if not row.is_full}),
    }
    return [{"name": name, "label": name.capitalize(), "choices": found} for name, found in choices.items()]


def explanation(rows: Sequence[Row]) -> list[str]:
    """What the columns mean, as in the Markdown leaderboard, in pieces of text and code."""
    text = EXPLANATION
    if any(row.moved_bytes_per_token is not None for row in rows):
        text += SELECTION_EXPLANATION
    if any(row.kl is not None for row in rows):
        text += FIDELITY_EXPLANATION
    if any(row.graded is not None for row in rows):
        text += GRADED_EXPLANATION
    # Text and `code` alternate; the template marks every second piece.
    return " ".join(text.split()).split("`")


def _line(row: Row, columns: Sequence[Column], reach: float, with_flips: set[str]) -> Line:
    return Line(
        cells=[_cell(row, column, reach, with_flips) for column in columns],
        cell_id=row.cell_id,
        label=row.label,
        strategy=row.strategy,
        protocol=row.protocol,
        protocol_order=_protocol_order(row.protocol),
        budget=row.budget or "",
        is_full=row.is_full,
        style=_style(row),
    )


def _cell(row: Row, column: Column, reach: float, with_flips: set[str]) -> Cell:
    text = column.cell(row)
    if column.title == "notes":
        return Cell(text, None, False, is_note=True)
    link = None if column.title in _NAMES else f"#{row.cell_id}"
    if column.title == "flips" and row.cell_id in with_flips:
        link = f"#flips-{row.cell_id}"
    bar = _bar(row, reach) if column.title == "difference" else None
    return Cell(text, _sort(column, row), column.to_right, link, bar)


def _bar(row: Row, reach: float) -> dict[str, float] | None:
    """The interval on a scale that all rows share, 0 in the middle."""
    if row.difference is None or row.unit != "points":
        return None

    def place(value: float) -> float:
        return round(_BAR_WIDTH / 2 * (1 + max(-1.0, min(1.0, value / reach))), 1)

    return {"low": place(row.difference_low), "high": place(row.difference_high), "at": place(row.difference)}


def _style(row: Row) -> str:
    if row.is_full:
        return "full"
    if row.why_no_difference == DID_NOT_ACT:
        return "idle"
    if row.difference is None or row.spans_zero:
        return ""
    return "moved"


def _sort(column: Column, entry: Row | Average) -> float | None:
    text = column.cell(entry)
    if column.title == "budget" and entry.budget is not None:
        kind, negated, _ = budget_order(entry.budget)
        # Shares before counts of entries, each from small to large.
        return -negated if kind == 1 else 1e6 - negated
    unit = re.search(r"\b(B|KiB|MiB|GiB)$", text)
    if unit:
        return round(float(text.split()[0]) * _UNITS[unit.group()], 1)
    return None


def _protocol_order(protocol: str) -> int:
    return PROTOCOLS.index(protocol) if protocol in PROTOCOLS else -1
