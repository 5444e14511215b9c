"""Results: one folder per cell, written once, atomically, and checked when read.

A cell's folder is named by its ``cell_id`` and holds two files:

``cell.json``
    what was run and what came out (:class:`Cell`), with a checksum of itself and
    of the other file;
``samples.parquet``
    one row per request (:data:`SAMPLE_COLUMNS`, and ``metric_<name>`` columns that
    repeat the document's value on each of its requests).

Files are the truth, never a shared database: writers of different cells share no
file, a retry is harmless, and merging two runs is copying folders. A folder appears
under its final name only when complete, so a run killed at any time leaves at most
a ``.writing-*`` folder, which the next writer removes.
"""

from kvacc.results.cell import (
    Cell,
    CellResult,
    CurveRecord,
    EnvironmentRecord,
    FidelityRecord,
    MeasuredRecord,
    PositionRecord,
    Score,
    SpecRecord,
    StrategyRecord,
    TaskRecord,
    TimingRecord,
)
from kvacc.results.layout import (
    CELL_FILE,
    METRIC_PREFIX,
    SAMPLE_COLUMNS,
    SAMPLES_FILE,
    SCHEMA_VERSION,
    WHERE,
)
from kvacc.results.reading import conflict_of, find_cell, find_folders, read_cell, read_cells
from kvacc.results.samples import samples_table
from kvacc.results.writing import copy_cell, exclusive, remove_leftovers, temporary_name, write_cell

__all__ = [
    "CELL_FILE",
    "METRIC_PREFIX",
    "SAMPLES_FILE",
    "SAMPLE_COLUMNS",
    "SCHEMA_VERSION",
    "WHERE",
    "Cell",
    "CellResult",
    "CurveRecord",
    "EnvironmentRecord",
    "FidelityRecord",
    "MeasuredRecord",
    "PositionRecord",
    "Score",
    "SpecRecord",
    "StrategyRecord",
    "TaskRecord",
    "TimingRecord",
    "conflict_of",
    "copy_cell",
    "exclusive",
    "find_cell",
    "find_folders",
    "read_cell",
    "read_cells",
    "remove_leftovers",
    "samples_table",
    "temporary_name",
    "write_cell",
]
