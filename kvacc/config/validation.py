"""Check a configuration as a whole: every mistake at once, each with its place in the file."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from kvacc import task_catalog
from kvacc.config.entries import ModelEntry, StrategyEntry, TaskEntry
from kvacc.config.parts import sentence
from kvacc.errors import KvaccError, nearest
from kvacc.include import include_faults
from kvacc.marked_yaml import Fault, MarkedYaml

_Config = typing.TypeVar("_Config", bound=BaseModel)


def _run_included(document: MarkedYaml) -> None:
    """Run the included files, so that their strategies are known.

    Raises:
        KvaccError: one of them cannot be included; without its strategies nothing else
            that is wrong could be told apart.
    """
    files = document.value.get("include") if isinstance(document.value, dict) else None
    files = [files] if isinstance(files, str) else files
    if not isinstance(files, list) or not all(isinstance(file, str) and file for file in files):
        return  # said when the whole is checked
    for index, what in include_faults(files):
        raise KvaccError(str(Fault(document.where(("include", index)), ("include", index), what)))


def validated(document: MarkedYaml, whole: type[_Config]) -> _Config:
    """The document as a configuration of the kind ``whole``.

    Raises:
        KvaccError: all mistakes, each on its line as ``file:line:column: path: what``.
    """
    _run_included(document)
    faults = list(document.faults)
    config = None
    # A fault without a path means that the text could not be read as a whole.
    if all(fault.path for fault in faults):
        try:
            if not isinstance(document.value, dict):
                what = "is empty" if document.value is None else "is no mapping"
                needed = [name for name in ("models", "strategies", "tasks") if name in whole.model_fields]
                raise KvaccError(f"{document.source}: {what}; write {_listed(needed)}")
            config = whole.model_validate(document.value)
        except ValidationError as error:
            # Where a part could not be read, that the whole is wrong needs no saying.
            found = (_as_fault(document, item, whole) for item in error.errors())
            known = [fault.path for fault in faults]
            faults += [
                fault for fault in found if not any(path[: len(fault.path)] == fault.path for path in known)
            ]
    if not faults and config is not None:
        return config
    # The same place can be at fault for two reasons; each is said once.
    lines = list(dict.fromkeys(str(fault) for fault in faults))
    if len(lines) == 1:
        raise KvaccError(lines[0])
    raise KvaccError("\n".join([f"{len(lines)} mistakes in {document.source}:", *lines]))


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]])


def _as_fault(document: MarkedYaml, item: dict[str, Any], whole: type[BaseModel]) -> Fault:
    path = tuple(item["loc"])
    # For a union pydantic adds the name of the member that was tried.
    is_unknown = item["type"] == "extra_forbidden"  # then the last name is the key that nobody knows
    while len(path) > 1 and not is_unknown and path not in document.marks and not _is_field(path, whole):
        path = path[:-1]
    if is_unknown:
        fields = _fields_at(path, whole)
        what = f"unknown key{nearest(str(path[-1]), fields)}; known: {', '.join(fields)}"
    elif item["type"] == "missing":
        what = "is missing"
    else:
        what = sentence(item)
    return Fault(document.where(path), path, what)


def _fields_at(path: tuple[str | int, ...], whole: type[BaseModel]) -> Iterable[str]:
    """The keys that the mapping around ``path`` can have."""
    if path[0] == "models":
        return ModelEntry.model_fields
    return (_parts(whole).get(str(path[0]), whole) if len(path) > 1 else whole).model_fields


def _parts(whole: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Keys of the kind ``whole`` under which a mapping of a kind of its own stands."""
    kinds = {
        name: [kind for kind in (field.annotation, *typing.get_args(field.annotation)) if _is_model(kind)]
        for name, field in whole.model_fields.items()
    }
    return {name: found[0] for name, found in kinds.items() if found}


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _is_field(path: tuple[str | int, ...], whole: type[BaseModel]) -> bool:
    """True when the last part of ``path`` is a key that a configuration can have."""
    if isinstance(path[-1], int) or (path[0] == "tasks" and path[-1] in task_catalog.every_option()):
        return True
    return any(
        path[-1] in part.model_fields
        for part in (whole, ModelEntry, StrategyEntry, TaskEntry, *_parts(whole).values())
    )
