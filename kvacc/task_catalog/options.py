"""Options of tasks that are generated or read texts: which there are, and what a value may be."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvacc.errors import KvaccError, nearest
from kvacc.task_catalog.catalog import GROUPS, LONGTEXT, RETENTION, TaskInfo, find_task, members, task_names


def option_names(name: str) -> tuple[str, ...]:
    """The options that a task, or some task of a group, takes; none for names unknown."""
    if name not in task_names() and name not in GROUPS:
        return ()
    found: dict[str, None] = {}
    for task in map(find_task, members(name)):
        if task.kind == LONGTEXT:
            from kvacc.tasks.longtext.settings import OPTIONS

            found.update(dict.fromkeys(OPTIONS))
        elif task.generator is not None:
            found.update(dict.fromkeys(task.kind_of_documents().options))
    return tuple(found)


def takes_option(name: str, option: str) -> bool:
    """True when a task, or some task of a group, takes the option."""
    return option in option_names(name)


def taken_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``options`` that the task takes."""
    return {option: value for option, value in options.items() if takes_option(name, option)}


def every_option() -> tuple[str, ...]:
    """Every option that some task takes."""
    return tuple(dict.fromkeys(option for task in task_names() for option in option_names(task)))


def no_such_option(names: Iterable[str], option: str) -> str:
    """What to say when none of the tasks and groups takes an option."""
    names = list(names)
    shown = names[0] if len(names) == 1 else f"none of {', '.join(names)}"
    known = tuple(dict.fromkeys(known for name in names for known in option_names(name)))
    if known:
        takes = "has no option" if len(names) == 1 else "has the option"
        return f"{shown} {takes} {option!r}{nearest(option, known)}; known: {', '.join(known)}"
    if option in every_option():
        takes = "takes no options" if len(names) == 1 else "takes options"
        return f"{shown} {takes}: {option} belongs to generated tasks, such as {GROUPS[RETENTION][0]}"
    every = every_option()
    return f"there is no task option {option!r}{nearest(option, every)}; known: {', '.join(every)}"


PATH_OPTIONS = ("filler", "texts")
"""Options that name a file or a folder: a cell is known by its content, not by its place."""


def canonical_options(task: TaskInfo, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options as a cell states them, and the paths among them as they are read.

    Stated are those that differ from their defaults, and of a path the name and a hash of the
    content, so that equal questions have equal options on every machine.

    Raises:
        KvaccError: an option that ``task`` does not take, a value that it refuses, or no such file.
    """
    check_options(task, options)
    stated = dict(options)
    if task.generator is not None:
        from kvacc.tasks.retention.settings import canonical

        stated = canonical(task.kind_of_documents(), options)
    paths = {name: stated[name] for name in PATH_OPTIONS if stated.get(name) is not None}
    return {**stated, **{name: content_label(path) for name, path in paths.items()}}, paths


def content_label(path: str | Path) -> str:
    """``book.txt@`` and a hash of the content; of a folder, of its text files in order of their names.

    Raises:
        KvaccError: there is no such file or folder.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        files = sorted(file for file in place.iterdir() if file.suffix in (".txt", ".jsonl"))
    else:
        files = [place]
    digest = hashlib.sha256()
    for file in files:
        try:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        except OSError as error:
            raise KvaccError(f"{str(file)!r} cannot be read: {error.strerror}; name a text file") from None
    return f"{place.resolve().name}@{digest.hexdigest()[:16]}"


def check_options(task: TaskInfo, options: Mapping[str, Any]) -> None:
    """Raise KvaccError for the first option that ``task`` does not take, or a value that it refuses."""
    for _, what in option_problems(task, options):
        raise KvaccError(what)


def option_problems(task: TaskInfo, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(option, what is wrong with it), for every option that is wrong."""
    if not task.takes_options:
        for name in options:
            yield name, no_such_option([task.name], name)
        return
    if task.kind == LONGTEXT:
        from kvacc.tasks.longtext.settings import problems as longtext_problems

        yield from longtext_problems(options)
        return
    from kvacc.tasks.retention.settings import problems

    yield from problems(task.kind_of_documents(), options)
