"""Find and read cells; each is checked, and one that is damaged is named and never used."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvacc.errors import KvaccError, one_line
from kvacc.results.cell import Cell
from kvacc.results.checksums import is_unedited
from kvacc.results.layout import CELL_FILE, SAMPLES_FILE, SCHEMA_VERSION
from kvacc.results.samples import verify_samples


def read_cell(path: str | Path) -> Cell:
    """The checked cell in folder ``path`` (its cell.json is accepted too).

    Raises:
        KvaccError: a file is missing, truncated, edited, or from a newer kvacc.
    """
    folder = Path(path)
    if folder.name == CELL_FILE:
        folder = folder.parent
    cell_path = folder / CELL_FILE
    mend = f"delete the folder {folder} and run the same command again"
    try:
        content = json.loads(cell_path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise KvaccError(f"{cell_path} is missing; {mend}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise KvaccError(f"{cell_path} is truncated or not JSON ({one_line(error)}); {mend}") from None
    except OSError as error:
        raise KvaccError(f"{cell_path} cannot be read: {error.strerror}; mend its permissions") from None
    _require_schema(content, cell_path, mend)
    try:
        cell = Cell.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        if first["type"] == "extra_forbidden" and is_unedited(content):
            # Optional fields are added without a new schema_version. Not damage, so never replaced.
            raise FromNewerVersion(
                f"{cell_path}: {field} is not known to this kvacc; a newer one wrote it: update kvacc"
            ) from None
        raise KvaccError(f"{cell_path}: {field}: {one_line(first['msg'])}; {mend}") from None
    if not is_unedited(content):
        raise KvaccError(f"{cell_path} was edited after it was written (its checksum differs); {mend}")
    if cell.cell_id != folder.resolve().name:
        raise KvaccError(
            f"{cell_path} is cell {cell.cell_id}, but its folder is named {folder.resolve().name!r}; "
            f"rename the folder to {cell.cell_id}"
        )
    verify_samples(folder / SAMPLES_FILE, cell.samples_sha256)
    cell._folder = folder
    return cell


def find_cell(folder: str | Path, cell_id: str) -> Cell | None:
    """The finished cell ``cell_id`` of a run's folder, or None when it has yet to run.

    Raises:
        KvaccError: it exists, but is damaged.
    """
    path = Path(folder) / cell_id
    return read_cell(path) if path.exists() else None


def read_cells(paths: Iterable[str | Path] | str | Path) -> list[Cell]:
    """Every cell below the given run folders, each once, sorted by ``cell_id``.

    A cell found twice with the same results counts once.

    Raises:
        KvaccError: no such folder, no cell in it, a damaged cell, or one cell with
            different results in two folders.
    """
    paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not paths:
        raise KvaccError("no results folder given; name one or more, such as results/quickstart")
    found: dict[str, Cell] = {}
    for folder in find_folders(paths):
        cell = read_cell(folder)
        other = found.setdefault(cell.cell_id, cell)
        if other is not cell and (conflict := conflict_of(other, cell)):
            raise KvaccError(conflict)
    return [found[cell_id] for cell_id in sorted(found)]


def find_folders(paths: Iterable[str | Path]) -> list[Path]:
    """The folders of the cells below the given run folders, unread and in order.

    Raises:
        KvaccError: a path does not exist, or has no cell below it.
    """
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise KvaccError(f"results folder {path} does not exist; make it with: kvacc run CONFIG")
        folders = list(_cell_folders(path.parent if path.name == CELL_FILE else path))
        if not folders:
            raise KvaccError(f"results folder {path} holds no finished cell; fill it with: kvacc run CONFIG")
        found.update(dict.fromkeys(folders))
    return list(found)


def conflict_of(one: Cell, other: Cell) -> str | None:
    """What is wrong with two folders that hold the same cell; None when their results are equal."""
    if _same_results(one, other):
        return None
    return (
        f"cell {one.cell_id} has different results in {one.folder} and {other.folder}; "
        "keep one of the two folders"
    )


class FromNewerVersion(KvaccError):
    """A cell that this kvacc must not replace, because it cannot judge it."""


def _require_schema(content: Any, cell_path: Path, mend: str) -> None:
    if not isinstance(content, dict):
        raise KvaccError(f"{cell_path} holds no JSON object; {mend}")
    version = content.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise KvaccError(f"{cell_path}: schema_version {version!r} is not a version; {mend}")
    if version > SCHEMA_VERSION:
        raise FromNewerVersion(
            f"{cell_path}: schema_version {version} is newer than {SCHEMA_VERSION}, which this kvacc reads; "
            "update kvacc"
        )


def _cell_folders(root: Path) -> Iterable[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        if CELL_FILE in files or SAMPLES_FILE in files:
            subfolders.clear()
            yield Path(folder)


def _same_results(one: Cell, other: Cell) -> bool:
    """Equal apart from when, where and how fast it ran."""
    differs_freely = {"timing", "environment", "samples_sha256", "record_sha256", "warnings"}
    if one.model_dump(exclude=differs_freely) != other.model_dump(exclude=differs_freely):
        return False
    return one.samples_sha256 == other.samples_sha256 or one.load_samples().equals(other.load_samples())
