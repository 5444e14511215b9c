"""Merge runs, from other machines too: a copy of every cell, checked, or nothing at all.

Cells are named by what was asked for, so the same cell of two runs is either equal,
and copied once, or a contradiction, and then nothing is copied: somebody has to say
which one is right.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvacc.errors import KvaccError
from kvacc.results import Cell, copy_cell, exclusive, find_folders
from kvacc.store.check import RUN_FILE, read_run_file, run_folders
from kvacc.store.database import Store

CELLS_FOLDER = "cells"
_APART = "merge each version into a folder of its own, so that no table mixes them unseen"


@dataclass(frozen=True)
class MergeReport:
    """What a merge did."""

    folder: Path
    copied: list[str]
    """Ids of the cells that were copied."""
    present: list[str]
    """Ids of the cells that the folder had already."""
    runs: int
    """Entries of the folder's run.json; 0 without one."""


def merge(paths: Sequence[str | Path], output: str | Path) -> MergeReport:
    """Copy every cell below ``paths`` into ``<output>/cells``, and join their run.json files.

    Doing it twice, or again after it was killed, does no harm.

    Raises:
        KvaccError: a folder does not exist or holds no cell, a cell is damaged, one cell
            has different results in two folders, the runs are of different versions of
            kvacc, or the folder cannot be written. Nothing has been copied then.
    """
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise KvaccError(f"output folder {output} is a file; choose another --output")
    incoming = Store.open(paths)
    before = Store.open(output).cells if output.exists() and _has_cells(output) else []
    # Both together: a contradiction between them, or among the incoming ones, is named here.
    if before:
        Store.open([*paths, output])
    _joined_runs([*_run_folders_at(output), *run_folders(paths)])
    _refuse_mixed_versions([*before, *incoming.cells])
    known = {cell.cell_id for cell in before}
    copied = [cell for cell in incoming.cells if cell.cell_id not in known]
    for cell in copied:
        copy_cell(cell, output / CELLS_FOLDER)
    with exclusive(output) as alone:
        if alone:
            for leftover in output.glob(f".{RUN_FILE}-*"):
                leftover.unlink(missing_ok=True)
        # Read again: a sweep or another merge may have added its run meanwhile.
        content = _joined_runs([*_run_folders_at(output), *run_folders(paths)])
        if content is not None:
            _write_run_file(output / RUN_FILE, content)
    return MergeReport(
        output,
        copied=[cell.cell_id for cell in copied],
        present=sorted({cell.cell_id for cell in incoming.cells} & known),
        runs=len(content["runs"]) if content else 0,
    )


def _has_cells(folder: Path) -> bool:
    try:
        return bool(find_folders([folder]))
    except KvaccError:
        return False


def _run_folders_at(folder: Path) -> list[Path]:
    return [folder] if (folder / RUN_FILE).exists() else []


def _refuse_mixed_versions(cells: Sequence[Cell]) -> None:
    by_version = {cell.environment.kvacc: cell for cell in cells}
    if len(by_version) > 1:
        some = " and ".join(
            f"{cell.folder} is of kvacc {version}" for version, cell in sorted(by_version.items())
        )
        raise KvaccError(f"{some}; {_APART}")


def _joined_runs(folders: Sequence[Path]) -> dict[str, Any] | None:
    """One run.json from several, each configuration once; None without any.

    Raises:
        KvaccError: one is damaged, or they are of different versions.
    """
    contents = {folder: read_run_file(folder) for folder in dict.fromkeys(map(Path, folders))}
    if not contents:
        return None
    first, reference = next(iter(contents.items()))
    for folder, content in contents.items():
        for name, what in (("kvacc", "kvacc"), ("schema_version", "schema")):
            if content[name] != reference[name]:
                raise KvaccError(
                    f"{first} is of {what} {reference[name]} and {folder} of {what} {content[name]}; {_APART}"
                )
    runs: list[dict[str, Any]] = []
    for content in contents.values():
        for run in content["runs"]:
            if not any(set(run["cells"]) == set(other["cells"]) for other in runs):
                runs.append(run)
    return {**reference, "runs": runs}


def _write_run_file(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False)
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        if path.exists() and json.loads(path.read_text(encoding="utf-8")) == content:
            return
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise KvaccError(f"cannot write {path}: {error.strerror or error}; choose another --output") from None
