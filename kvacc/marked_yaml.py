"""YAML with a place for every value, so that an error can say ``file:line:column``.

:func:`read_marked` returns plain values and, for every path such as
``("strategies", 1, "budgets", 0)``, where it stands. Keys given twice, keys that are
not text and values that YAML cannot build become :class:`Fault` entries, so that a
reader can report them together with its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

Path = tuple[str | int, ...]


class Fault(NamedTuple):
    """Something wrong at a path; ``where`` is ``file:line:column`` or the override's text."""

    where: str
    path: Path
    what: str

    def __str__(self) -> str:
        return ": ".join([self.where, *([dotted(self.path)] if self.path else []), self.what])


@dataclass
class MarkedYaml:
    """A YAML document with the place of every part."""

    source: str
    value: Any = None
    marks: dict[Path, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def where(self, path: Path) -> str:
        """The place of ``path``, or of the closest part around it that the text has."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.marks:
                return self.marks[path[:length]]
        return self.source

    def fault(self, path: Path, what: str) -> None:
        """Note something wrong at ``path``."""
        self.faults.append(Fault(self.where(path), path, what))


def dotted(path: Path) -> str:
    """``strategies.1.budgets.0``"""
    return ".".join(str(part) for part in path)


def read_marked(text: str, source: str) -> MarkedYaml:
    """Parse one YAML document; what is wrong ends up in ``faults``.

    Args:
        text: the YAML.
        source: the file's name as errors shall show it.
    """
    document = MarkedYaml(source)
    _parse(text, document, lambda mark: f"{source}:{mark.line + 1}:{mark.column + 1}")
    return document


def apply_override(document: MarkedYaml, override: str) -> None:
    """Set one value, given as ``a.b.0=c`` with ``c`` in YAML; wrong ones become faults.

    A list takes the index after its last as well, which adds an entry.
    """
    where = f"--set {override}"
    target, equals, text = override.partition("=")
    path: Path = tuple(target.strip().split("."))
    if not equals or not all(path):
        document.faults.append(Fault(where, (), "write PATH=VALUE, such as strategies.1.budgets.0=0.5"))
        return
    new = MarkedYaml(where)
    _parse(text, new, lambda mark: where)
    document.faults.extend(new.faults)
    if new.faults:
        return
    if document.value is None:
        document.value = {}
    container, resolved = document.value, ()
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        key, problem = _key_in(container, part, resolved, may_append=last)
        if problem:
            document.faults.append(Fault(where, resolved, problem))
            return
        resolved += (key,)
        if last:
            if isinstance(container, list) and key == len(container):
                container.append(new.value)
            else:
                container[key] = new.value
        else:
            if isinstance(container, dict) and container.get(key) is None:
                container[key] = {}
            container = container[key]
    for old in [mark for mark in document.marks if mark[: len(resolved)] == resolved]:
        del document.marks[old]
    document.marks.update({resolved + mark: where for mark in new.marks})
    document.marks[resolved] = where


def _key_in(container: Any, part: str, path: Path, *, may_append: bool) -> tuple[str | int, str | None]:
    """``part`` as a key of ``container``, or what keeps it from being one."""
    if isinstance(container, dict):
        return part, None
    if isinstance(container, list):
        size = len(container)
        if part.isdecimal() and int(part) < size + may_append:
            return int(part), None
        return part, f"{part!r} is not one of its {size} entries; count them from 0"
    return part, f"is {container!r} and has no part {part!r}; set {dotted(path)} itself"


def _parse(text: str, document: MarkedYaml, where) -> None:
    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as error:
        document.faults.append(Fault(document.source, (), f"not YAML: {_one_line(error)}"))
        return
    try:
        node = loader.get_single_node()
        if node is not None:
            document.value = _Builder(loader, document, where).build(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = f"not YAML: {error.problem or error.context}"
        if "tab" in what or "\\t" in what:
            what += "; indent with spaces"
        document.faults.append(Fault(where(mark) if mark else document.source, (), what))
    except yaml.YAMLError as error:
        document.faults.append(Fault(document.source, (), f"not YAML: {_one_line(error)}"))
    finally:
        loader.dispose()


class _Builder:
    """Turns YAML nodes into values, noting the place of each."""

    def __init__(self, loader: yaml.SafeLoader, document: MarkedYaml, where) -> None:
        self.loader, self.document, self.where = loader, document, where
        self.open: list[yaml.Node] = []

    def build(self, node: yaml.Node, path: Path) -> Any:
        self.document.marks.setdefault(path, self.where(node.start_mark))
        if any(node is parent for parent in self.open):
            self.document.fault(path, "refers to itself")
            return None
        self.open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.build(child, (*path, index)) for index, child in enumerate(node.value)]
            return self._scalar(node, path)
        finally:
            self.open.pop()

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        self._refuse_twice(node, path)
        # Brings keys merged with `<<: *anchor` in front, where the mapping's own override them.
        self.loader.flatten_mapping(node)
        value: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key, str) or key_node.tag != "tag:yaml.org,2002:str":
                shown = key if isinstance(key, str) else "this key"
                what = f"{shown} is no name; put it in quotes if it is"
                self.document.faults.append(Fault(self.where(key_node.start_mark), path, what))
                continue
            self.document.marks[(*path, key)] = self.where(key_node.start_mark)
            value[key] = self.build(value_node, (*path, key))
        return value

    def _refuse_twice(self, node: yaml.MappingNode, path: Path) -> None:
        first: dict[str, str] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node.value, str):
                continue
            place = self.where(key_node.start_mark)
            if key_node.value in first:
                what = f"given twice, first at {first[key_node.value]}; keep one"
                self.document.faults.append(Fault(place, (*path, key_node.value), what))
            else:
                first[key_node.value] = place

    def _scalar(self, node: yaml.Node, path: Path) -> Any:
        try:
            return self.loader.construct_object(node)
        except yaml.MarkedYAMLError as error:
            self.document.fault(path, f"not YAML: {error.problem or error.context}")
        except ValueError as error:
            self.document.fault(path, f"{node.value!r} is no valid value: {_one_line(error)}")
        return None


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
