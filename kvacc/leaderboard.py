"""The leaderboard as people and programs read it: terminal table, Markdown, CSV, JSON.

    rows = build(read_cells(["results/quickstart"]))
    console.print(render_table(rows))
    write(rows, "leaderboard/quickstart")

The same rows give the same bytes: nothing here knows the time or the machine.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvacc.files import write_whole
from kvacc.leaderboard_rows import (
    DID_NOT_ACT,
    NOT_SIGNIFICANT,
    Average,
    Row,
    averages,
    build,
    option_words,
)
from kvacc.records import as_bytes
from kvacc.shots import shots_text

if TYPE_CHECKING:
    from rich.table import Table


__all__ = ["Average", "Row", "averages", "build", "render_table", "to_csv", "to_json", "to_markdown", "write"]

NO_VALUE = "-"
FILES = ("leaderboard.md", "leaderboard.csv", "leaderboard.json")
_GAPS = (2, 1)
"""Blanks between columns: the first that fits."""

EXPLANATION = """\
Scores are in percent with their standard error. `difference` is the score minus the full cache's \
on the same items, in points, with a 95 % interval; `ns` marks an interval that spans 0, `-` a row \
that cannot be compared. `flips` counts items lost / gained. `kept` is the measured share of KV \
entries visible to a query, `sparsity` the rest; `acted` is the share of items on which the strategy \
hid an entry; `out of reach` is the share of scored tokens predicted before any compression. `rank` \
orders rows of one budget and protocol that keep equally much; other rows are not ranked. \
`can show` is the smallest true drop, in points, that so many items would show in 4 of 5 runs: of \
smaller ones a row says nothing. `p (Holm)` is the p-value of "no difference" adjusted for the number \
of rows compared; exact, and by whole clusters where items share a text.
"""
SELECTION_EXPLANATION = """\
Rows of strategies that select what each query reads from a cache in host memory: `moved/token` is \
what was brought from there for each scored token, `mass` the share of the true attention that falls \
on what was read, `recall` the share of the true top entries that were read, both over the layers \
that select. Layers that read everything count in `kept`.
"""
FIDELITY_EXPLANATION = """\
`KL` is the divergence of the strategy's next-token distributions from the full cache's, in nats per \
scored token (0: the same distributions); `agreement` is the share of scored tokens where both find \
the same token most likely. `mass` is then known of every strategy: the share of the attention that a \
query would have paid to all earlier tokens which falls on what it could read.
"""
GRADED_EXPLANATION = """\
Rows of retention tasks: `graded` counts parts of an answer, so that it still tells strategies apart \
where every whole answer is wrong. Of multiple choice it is the probability of the right option among \
the options (by chance as for the score), of a generated answer the share of its digits, words or \
needles. The average over the retention tasks is the retention score.
"""


class Column(NamedTuple):
    """One column of the tables."""

    title: str
    cell: Callable[[Any], str]
    """What it shows of a :class:`Row` or :class:`Average`."""
    to_right: bool = True
    known: Callable[[Any], bool] = lambda entry: True
    """A column of which no row is known is left out."""


def render_table(rows: Sequence[Row], width: int | None = None) -> Table:
    """A terminal table: one block per model, task and shots, then averages and a legend.

    Args:
        rows: from :func:`build`.
        width: columns of the terminal, by default the present one's. Where it is too
            narrow, sparsity, out of reach, mass, recall, agreement, flips, rank, acted and moved/token are
            left out, in this order.
    """
    import rich
    from rich.table import Table
    from rich.text import Text

    width = width or rich.get_console().width
    marks = _marks(rows)
    columns, gap = _fitting_columns(rows, marks, width)
    widths = [_natural_width(column, rows) for column in columns]
    # What is still too wide is taken from the strategy's name, the only column that folds.
    widths[0] -= max(0, sum(widths) + gap * (len(widths) - 1) - width)
    widths[0] = max(widths[0], len(columns[0].title))
    page = Table.grid(padding=0)
    page.add_column(overflow="fold")
    for _, members in itertools.groupby(rows, key=lambda row: row.group):
        block = list(members)
        page.add_row(Text(heading_of(block[0]), style="bold"))
        page.add_row(_block_table(block, columns, widths, gap))
        page.add_row("")
    for heading, members in itertools.groupby(averages(rows), key=tasks_averaged):
        group = list(members)
        score = "retention score: " if group[0].kind == "retention" else ""
        page.add_row(Text(f"{score}average of {heading}", style="bold"))
        page.add_row(_averages_table(group, gap))
        page.add_row("")
    for note, mark in marks.items():
        page.add_row(Text(f"{mark}: {note}", style="dim"))
    return page


def write(rows: Sequence[Row], folder: str | Path) -> list[Path]:
    """Write leaderboard.md, .csv and .json; each file is replaced in one step.

    Returns:
        The files.

    Raises:
        KvaccError: the folder cannot be written.
    """
    folder = Path(folder)
    texts = (to_markdown(rows), to_csv(rows), to_json(rows))
    return [
        write_whole(folder / name, text, mend="choose another folder")
        for name, text in zip(FILES, texts, strict=True)
    ]


def to_markdown(rows: Sequence[Row]) -> str:
    """The whole leaderboard as Markdown, every column and note in words."""
    lines = ["# Leaderboard", "", EXPLANATION]
    if any(row.moved_bytes_per_token is not None for row in rows):
        lines.append(SELECTION_EXPLANATION)
    if any(row.kl is not None for row in rows):
        lines.append(FIDELITY_EXPLANATION)
    if any(row.graded is not None for row in rows):
        lines.append(GRADED_EXPLANATION)
    notes = Column("notes", lambda row: "; ".join(row.notes) or NO_VALUE, to_right=False)
    columns = [*known_columns((*COLUMNS, *_MARKDOWN_COLUMNS), rows), notes]
    for _, members in itertools.groupby(rows, key=lambda row: row.group):
        block = list(members)
        lines += [f"## {_escaped(heading_of(block[0]))}", ""]
        lines += _markdown_table(columns, block)
        lines.append("")
    entries = averages(rows)
    if entries:
        lines += ["## Averages over tasks, each counting once", ""]
        lines += _markdown_table(
            [Column("tasks", tasks_averaged, to_right=False), *known_columns(AVERAGE_COLUMNS, entries)],
            entries,
        )
        lines.append("")
    lines += ["## Strategies as run", ""]
    lines += [f"* `{text}`" for text in sorted({row.strategy_repr for row in rows})]
    return "\n".join(lines) + "\n"


def to_csv(rows: Sequence[Row]) -> str:
    """One line per row, every field of :class:`Row`; options as JSON, notes joined by semicolons."""
    output = io.StringIO()
    writer = csv.DictWriter(output, fieldnames=list(Row.model_fields), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        values = row.model_dump(mode="json")
        for name in ("options", "task_options"):
            values[name] = json.dumps(values[name], sort_keys=True)
        values["notes"] = "; ".join(row.notes)
        writer.writerow(values)
    return output.getvalue()


def to_json(rows: Sequence[Row]) -> str:
    """``{"schema_version", "rows", "averages"}``, every field of :class:`Row` and :class:`Average`."""
    content = {
        "schema_version": 1,
        "rows": [row.model_dump(mode="json") for row in rows],
        "averages": [entry.model_dump(mode="json") for entry in averages(rows)],
    }
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share in (0, 1) else f"{100 * share:.1f}%"


def _score(row: Row) -> str:
    digits = 1 if row.scale == 100 else 3
    value = f"{row.scale * row.score:.{digits}f}"
    return value if row.stderr is None else f"{value} ± {row.scale * row.stderr:.{digits}f}"


def _difference(row: Row) -> str:
    if row.difference is None:
        return "baseline" if row.is_full else NO_VALUE
    return _interval(row.difference, row.difference_low, row.difference_high, 1 if row.scale == 100 else 3)


def _interval(value: float, low: float, high: float, digits: int = 1) -> str:
    """``-2.1 [-4.0, -0.3]``, with `` ns`` when it spans 0."""
    ends = f"{value:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
    return f"{ends} ns" if low <= 0 <= high else ends


def _detectable(row: Row) -> str:
    if row.detectable_drop is None:
        return NO_VALUE
    return f"{row.detectable_drop:.{1 if row.scale == 100 else 3}f}"


def _flips(row: Row) -> str:
    return NO_VALUE if row.flips_lost is None else f"{row.flips_lost}/{row.flips_gained}"


def _acted(row: Row) -> str:
    return NO_VALUE if row.is_full else _percent(row.acted_share)


def _measured(title: str, field: str, text: Callable[[float], str] = _percent) -> Column:
    """A column of a field that may be null."""

    def cell(entry: Row | Average) -> str:
        value = getattr(entry, field)
        return NO_VALUE if value is None else text(value)

    return Column(title, cell, known=lambda entry: getattr(entry, field) is not None)


_MOVED = _measured("moved/token", "moved_bytes_per_token", as_bytes)
COLUMNS = (
    Column("strategy", lambda row: row.label, to_right=False),
    Column("budget", lambda row: row.budget or NO_VALUE),
    Column("protocol", lambda row: row.protocol, to_right=False),
    Column("score", _score),
    Column("difference", _difference),
    _measured("graded", "graded", lambda share: f"{100 * share:.1f}"),
    Column("flips", _flips),
    Column("kept", lambda row: _percent(row.kept_fraction)),
    Column("sparsity", lambda row: _percent(row.sparsity)),
    _MOVED,
    _measured("mass", "attention_mass"),
    _measured("recall", "recall"),
    _measured("KL", "kl", lambda nats: f"{nats:.3g}"),
    _measured("agreement", "agreement"),
    Column("acted", _acted),
    Column("out of reach", lambda row: _percent(row.unreachable_share)),
    Column("rank", lambda row: NO_VALUE if row.rank is None else str(row.rank)),
)
# The terminal has no room for them.
_MARKDOWN_COLUMNS = (
    Column(
        "can show",
        _detectable,
        known=lambda row: row.detectable_drop is not None,
    ),
    _measured("p (Holm)", "p_holm", lambda p: f"{p:.2g}"),
)
# From the least needed on; partial acting has a note, and ranks follow from the order.
_DROPPED_FIRST = (
    "sparsity", "out of reach", "mass", "recall", "agreement", "flips", "rank", "acted", _MOVED.title,
)  # fmt: skip


def known_columns(columns: Sequence[Column], entries: Sequence[Row | Average]) -> list[Column]:
    """Those of ``columns`` of which at least one entry knows a value."""
    return [column for column in columns if any(map(column.known, entries))]


def _fitting_columns(rows: Sequence[Row], marks: dict[str, str], width: int) -> tuple[list[Column], int]:
    """The columns that fit, and the blanks between them."""
    columns = [
        *known_columns(COLUMNS, rows),
        Column("note", lambda row: _marks_of(row, marks), to_right=False),
    ]
    if not any(row.unreachable_share for row in rows):
        columns = [column for column in columns if column.title != "out of reach"]
    for title in (None, *_DROPPED_FIRST):
        columns = [column for column in columns if column.title != title]
        for gap in _GAPS:
            if sum(_natural_width(column, rows) + gap for column in columns) - gap <= width:
                return columns, gap
    return columns, _GAPS[-1]


def _natural_width(column: Column, rows: Sequence[Row]) -> int:
    return max([len(column.title), *(len(column.cell(row)) for row in rows)])


def _block_table(block: list[Row], columns: list[Column], widths: list[int], gap: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")
    for column, width in zip(columns, widths, strict=True):
        table.add_column(
            column.title, justify="right" if column.to_right else "left", width=width, overflow="fold"
        )
    for row in block:
        table.add_row(
            *(Text(column.cell(row)) for column in columns),
            style="dim" if row.why_no_difference == DID_NOT_ACT else None,
        )
    return table


def _marks(rows: Sequence[Row]) -> dict[str, str]:
    """A short mark per note: a, b, ... z, aa; ``ns`` stands beside the interval already."""
    notes = dict.fromkeys(note for row in rows for note in row.notes if note != NOT_SIGNIFICANT)
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = ("".join(name) for size in (1, 2, 3) for name in itertools.product(letters, repeat=size))
    return dict(zip(notes, names, strict=False))


def _marks_of(row: Row, marks: dict[str, str]) -> str:
    between = "" if all(len(mark) == 1 for mark in marks.values()) else " "
    return between.join(marks[note] for note in row.notes if note in marks)


def heading_of(row: Row) -> str:
    """What all rows of a table share: model, task, shots, items, metric, chance and source."""
    kind = "smoke test, " if row.kind == "smoke" else ""
    chance = "unknown" if row.chance is None else f"{row.scale * row.chance:.1f}"
    return (
        f"{row.model} ({row.dtype}), {row.task_label}, {row.shots_label}: {kind}{row.items} items, "
        f"{row.metric}, chance {chance}, data: {row.source}"
    )


def tasks_averaged(entry: Average) -> str:
    """Model, shots and tasks of an average, and on which of them ``full`` is at chance."""
    shots = shots_text(entry.shots, entry.fewshot_sampler)
    kind = "smoke-test" if entry.kind == "smoke" else entry.kind
    chance = f" (full at chance on {', '.join(entry.tasks_at_chance)})" if entry.tasks_at_chance else ""
    options = "".join(f" {words}" for words in option_words(entry.task_options))
    count = f"{len(entry.tasks)} {kind} tasks{options}"
    return f"{entry.model} ({entry.dtype}), {shots}, {count}: {', '.join(entry.tasks)}{chance}"


def _average_difference(entry: Average) -> str:
    if entry.why_none is not None:
        return f"{NO_VALUE} ({entry.why_none})"
    if entry.difference is None:
        return "baseline" if entry.is_full else NO_VALUE
    return _interval(entry.difference, entry.difference_low, entry.difference_high)


AVERAGE_COLUMNS = (
    Column("strategy", lambda entry: entry.label, to_right=False),
    Column("budget", lambda entry: entry.budget or NO_VALUE),
    Column("protocol", lambda entry: entry.protocol, to_right=False),
    Column("score", lambda entry: NO_VALUE if entry.score is None else f"{entry.score:.1f}"),
    Column("difference", _average_difference),
    _measured("graded", "graded", lambda percent: f"{percent:.1f}"),
    _measured("kept", "kept_fraction"),
    _MOVED,
)


def _averages_table(entries: list[Average], gap: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")
    columns = known_columns(AVERAGE_COLUMNS, entries)
    for column in columns:
        table.add_column(column.title, justify="right" if column.to_right else "left", overflow="fold")
    for entry in entries:
        table.add_row(*(Text(column.cell(entry)) for column in columns))
    return table


def _markdown_table(columns: Sequence[Column], entries: Sequence[Row | Average]) -> list[str]:
    titles = [column.title for column in columns]
    rule = ["--:" if column.to_right else ":--" for column in columns]
    lines = [[column.cell(entry) for column in columns] for entry in entries]
    return ["| " + " | ".join(_escaped(cell) for cell in line) + " |" for line in (titles, rule, *lines)]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
