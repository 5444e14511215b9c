"""Cells as rows: every scalar of cell.json in a column of its own.

The columns follow the fields of :class:`kvacc.results.Cell`, so a field that is added
there has its column here without a change. Lists and dictionaries (options of a
strategy, models as asked for) become JSON text with sorted keys.
"""

from __future__ import annotations

import functools
import json
import types
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from kvacc.results import (
    Cell,
    EnvironmentRecord,
    MeasuredRecord,
    SpecRecord,
    StrategyRecord,
    TaskRecord,
    TimingRecord,
)

if TYPE_CHECKING:
    import pyarrow

_TYPES = {bool: "bool", int: "int64", float: "float64", str: "string"}
# SQL's own words, or names that say nothing without the record around them.
_RENAMED = {
    ("spec", "limit"): "item_limit",
    ("task", "version"): "task_version",
    ("task", "num_items"): "items",
    ("task", "primary_metric"): "metric",
    ("strategy", "repr"): "strategy_repr",
    ("fidelity", "tokens"): "fidelity_tokens",
}
# Said by another column: the model in parts, the task's name and its metrics (table scores).
_LEFT_OUT = {("spec", "model"), ("task", "name"), ("task", "metrics")}
MACHINE_COLUMNS = ("folder",)
"""Columns that say where the results lie on this machine: never exported."""


def cells_table(cells: Sequence[Cell]) -> pyarrow.Table:
    """One row per cell: what was asked for, the primary score, what was measured, environment and time.

    ``options`` and other nested values are JSON text; ``warning_count`` counts the
    ``warnings``, which are joined by ``"; "``; ``folder`` is where the cell was read.
    """
    import pyarrow

    kinds = cell_columns()
    rows = [_row(cell) for cell in cells]
    return pyarrow.table(
        {
            name: pyarrow.array([row.get(name) for row in rows], type=pyarrow.type_for_alias(kind))
            for name, kind in kinds.items()
        }
    )


def scores_table(cells: Sequence[Cell]) -> pyarrow.Table:
    """One row per cell and metric: ``cell_id``, ``metric``, ``value``, ``stderr``."""
    import pyarrow

    rows = [
        (cell.cell_id, metric, score.value, score.stderr)
        for cell in cells
        for metric, score in sorted(cell.scores.items())
    ]
    kinds = {"cell_id": "string", "metric": "string", "value": "float64", "stderr": "float64"}
    return pyarrow.table(
        {
            name: pyarrow.array([row[index] for row in rows], type=pyarrow.type_for_alias(kind))
            for index, (name, kind) in enumerate(kinds.items())
        }
    )


def cell_columns() -> dict[str, str]:
    """Columns of :func:`cells_table`, in order, with their Arrow types."""
    columns = {"cell_id": "string", "model": "string", "revision": "string", "dtype": "string"}
    for name, record in _records().items():
        if name == "measured":
            columns |= {"score": "float64", "stderr": "float64"}
        for field, info in record.model_fields.items():
            if (name, field) not in _LEFT_OUT:
                columns.setdefault(_RENAMED.get((name, field), field), _kind(info.annotation))
    return columns | {
        "warning_count": "int64",
        "warnings": "string",
        "samples_sha256": "string",
        "folder": "string",
    }


@functools.cache
def _records() -> dict[str, type[BaseModel]]:
    """The parts of a cell, in the order of the columns; optional parts, such as fidelity, included."""
    known: dict[str, type[BaseModel]] = {
        "spec": SpecRecord,
        "task": TaskRecord,
        "measured": MeasuredRecord,
        "strategy": StrategyRecord,
        "environment": EnvironmentRecord,
        "timing": TimingRecord,
    }
    for name, info in Cell.model_fields.items():
        for part in _alternatives(info.annotation):
            if name not in known and isinstance(part, type) and issubclass(part, BaseModel):
                known[name] = part
    return known


def _row(cell: Cell) -> dict[str, Any]:
    asked = cell.spec.model
    row: dict[str, Any] = {
        "cell_id": cell.cell_id,
        "model": str(cell.model.get("name") or asked.get("pretrained") or ""),
        "revision": _text(cell.model.get("revision") or asked.get("revision")),
        "dtype": str(cell.model.get("dtype") or asked.get("dtype") or "").removeprefix("torch."),
        "warning_count": len(cell.warnings),
        "warnings": "; ".join(cell.warnings),
        "samples_sha256": cell.samples_sha256,
        "folder": None if cell.folder is None else str(cell.folder),
    }
    score = cell.scores[cell.task.primary_metric]
    row |= {"score": score.value, "stderr": score.stderr}
    for name, record in _records().items():
        part = getattr(cell, name)
        if part is None:
            continue
        for field, info in record.model_fields.items():
            column = _RENAMED.get((name, field), field)
            if (name, field) not in _LEFT_OUT and column not in row:
                value = getattr(part, field)
                row[column] = _text(value) if _kind(info.annotation) == "string" else value
    return row


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    return json.dumps(plain, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def _kind(annotation: Any) -> str:
    """The Arrow type of a field: text for anything that is no single number, truth value or text."""
    kinds = {_TYPES.get(part, "string") for part in _alternatives(annotation) if part is not type(None)}
    if kinds == {"int64", "float64"}:
        return "float64"
    return kinds.pop() if len(kinds) == 1 else "string"


def _alternatives(annotation: Any) -> list[Any]:
    """``Annotated[float, ...] | None`` is ``[float, NoneType]``."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [part for choice in typing.get_args(annotation) for part in _alternatives(choice)]
    return [annotation]
