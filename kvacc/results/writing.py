"""Write and copy cells, each in one step: a folder appears under its final name only when complete."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from kvacc.errors import KvaccError
from kvacc.results.cell import Cell, CellResult
from kvacc.results.checksums import sha256_of_file, sha256_of_record
from kvacc.results.layout import CELL_FILE, SAMPLES_FILE
from kvacc.results.reading import FromNewerVersion, read_cell
from kvacc.results.samples import samples_table, verify_samples

_TEMPORARY_PREFIX = ".writing-"
_FOREIGN_LEFTOVER_AGE_S = 24 * 3600
_PROCESS_TOKEN = secrets.token_hex(4)
_COUNTER = itertools.count()


def write_cell(folder: str | Path, result: CellResult) -> Path:
    """Write ``<folder>/<cell_id>`` in one step; the first complete writer wins.

    Args:
        folder: the run's folder, made when needed.
        result: the cell with its samples; its checksums are filled in.

    Returns:
        The cell's folder.

    Raises:
        KvaccError: the folder cannot be written, or the samples are unusable.
    """
    import pyarrow.parquet

    table = samples_table(result.samples)
    with _published(Path(folder), result.cell_id, "write results") as temporary:
        pyarrow.parquet.write_table(table, temporary / SAMPLES_FILE, compression="zstd")
        result.samples_sha256 = sha256_of_file(temporary / SAMPLES_FILE)
        result.record_sha256 = ""
        result.record_sha256 = sha256_of_record(result.record())
        text = json.dumps(result.record(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        (temporary / CELL_FILE).write_text(text, encoding="utf-8")
    return Path(folder) / result.cell_id


@contextlib.contextmanager
def _published(folder: Path, cell_id: str, what: str) -> Iterator[Path]:
    """A new folder to write both files of a cell into; when the block ends it appears, whole and on
    the disk, as ``<folder>/<cell_id>``, unless a valid cell is there already.

    Raises:
        KvaccError: the folder cannot be written; says ``what`` was meant.
    """
    temporary = folder / temporary_name(cell_id)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        temporary.mkdir()
        try:
            yield temporary
            for path in (temporary / SAMPLES_FILE, temporary / CELL_FILE, temporary):
                _fsync(path)
            _publish(temporary, folder / cell_id)
            _fsync(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise KvaccError(
            f"cannot {what} to {folder}: {error.strerror or error}; choose another output folder"
        ) from None


def copy_cell(cell: Cell, folder: str | Path) -> Path:
    """Copy a cell that was read from a folder to ``<folder>/<cell_id>``, as :func:`write_cell` writes one.

    Returns:
        The cell's new folder. A valid cell that is there already stays.

    Raises:
        KvaccError: the folder cannot be written, or the cell was damaged since it was read.
    """
    if cell.folder is None:
        raise KvaccError(f"cell {cell.cell_id} was not read from a folder; use write_cell")
    source = cell.folder
    with _published(Path(folder), cell.cell_id, f"copy {source}") as temporary:
        for name in (SAMPLES_FILE, CELL_FILE):
            shutil.copyfile(source / name, temporary / name)
        verify_samples(temporary / SAMPLES_FILE, cell.samples_sha256)
        if json.loads((temporary / CELL_FILE).read_bytes()).get("record_sha256") != cell.record_sha256:
            raise KvaccError(f"{source / CELL_FILE} changed while it was copied; run the same command again")
    return Path(folder) / cell.cell_id


def remove_leftovers(folder: str | Path) -> list[Path]:
    """Delete ``.writing-*`` folders whose writer is gone; returns those deleted.

    A writer on this machine is gone when its process is; one on another machine
    when its folder is a day old.
    """
    removed = []
    for path in sorted(Path(folder).glob(f"{_TEMPORARY_PREFIX}*")):
        if _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


@contextlib.contextmanager
def exclusive(folder: str | Path) -> Iterator[bool]:
    """Hold a folder against other processes that ask for it so. The system gives it back when one is killed.

    Yields:
        True when the folder is held; False where the file system has no such locks.
    """
    try:
        import fcntl
    except ImportError:
        # Windows.
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            held = True
        except OSError:
            held = False
        yield held
    finally:
        os.close(descriptor)


def _publish(temporary: Path, target: Path) -> None:
    """Rename to the final name, unless a valid cell is already there."""
    for _ in range(2):
        try:
            os.rename(temporary, target)
            return
        except OSError:
            if not target.exists():
                raise
        try:
            read_cell(target)
            return
        except FromNewerVersion:
            raise
        except KvaccError:
            # Damaged: renamed away first, so that no reader meets a half-deleted cell.
            discarded = target.parent / temporary_name(target.name)
            os.rename(target, discarded)
            if discarded.is_dir():
                shutil.rmtree(discarded)
            else:
                discarded.unlink()
    os.rename(temporary, target)


def temporary_name(cell_id: str) -> str:
    """A folder's name that says who writes in it, for :func:`remove_leftovers`."""
    host = socket.gethostname().replace("@", "_").replace("/", "_") or "localhost"
    return f"{_TEMPORARY_PREFIX}{cell_id}@{host}@{os.getpid()}@{_PROCESS_TOKEN}{next(_COUNTER)}"


def _is_abandoned(path: Path) -> bool:
    parts = path.name.split("@")
    own = temporary_name("x").split("@")
    if len(parts) != 4 or parts[1] != own[1] or not parts[2].isdigit():
        try:
            return time.time() - path.stat().st_mtime > _FOREIGN_LEFTOVER_AGE_S
        except OSError:
            return False
    if parts[2] == own[2]:
        # Containers reuse process ids: ours is told from a dead one's by the token.
        return not parts[3].startswith(_PROCESS_TOKEN)
    try:
        os.kill(int(parts[2]), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
