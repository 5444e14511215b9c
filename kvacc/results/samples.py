"""samples.parquet: one row per request, checked when written and when read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvacc.errors import KvaccError, one_line
from kvacc.records import FIDELITY, SELECTION
from kvacc.results.checksums import sha256_of_file
from kvacc.results.layout import CELL_FILE, METRIC_PREFIX, SAMPLE_COLUMNS, WHERE

if TYPE_CHECKING:
    import pyarrow


def samples_table(samples: Sequence[dict[str, Any]] | pyarrow.Table) -> pyarrow.Table:
    """Samples with every column of :data:`SAMPLE_COLUMNS`, typed, sorted by document and option.

    Those of :data:`kvacc.records.SELECTION`, :data:`kvacc.records.FIDELITY` and :data:`WHERE` may be
    missing, as in older files, and are null then.

    Raises:
        KvaccError: a column is missing, or a score is not a number (NaN).
    """
    import pyarrow

    table = samples if isinstance(samples, pyarrow.Table) else _table_of_dicts(samples)
    for name in (*SELECTION, *FIDELITY, *WHERE):
        if name not in table.column_names:
            kind = pyarrow.type_for_alias(SAMPLE_COLUMNS[name])
            table = table.append_column(name, pyarrow.nulls(len(table), kind))
    missing = [name for name in SAMPLE_COLUMNS if name not in table.column_names]
    if missing:
        raise KvaccError(f"samples lack the columns {', '.join(missing)}; every request must record them")
    metrics = sorted(name for name in table.column_names if name.startswith(METRIC_PREFIX))
    types = {**SAMPLE_COLUMNS, **dict.fromkeys(metrics, "float64")}
    extra = [name for name in table.column_names if name not in types]
    try:
        columns = {name: table[name].cast(pyarrow.type_for_alias(kind)) for name, kind in types.items()}
    except pyarrow.ArrowInvalid as error:
        raise KvaccError(f"samples have a value of the wrong type: {one_line(error)}") from None
    typed = pyarrow.table({**columns, **{name: table[name] for name in extra}})
    _refuse_nan(typed, ["loglikelihood", "kept_fraction", *SELECTION, *FIDELITY, *metrics], "samples")
    return typed.sort_by([("doc_id", "ascending"), ("option", "ascending")])


def _table_of_dicts(samples: Sequence[dict[str, Any]]) -> pyarrow.Table:
    import pyarrow

    names: dict[str, None] = {}
    for row in samples:
        names.update(dict.fromkeys(row))
    text = {name for name, kind in SAMPLE_COLUMNS.items() if kind == "string"}
    columns: dict[str, Any] = {}
    try:
        for name in names if samples else SAMPLE_COLUMNS:
            values = [row.get(name) for row in samples]
            if name in text:
                values = [None if value is None else str(value) for value in values]
            kind = "float64" if name.startswith(METRIC_PREFIX) else SAMPLE_COLUMNS.get(name)
            columns[name] = pyarrow.array(values, type=pyarrow.type_for_alias(kind) if kind else None)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
        raise KvaccError(f"samples column {name!r} has a wrong value: {one_line(error)}") from None
    return pyarrow.table(columns)


def _refuse_nan(table: pyarrow.Table, names: Iterable[str], what: str | Path) -> None:
    import pyarrow.compute

    for name in names:
        nan = pyarrow.compute.fill_null(pyarrow.compute.is_nan(table[name]), False).to_numpy()
        if nan.any():
            row = int(nan.argmax())
            raise KvaccError(
                f"{what}: {name} is NaN for document {table['doc_id'][row].as_py()}, "
                f"option {table['option'][row].as_py()}; the model's outputs overflowed: try dtype=float32"
            )


def verify_samples(path: Path, sha256: str) -> None:
    mend = f"delete the folder {path.parent} and run the same command again"
    try:
        found = sha256_of_file(path)
    except FileNotFoundError:
        raise KvaccError(f"{path} is missing; {mend}") from None
    except OSError as error:
        raise KvaccError(f"{path} cannot be read: {error.strerror}; mend its permissions") from None
    if found != sha256:
        raise KvaccError(f"{path} is truncated or was edited (its checksum differs from {CELL_FILE}); {mend}")


def read_samples(path: Path, sha256: str) -> pyarrow.Table:
    import pyarrow
    import pyarrow.parquet

    verify_samples(path, sha256)
    try:
        return samples_table(pyarrow.parquet.read_table(path))
    except (KvaccError, pyarrow.ArrowException) as error:
        # The checksum is right: it was written so, by something else than write_cell.
        raise KvaccError(f"{path}: {one_line(error)}; delete the folder {path.parent}") from None
