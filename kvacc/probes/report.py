"""Probe results as people and programs read them: terminal table, Markdown, CSV, JSON."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from kvacc.config import BASELINE
from kvacc.leaderboard import Column, known_columns
from kvacc.probes.cases import case_label, model_label
from kvacc.probes.config import OWN_KERNEL
from kvacc.probes.records import CapacityRecord, ProbeCase
from kvacc.probes.rows import ProbeRow
from kvacc.records import as_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

NO_VALUE = "-"
FORMATS = ("table", "json", "markdown", "csv")
EXPLANATION = """\
Times are milliseconds of the step path, medians with a 95 % interval by bootstrap over runs; \
`p95` and `p99` are over all tokens of all runs. `x full` is the time over that of the full cache \
under kvacc's kernel and the same prefill chunk, paired by run and timed in turns with it; `ns` \
marks an interval that spans 1. `KV` is keys and values after the prompt, `share` those on the \
device over the full cache's; `summaries` are what a selection is chosen by, on the device too. \
Peaks are the most bytes live while the prompt was read, and while tokens were made, weights \
included. `moved/token` is what was brought from host memory for each token and row, `ahead` the \
share of it that was brought before its layer ran, `exposed` the milliseconds per token that \
computation waited for copies, and `hidden` those of copying beside it.
"""


def _milliseconds(seconds: float) -> str:
    """Three digits or more."""
    milliseconds = 1000 * seconds
    return f"{milliseconds:.{0 if milliseconds >= 99.95 else 1 if milliseconds >= 9.995 else 2}f}"


def _value(title: str, field: str, text: Callable[[float], str], to_right: bool = True) -> Column:
    def cell(row: ProbeRow) -> str:
        value = getattr(row, field)
        return NO_VALUE if value is None else text(value)

    return Column(title, cell, to_right, lambda row: getattr(row, field) is not None)


def _interval(title: str, field: str) -> Column:
    """``12.3 [12.1, 12.9]`` milliseconds."""

    def cell(row: ProbeRow) -> str:
        parts = [getattr(row, field + ending) for ending in ("", "_low", "_high")]
        if parts[0] is None:
            return NO_VALUE
        value, low, high = map(_milliseconds, parts)
        return f"{value} [{low}, {high}]"

    return Column(title, cell, known=lambda row: getattr(row, field) is not None)


def _ratio(title: str, field: str) -> Column:
    """``1.02 [0.98, 1.05] ns``"""

    def cell(row: ProbeRow) -> str:
        value, low, high = (getattr(row, field + ending) for ending in ("", "_low", "_high"))
        if value is None:
            return NO_VALUE
        return f"{value:.2f} [{low:.2f}, {high:.2f}]" + (" ns" if low <= 1 <= high else "")

    return Column(title, cell, known=lambda row: getattr(row, field) is not None)


def _nonzero_bytes(title: str, field: str) -> Column:
    """Bytes of what most strategies have none of."""

    def cell(row: ProbeRow) -> str:
        return as_bytes(getattr(row, field)) if getattr(row, field) else NO_VALUE

    return Column(title, cell, known=lambda row: bool(getattr(row, field)))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


_NAMES = (
    Column("strategy", lambda row: row.strategy, to_right=False),
    _value("budget", "budget", str),
    Column("protocol", lambda row: "any" if row.strategy == BASELINE else row.protocol, to_right=False),
    Column("kernel", lambda row: row.kernel, False, lambda row: row.kernel != OWN_KERNEL),
    _value("chunk", "prefill_chunk", str),
)
TIME_COLUMNS = (
    *_NAMES,
    _interval("first token", "first_token"),
    _ratio("x full", "first_token_ratio"),
    _interval("per token", "per_token"),
    _value("p95", "per_token_p95", _milliseconds),
    _value("p99", "per_token_p99", _milliseconds),
    _ratio("x full", "per_token_ratio"),
    _value("tokens/s", "tokens_per_second", lambda rate: f"{rate:.1f}"),
)
MEMORY_COLUMNS = (
    *_NAMES,
    _value("KV device", "kv_device", as_bytes),
    _value("share", "kv_share", _percent),
    _nonzero_bytes("KV host", "kv_host"),
    _nonzero_bytes("summaries", "summaries"),
    _value("prefill peak", "prefill_peak", as_bytes),
    _value("decode peak", "decode_peak", as_bytes),
    _value("moved/token", "bytes_to_device", as_bytes),
    _value("ahead", "prefetched_share", _percent),
    _value("exposed", "seconds_exposed", _milliseconds),
    _value("hidden", "seconds_hidden", _milliseconds),
)
CAPACITY_COLUMNS = (
    Column("model", lambda found: model_label(str(found.case.model.get("pretrained", "model"))), False),
    Column("case", lambda found: case_label(found.case), to_right=False),
    Column("searched", lambda found: found.searched.replace("_", " "), to_right=False),
    Column("at", lambda found: _other_size(found)),
    Column("limit", lambda found: "the device's" if found.limit is None else as_bytes(found.limit)),
    Column("fits", lambda found: f"{found.fits:,}"),
    Column("fails", lambda found: NO_VALUE if found.fails is None else f"{found.fails:,}"),
    Column("peak", lambda found: NO_VALUE if found.peak_of_fits is None else as_bytes(found.peak_of_fits)),
    Column("bound by", lambda found: found.bound_by, to_right=False),
)


def _other_size(found: CapacityRecord) -> str:
    return f"batch {found.case.batch}" if found.searched != "batch" else f"prompt {found.case.prompt_tokens}"


def render_table(rows: Sequence[ProbeRow], capacities: Sequence[CapacityRecord] = ()) -> RenderableType:
    """A terminal table: a block for each model, machine and sizes; what could not run below it."""
    from rich.table import Table
    from rich.text import Text

    page = Table.grid(padding=0)
    page.add_column(overflow="fold")
    for _, members in itertools.groupby(rows, key=lambda row: row.group):
        block = list(members)
        page.add_row(Text(heading_of(block[0]), style="bold"))
        for columns, ran in _tables(block):
            page.add_row(_terminal_table(columns, ran))
            page.add_row("")
        for line in _remarks(block):
            page.add_row(Text(line, style="dim"))
    if capacities:
        page.add_row(Text("the largest that fits", style="bold"))
        page.add_row(_terminal_table(CAPACITY_COLUMNS, capacities))
        page.add_row("")
    if any(row.first_token is not None for row in rows):
        page.add_row(Text("times in milliseconds, [95 % interval]; ns: the ratio's spans 1", style="dim"))
    return page


def to_markdown(rows: Sequence[ProbeRow], capacities: Sequence[CapacityRecord] = ()) -> str:
    """The same as Markdown, with every column explained."""
    lines = ["# Probes", "", EXPLANATION]
    for _, members in itertools.groupby(rows, key=lambda row: row.group):
        block = list(members)
        lines += [f"## {_escaped(heading_of(block[0]))}", ""]
        for columns, ran in _tables(block):
            lines += [*_markdown_table(columns, ran), ""]
        remarks = [f"* {_escaped(line)}" for line in _remarks(block)]
        lines += [*remarks, ""] if remarks else []
    if capacities:
        lines += ["## The largest that fits", "", *_markdown_table(CAPACITY_COLUMNS, capacities), ""]
    return "\n".join(lines).rstrip() + "\n"


def to_csv(rows: Sequence[ProbeRow]) -> str:
    """One line per case, every field of :class:`~kvacc.probes.rows.ProbeRow`; options as JSON."""
    return _csv(list(ProbeRow.model_fields), [row.model_dump(mode="json") for row in rows])


def capacities_to_csv(capacities: Sequence[CapacityRecord]) -> str:
    """One line per search: the case, and what fits; options and the model as JSON."""
    found = ("case_id", "searched", "limit", "fits", "fails", "peak_of_fits", "bound_by")
    lines = [
        {**record.case.model_dump(mode="json"), **{name: getattr(record, name) for name in found}}
        for record in capacities
    ]
    return _csv([*ProbeCase.model_fields, *found], lines)


def _csv(names: list[str], lines: Sequence[dict]) -> str:
    output = io.StringIO()
    writer = csv.DictWriter(output, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    for line in lines:
        plain = {
            name: json.dumps(value, sort_keys=True) if isinstance(value, dict) else value
            for name, value in line.items()
        }
        writer.writerow(plain)
    return output.getvalue()


def to_json(rows: Sequence[ProbeRow], capacities: Sequence[CapacityRecord] = ()) -> str:
    """``{"schema_version", "rows", "capacity"}``"""
    content = {
        "schema_version": 1,
        "rows": [row.model_dump(mode="json") for row in rows],
        "capacity": [found.model_dump(mode="json") for found in capacities],
    }
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def heading_of(row: ProbeRow) -> str:
    """What all rows of a table share."""
    return (
        f"{row.model} ({row.dtype}), prompt {row.prompt_tokens}, batch {row.batch}, output "
        f"{row.output_tokens}: {row.device}"
    )


def _tables(block: Sequence[ProbeRow]) -> list[tuple[list[Column], list[ProbeRow]]]:
    """Times, then bytes, each of the rows of which they are known."""
    timed = [row for row in block if row.first_token is not None]
    weighed = [row for row in block if row.kv_device is not None or row.bytes_to_device is not None]
    tables = ((TIME_COLUMNS, timed), (MEMORY_COLUMNS, weighed))
    return [(known_columns(columns, rows), rows) for columns, rows in tables if rows]


def _remarks(rows: Iterable[ProbeRow]) -> list[str]:
    failed = [f"{row.label} could not run: {row.failure}" for row in rows if row.failure]
    return failed + [f"{row.label}: {row.note}" for row in rows if row.note]


def _terminal_table(columns: Sequence[Column], entries: Sequence) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column.title, justify="right" if column.to_right else "left", overflow="fold")
    for entry in entries:
        table.add_row(*(Text(column.cell(entry)) for column in columns))
    return table


def _markdown_table(columns: Sequence[Column], entries: Sequence) -> list[str]:
    titles = [column.title for column in columns]
    rule = ["--:" if column.to_right else ":--" for column in columns]
    lines = [[column.cell(entry) for column in columns] for entry in entries]
    return ["| " + " | ".join(map(_escaped, line)) + " |" for line in (titles, rule, *lines)]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
