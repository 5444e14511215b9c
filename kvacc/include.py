"""Strategies from a user's own file.

``kvacc run --include my_strategy.py`` runs the file and adds the strategies that it
defines to those of the ``strategies/`` folder. Each is stamped with the sha256 of the
file, which becomes part of a cell's id: results of an edited file are never taken for
those of the file as it is now. A file stands alone: what it imports from beside itself
is not part of that hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import traceback
import types
import typing
from collections.abc import Iterable
from pathlib import Path

from kvacc.errors import KvaccError, nearest
from kvacc.strategy import Strategy, builtin_classes, register_included

_HASH_IN_NAME = 12


def include(*paths: str | os.PathLike[str]) -> list[type[Strategy]]:
    """Register the strategies that the files define; they replace those included before
    under the same names.

    Returns:
        The classes, in the order of the files.

    Raises:
        KvaccError: a file is missing, cannot be run or has no strategy, or a name is taken
            by a strategy of kvacc or of another of the files. Nothing is registered then.
    """
    found: dict[str, type[Strategy]] = {}
    files: dict[str, str] = {}
    for path in dict.fromkeys(Path(path).expanduser().absolute() for path in paths):
        shown = _shown(path)
        for cls in _strategies_in(path, shown):
            if cls.name in builtin_classes():
                raise KvaccError(
                    f"{shown}: class {cls.__name__} is named {cls.name!r} like a strategy of kvacc; "
                    'give it a name of its own: name: ClassVar[str] = "..."'
                )
            if cls.name in found:
                raise KvaccError(
                    f"{shown}: class {cls.__name__} is named {cls.name!r} like {found[cls.name].__name__} "
                    f"of {files[cls.name]}; rename one"
                )
            found[cls.name], files[cls.name] = cls, shown
    register_included(found)
    return list(found.values())


def include_faults(paths: Iterable[str | os.PathLike[str]]) -> list[tuple[int, str]]:
    """Include ``paths``; where that fails, which of them (by index) is at fault and why."""
    paths = list(paths)
    try:
        include(*paths)
    except KvaccError as whole:
        for index, path in enumerate(paths):
            try:
                include(path)
            except KvaccError as error:
                return [(index, str(error))]
        return [(len(paths) - 1, str(whole))]
    return []


def _strategies_in(path: Path, shown: str) -> list[type[Strategy]]:
    module, sha256 = _run(path, shown)
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Strategy) and value.__module__ == module.__name__
    ]
    named = [cls for cls in dict.fromkeys(classes) if cls.name]
    if not named:
        what = (
            f'class {classes[0].__name__} has no name: write name: ClassVar[str] = "..." in it'
            if classes
            else "it defines no strategy: write a subclass of kvacc.strategy.EvictStrategy with a name"
        )
        raise KvaccError(f"{shown}: {what} (docs/write-a-strategy.md)")
    for cls in named:
        _require_fields(cls, shown)
        cls.file_sha256 = sha256
    return named


def _run(path: Path, shown: str) -> tuple[types.ModuleType, str]:
    """The module that the file makes, and the file's sha256."""
    content = _read(path, shown)
    sha256 = hashlib.sha256(content).hexdigest()
    # One module for each content: dataclasses and pydantic look their annotations up in it.
    name = f"kvacc_included_{''.join(c if c.isalnum() else '_' for c in path.stem)}_{sha256[:_HASH_IN_NAME]}"
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    try:
        exec(compile(content, str(path), "exec"), vars(module))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Whatever a file does wrong, SystemExit included, is said in one line with its place.
        del sys.modules[name]
        raise KvaccError(_explained(error, path, shown)) from error
    return module, sha256


def _read(path: Path, shown: str) -> bytes:
    if path.is_dir():
        raise KvaccError(f"strategy file {shown!r} is a folder; name a Python file in it")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        close = nearest(path.name, (file.name for file in path.parent.glob("*.py")))
        raise KvaccError(f"no strategy file {shown!r}{close}; give the path of a Python file") from None
    except OSError as error:
        raise KvaccError(f"strategy file {shown!r} cannot be read: {error.strerror}") from None


def _explained(error: BaseException, path: Path, shown: str) -> str:
    """``file:line: Error: what``, with the last line of the file that was running."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{shown}:{error.lineno or 1}: {type(error).__name__}: {error.msg}; mend the file"
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
    ]
    what = " ".join(str(error).split()) or "no message"
    return f"{shown}:{lines[-1] if lines else 1}: {type(error).__name__}: {what}; mend the file"


def _require_fields(cls: type[Strategy], shown: str) -> None:
    """Annotated values become hyper-parameters only where the class is a dataclass."""
    fields = {field.name for field in dataclasses.fields(cls)}
    for name, annotation in vars(cls).get("__annotations__", {}).items():
        is_class_variable = "ClassVar" in str(annotation) or typing.get_origin(annotation) is typing.ClassVar
        if name not in fields and not is_class_variable:
            raise KvaccError(
                f"{shown}: {name!r} of class {cls.__name__} would be no hyper-parameter; "
                "write @dataclass(frozen=True) above the class"
            )


def _shown(path: Path) -> str:
    """Relative to the working folder where it lies below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
