"""What is wrong with a folder of results, cell by cell.

Two steps, because they cost differently: :func:`examine` reads every cell.json and
the checksum of every file; :func:`examine_samples` looks into the samples, all cells
in a few queries. A checksum shows that a file is as it was written. That what was
written makes sense is another question: NaN, a document counted twice, or a score
that is not the average of its documents.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvacc.errors import KvaccError
from kvacc.results import (
    CELL_FILE,
    METRIC_PREFIX,
    SAMPLES_FILE,
    Cell,
    conflict_of,
    find_folders,
    read_cell,
)

if TYPE_CHECKING:
    from kvacc.store.database import Store

SCORE_NOISE = 1e-6
"""Largest difference between a score and its documents' average: sums in another order."""
RUN_FILE = "run.json"
REQUIRED_COLUMNS = (
    "doc_id", "doc_hash", "prompt_hash", "target_hash", "cluster", "option", "kind", "loglikelihood",
    "greedy", "response", "target", "kept_fraction", "acted", "prompt_tokens", "scored_tokens",
    "unreachable_tokens", "truncated_tokens", "budget_entries", "bos_tokens",
)  # fmt: skip
"""Columns that samples.parquet had from the first version on; those that came later may be missing."""


@dataclass(frozen=True)
class Damage:
    """One cell that must not be used."""

    folder: Path
    """The cell's folder."""
    message: str
    """What is wrong and how to mend it, in one line that names the file."""
    cell_id: str = ""
    """Empty where cell.json does not say."""


def examine(paths: Sequence[str | Path]) -> tuple[list[Cell], list[Damage]]:
    """Every sound cell below the given folders, each once and sorted, and what is damaged.

    Of a cell with different results in two folders neither is sound: nothing says which is right.

    Raises:
        KvaccError: a folder does not exist, or holds no cell at all.
    """
    if not paths:
        raise KvaccError("no results folder given; name one or more, such as results/quickstart")
    found: dict[str, Cell] = {}
    conflicts: dict[str, Damage] = {}
    damaged: list[Damage] = []
    for folder in find_folders(paths):
        try:
            cell = read_cell(folder)
            other = found.setdefault(cell.cell_id, cell)
            conflict = conflict_of(other, cell) if other is not cell else None
        except KvaccError as error:
            damaged.append(Damage(folder, str(error)))
            continue
        if conflict:
            conflicts[cell.cell_id] = Damage(folder, conflict, cell.cell_id)
    sound = [found[cell_id] for cell_id in sorted(found) if cell_id not in conflicts]
    return sound, [*damaged, *(conflicts[cell_id] for cell_id in sorted(conflicts))]


def examine_samples(store: Store) -> list[Damage]:
    """What is wrong inside the samples of cells whose checksums are right; the first fault of each cell."""
    unreadable = _unreadable(store.cells)
    faults = dict(unreadable)
    readable = [cell for cell in store.cells if cell.cell_id not in unreadable]
    if readable:
        inner = type(store)(readable) if unreadable else store
        for find in (_not_numbers, _double_rows, _wrong_counts, _wrong_scores):
            for cell_id, fault in find(inner):
                faults.setdefault(cell_id, fault)
    by_id = {cell.cell_id: cell for cell in store.cells}
    return [
        Damage(
            by_id[cell_id].folder,
            f"{by_id[cell_id].folder / SAMPLES_FILE}: {faults[cell_id]}; "
            f"delete the folder {by_id[cell_id].folder} and run the same command again",
            cell_id,
        )
        for cell_id in sorted(faults)
    ]


def _unreadable(cells: Iterable[Cell]) -> dict[str, str]:
    """Files that are no Parquet, or lack a column."""
    import pyarrow
    import pyarrow.parquet

    faults = {}
    for cell in cells:
        try:
            names = pyarrow.parquet.read_schema(cell.folder / SAMPLES_FILE).names
        except (pyarrow.ArrowException, OSError) as error:
            faults[cell.cell_id] = f"no Parquet file ({' '.join(str(error).split())})"
            continue
        missing = [name for name in REQUIRED_COLUMNS if name not in names]
        if missing:
            faults[cell.cell_id] = f"samples lack the columns {', '.join(missing)}"
    return faults


def _not_numbers(store: Store) -> Iterable[tuple[str, str]]:
    names = [name for name, kind in store.columns("samples").items() if kind in ("DOUBLE", "FLOAT")]
    if not names:
        return
    # Never WHERE isnan(...): DuckDB skips files by their smallest and largest values, which leave NaN out.
    counts = ", ".join(f"count(*) FILTER (isnan({_name(name)}))" for name in names)
    for cell_id, *numbers in store.fetch(f"SELECT cell_id, {counts} FROM samples GROUP BY cell_id"):
        for name, number in zip(names, numbers, strict=True):
            if number:
                rows = store.fetch(
                    f"SELECT doc_id, option, {_name(name)} FROM samples WHERE cell_id = ? ORDER BY 1, 2",
                    [cell_id],
                )
                document, option = next(row[:2] for row in rows if row[2] is not None and math.isnan(row[2]))
                yield cell_id, f"{name} is NaN for document {document}, option {option}"
                break


def _double_rows(store: Store) -> Iterable[tuple[str, str]]:
    query = """
        SELECT cell_id, doc_id, option FROM samples
        GROUP BY cell_id, doc_id, option HAVING count(*) > 1 ORDER BY ALL
    """
    for cell_id, document, option in store.fetch(query):
        yield cell_id, f"document {document}, option {option} is there more than once"


def _wrong_counts(store: Store) -> Iterable[tuple[str, str]]:
    query = """
        SELECT cell_id, items, coalesce(found, 0) FROM cells LEFT JOIN
            (SELECT cell_id, count(*) AS found FROM documents GROUP BY cell_id) USING (cell_id)
        WHERE items <> coalesce(found, 0)
    """
    for cell_id, items, found in store.fetch(query):
        yield cell_id, f"{found} documents where cell.json says {items}"


def _wrong_scores(store: Store) -> Iterable[tuple[str, str]]:
    """Scores that their documents contradict: a metric has a column only when it is their average."""
    metrics = [name for name in store.columns("documents") if name.startswith(METRIC_PREFIX)]
    if not metrics:
        return
    means = ", ".join(f"avg({_name(name)})" for name in metrics)
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    query = f"SELECT cell_id, {means} FROM documents GROUP BY cell_id"
    for cell_id, *values in store.fetch(query):
        found[cell_id] = dict(zip(metrics, values, strict=True))
    for cell in store.cells:
        for metric, score in cell.scores.items():
            mean = found[cell.cell_id].get(METRIC_PREFIX + metric)
            if mean is not None and not math.isclose(
                mean, score.value, rel_tol=SCORE_NOISE, abs_tol=SCORE_NOISE
            ):
                yield (
                    cell.cell_id,
                    f"the documents average {mean:g} in {metric}, but cell.json says {score.value:g}",
                )
                break


def examine_runs(paths: Iterable[str | Path], cells: Sequence[Cell]) -> tuple[list[str], list[str]]:
    """What the run files say about the cells: problems, and notes that are no problem.

    Problems: a damaged run.json, and cells of two versions of kvacc in one run's folder,
    which no sweep makes. Notes: cells that are still to run, and writers that have not finished.
    """
    problems: list[str] = []
    notes: list[str] = []
    for folder in run_folders(paths):
        inside = [cell for cell in cells if cell.folder and folder.resolve() in cell.folder.resolve().parents]
        try:
            content = read_run_file(folder)
        except KvaccError as error:
            problems.append(str(error))
            continue
        planned = {cell_id for run in content["runs"] for cell_id in run["cells"]}
        others = sorted({cell.environment.kvacc for cell in inside} - {content["kvacc"]})
        if others:
            odd = next(cell for cell in inside if cell.environment.kvacc == others[0])
            problems.append(
                f"{folder} mixes versions: run.json is of kvacc {content['kvacc']}, cell {odd.cell_id} of "
                f"{others[0]}; run each version into a folder of its own"
            )
        # A cell that two folders hold counts as one, which lies in the first of them.
        here = {cell.cell_id for cell in cells if any(folder.rglob(f"{cell.cell_id}/{CELL_FILE}"))}
        missing = len(planned - here)
        if missing:
            notes.append(
                f"{folder}: {missing} of {len(planned)} planned cells are not here (yet to run, or damaged)"
            )
        unplanned = len({cell.cell_id for cell in inside} - planned)
        if unplanned:
            notes.append(f"{folder}: {unplanned} cells are in no plan of its run.json")
        writing = len(list(folder.rglob(".writing-*")))
        if writing:
            notes.append(
                f"{folder}: {writing} cells are being written, or their writer was killed; "
                "the next run cleans up"
            )
    versions = sorted({cell.environment.kvacc for cell in cells})
    if len(versions) > 1:
        notes.append(f"cells of several kvacc versions: {', '.join(versions)}")
    return problems, notes


def run_folders(paths: Iterable[str | Path]) -> list[Path]:
    """Every folder at or below ``paths`` that has a run.json, and the parent of a ``cells`` folder."""
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        candidates = [path, path.parent] if path.name == "cells" else [path]
        found.update(dict.fromkeys(folder for folder in candidates if (folder / RUN_FILE).exists()))
        found.update(dict.fromkeys(sorted(file.parent for file in path.rglob(RUN_FILE))))
    return list(found)


def read_run_file(folder: Path) -> dict[str, Any]:
    """run.json of a run's folder.

    Raises:
        KvaccError: it is not what a sweep writes.
    """
    path = folder / RUN_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        sound = isinstance(content["kvacc"], str) and isinstance(content["schema_version"], int)
        sound = sound and all(isinstance(run["cells"], dict) for run in content["runs"])
    except OSError as error:
        raise KvaccError(f"{path} cannot be read: {error.strerror or error}; mend its permissions") from None
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise KvaccError(f"{path} is damaged; delete this file to keep the cells, then run again")
    return content


def _name(value: str) -> str:
    return '"' + value.replace('"', '""') + '"'
