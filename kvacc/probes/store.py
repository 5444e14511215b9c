"""Probe records on disk: one folder for each case, each file written in one step.

    <folder>/probes/<case_id>/probe.json          latency, memory and transfers of a case
    <folder>/capacity/<case_id>/capacity.json     the largest that fits a memory limit

A run that is killed leaves whole files only, so that it goes on where it stopped.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from kvacc.errors import KvaccError
from kvacc.files import write_whole
from kvacc.probes.records import PROBE_FILE, SCHEMA_VERSION, CapacityRecord, ProbeRecord

PROBES_FOLDER = "probes"
CAPACITY_FOLDER = "capacity"
CAPACITY_FILE = "capacity.json"

_AnyRecord = TypeVar("_AnyRecord", ProbeRecord, CapacityRecord)


def write_probe(folder: str | os.PathLike[str], record: ProbeRecord) -> Path:
    """Write a record below a run's folder, in place of an earlier one of the same case.

    Raises:
        KvaccError: the folder cannot be written.
    """
    return _write(Path(folder) / PROBES_FOLDER / record.case_id / PROBE_FILE, record)


def write_capacity(folder: str | os.PathLike[str], record: CapacityRecord) -> Path:
    """The same for what a search for the largest that fits has found."""
    return _write(Path(folder) / CAPACITY_FOLDER / record.case_id / CAPACITY_FILE, record)


def find_probe(folder: str | os.PathLike[str], case_id: str) -> ProbeRecord | None:
    """The record of a case in a run's folder, None when there is none.

    Raises:
        KvaccError: it is damaged.
    """
    path = Path(folder) / PROBES_FOLDER / case_id / PROBE_FILE
    return _read(path, ProbeRecord) if path.exists() else None


def find_capacity(folder: str | os.PathLike[str], case_id: str) -> CapacityRecord | None:
    """The same for the record of a search."""
    path = Path(folder) / CAPACITY_FOLDER / case_id / CAPACITY_FILE
    return _read(path, CapacityRecord) if path.exists() else None


def read_probes(paths: Iterable[str | os.PathLike[str]] | str | os.PathLike[str]) -> list[ProbeRecord]:
    """Every probe record at or below ``paths``, each once, in the order of their folders' names.

    Raises:
        KvaccError: a path that is missing or holds none, or a damaged record.
    """
    return _read_all(paths, PROBE_FILE, ProbeRecord)


def read_capacities(
    paths: Iterable[str | os.PathLike[str]] | str | os.PathLike[str], required: bool = True
) -> list[CapacityRecord]:
    """Every record of a search at or below ``paths``.

    Args:
        required: raise KvaccError when there is none.
    """
    return _read_all(paths, CAPACITY_FILE, CapacityRecord, required)


def _write(path: Path, record: ProbeRecord | CapacityRecord) -> Path:
    text = record.model_dump_json(indent=2) + "\n"
    return write_whole(path, text, mend="choose another --output")


def _read(path: Path, kind: type[_AnyRecord]) -> _AnyRecord:
    mend = "delete its folder, and the same command measures the case again"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise KvaccError(f"{path} cannot be read: {reason}; {mend}") from None
    try:
        record = kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = " ".join(f"{where}: {first['msg']}".split()) if where else " ".join(first["msg"].split())
        raise KvaccError(f"{path} is damaged ({what}); {mend}") from None
    if record.schema_version > SCHEMA_VERSION:
        raise KvaccError(
            f"{path}: schema_version {record.schema_version} is newer than {SCHEMA_VERSION}, which this "
            "kvacc reads; update kvacc"
        )
    if record.case_id != path.parent.name:
        raise KvaccError(f"{path} is of case {record.case_id!r}, not of its folder's; {mend}")
    return record


def _read_all(paths, name: str, kind: type[_AnyRecord], required: bool = True) -> list[_AnyRecord]:
    roots = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found: dict[Path, None] = {}
    for root in map(Path, roots):
        if not root.exists():
            raise KvaccError(f"no folder {str(root)!r}; name one that `kvacc probe` wrote")
        files = [root] if root.is_file() else sorted(root.rglob(name))
        if not files and required:
            raise KvaccError(f"no {name} in {str(root)!r}; measure some with `kvacc probe`")
        found |= dict.fromkeys(file.resolve() for file in files)
    return [_read(file, kind) for file in found]
