"""Results as files for other programs and for papers: CSV, JSON, Markdown, LaTeX.

The same results give the same bytes: rows are sorted by cell, document and option,
numbers are written the shortest way that reads back equal (CSV, JSON) or with a fixed
number of digits (Markdown, LaTeX), and nothing says where the results lie.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvacc.errors import unknown
from kvacc.files import write_whole
from kvacc.shots import DEFAULT_SAMPLER
from kvacc.store.tables import MACHINE_COLUMNS

if TYPE_CHECKING:
    import pyarrow

FORMATS = ("csv", "json", "markdown", "latex")
READABLE_COLUMNS = {
    "cells": (
        "model", "task", "shots", "fewshot_sampler", "strategy", "budget", "protocol", "items", "metric",
        "score", "stderr", "kept_fraction", "acted_share", "cell_id",
    ),
    "samples": ("cell_id", "doc_id", "option", "loglikelihood", "kept_fraction", "acted"),
    "documents": ("cell_id", "doc_id", "value", "requests", "kept_fraction", "acted"),
    "scores": ("cell_id", "metric", "value", "stderr"),
}  # fmt: skip
"""Columns of Markdown and LaTeX tables, unless others are asked for."""
_DIGITS = 4
_CHUNK = 50_000
_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_",
    "%": r"\%", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}", "\n": " ", "\r": " ",
}  # fmt: skip


def choose_columns(
    table: pyarrow.Table, what: str, format: str, columns: Sequence[str] | None = None
) -> pyarrow.Table:
    """The columns to export: those asked for, else all (CSV, JSON) or the readable ones.

    Raises:
        KvaccError: a column that there is not.
    """
    known = [name for name in table.column_names if name not in MACHINE_COLUMNS]
    for name in columns or ():
        if name not in known:
            raise unknown("column", name, known)
    if columns:
        return table.select(list(columns))
    if format in ("csv", "json"):
        return table.select(known)
    readable = [name for name in READABLE_COLUMNS.get(what, known) if name in known]
    return table.select([name for name in readable if not _says_nothing(table, name)])


def _says_nothing(table: pyarrow.Table, name: str) -> bool:
    """True for a column of which a reader expects what it says: examples chosen as lm-eval does."""
    return name == "fewshot_sampler" and set(table[name].to_pylist()) <= {DEFAULT_SAMPLER}


def as_text(table: pyarrow.Table, format: str) -> Iterator[str]:
    """A table in one of :data:`FORMATS`, in pieces."""
    writers: dict[str, Callable[[pyarrow.Table], Iterator[str]]] = {
        "csv": _csv,
        "json": _json,
        "markdown": _markdown,
        "latex": _latex,
    }
    if format not in writers:
        raise unknown("format", format, FORMATS)
    return writers[format](table)


def write_text(pieces: Iterator[str], path: str | Path) -> Path:
    """Write a file in one step: it has all of the text, or is as it was before.

    Raises:
        KvaccError: the file cannot be written.
    """
    return write_whole(path, pieces, mend="choose another --output")


def _rows(table: pyarrow.Table) -> Iterator[list[Any]]:
    """Rows as lists, a piece of the table at a time."""
    for start in range(0, table.num_rows, _CHUNK):
        piece = table.slice(start, _CHUNK)
        yield from zip(*(column.to_pylist() for column in piece.columns), strict=True)


def _csv(table: pyarrow.Table) -> Iterator[str]:
    import csv
    import io

    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(table.column_names)
    for number, row in enumerate(_rows(table)):
        writer.writerow([_csv_value(value) for value in row])
        if number % _CHUNK == 0:
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()


def _csv_value(value: Any) -> Any:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else value


def _json(table: pyarrow.Table) -> Iterator[str]:
    """A list of objects, one a line. JSON has no infinity: the logarithm of 0 is the text "-inf"."""
    yield "["
    for number, row in enumerate(_rows(table)):
        values = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in zip(table.column_names, row, strict=True)
        }
        text = json.dumps(values, ensure_ascii=False, allow_nan=False, default=str)
        yield (",\n" if number else "\n") + text
    yield "\n]\n" if table.num_rows else "]\n"


def _markdown(table: pyarrow.Table) -> Iterator[str]:
    yield "| " + " | ".join(map(_markdown_text, table.column_names)) + " |\n"
    yield "| " + " | ".join("--:" if right else ":--" for right in _to_right(table)) + " |\n"
    for row in _rows(table):
        yield "| " + " | ".join(_markdown_text(_shown(value, "-")) for value in row) + " |\n"


def _markdown_text(text: str) -> str:
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").split())


def _latex(table: pyarrow.Table) -> Iterator[str]:
    alignment = "".join("r" if right else "l" for right in _to_right(table))
    yield "% needs \\usepackage{booktabs} and \\usepackage[T1]{fontenc}\n"
    yield f"\\begin{{tabular}}{{{alignment}}}\n\\toprule\n"
    yield (
        " & ".join(_latex_text(name.replace("_", " ")) for name in table.column_names) + " \\\\\n\\midrule\n"
    )
    for row in _rows(table):
        yield " & ".join(_latex_text(_shown(value, "--")) for value in row) + " \\\\\n"
    yield "\\bottomrule\n\\end{tabular}\n"


def _latex_text(text: str) -> str:
    # A hyphen would be set as one: a negative number needs a minus sign.
    sign, number = ("$-$", text[1:]) if text[:1] == "-" and text[1:2].isdigit() else ("", text)
    return sign + "".join(_LATEX.get(letter, letter) for letter in number)


def _to_right(table: pyarrow.Table) -> list[bool]:
    import pyarrow

    numeric = (pyarrow.types.is_floating, pyarrow.types.is_integer)
    return [any(test(column.type) for test in numeric) for column in table.columns]


def _shown(value: Any, nothing: str) -> str:
    if value is None:
        return nothing
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.{_DIGITS}f}" if isinstance(value, float) else str(value)
