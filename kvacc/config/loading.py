"""Read configuration files: packaged ones by name, overrides, and paths made absolute."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvacc import task_catalog
from kvacc.config.entries import AUTO
from kvacc.config.run_config import RunConfig
from kvacc.config.validation import validated
from kvacc.errors import KvaccError, nearest
from kvacc.marked_yaml import Fault, MarkedYaml, apply_override, read_marked
from kvacc.task_catalog import DATA_DIR_VARIABLE

_PROBES = "probe"
"""How names of configurations of probes begin."""


def load_config(
    path: str | os.PathLike[str],
    overrides: Iterable[str] = (),
    include: Iterable[str | os.PathLike[str]] = (),
    task_options: Iterable[str] = (),
) -> RunConfig:
    """Read and check a configuration file, and include the strategy files that it names.

    Args:
        path: a YAML file, or the name of a packaged one (``quickstart``).
        overrides: ``a.b.0=c``, applied in order; ``c`` is YAML.
        include: strategy files beside those that the configuration includes.
        task_options: ``option=value`` for every task that takes it; ``value`` is YAML.

    Returns:
        The configuration, with local paths made absolute: those in the file stand
        relative to the file, those in overrides and ``include`` relative to the working
        folder.

    Raises:
        KvaccError: all mistakes, each on its line as ``file:line:column: path: what``.
    """
    document, folder = read_document(path, overrides, packaged_configs())
    if isinstance(document.value, dict):
        for option in task_options:
            _apply_task_option(document, option)
        _resolve_folders(document, folder)
        add_included(document, include)
    return validated(document, RunConfig)


def read_document(
    path: str | os.PathLike[str], overrides: Iterable[str], packaged: Mapping[str, Path]
) -> tuple[MarkedYaml, Path]:
    """A configuration file with overrides, as yet unchecked, and the folder that it lies in.

    Args:
        packaged: configurations that may be named without a path.

    Raises:
        KvaccError: there is no such file, or it cannot be read.
    """
    file, shown = _find(path, packaged)
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise KvaccError(f"{shown}: byte {error.start} is not UTF-8 text; save the file as UTF-8") from None
    except OSError as error:
        raise KvaccError(f"{shown}: cannot be read: {error.strerror}") from None
    document = read_marked(text, shown)
    for override in overrides:
        apply_override(document, override)
    if isinstance(document.value, dict):
        document.value.setdefault("name", file.stem)
    return document, file.parent


def config_from(values: dict[str, Any], source: str = "configuration") -> RunConfig:
    """The configuration given as plain values; raises KvaccError as :func:`load_config` does."""
    return validated(MarkedYaml(source, values), RunConfig)


def packaged_configs() -> dict[str, Path]:
    """The configurations of sweeps that come with kvacc, by name."""
    return {name: file for name, file in _packaged().items() if not name.startswith(_PROBES)}


def packaged_probe_configs() -> dict[str, Path]:
    """The configurations for ``kvacc probe`` that come with kvacc, by name."""
    return {name: file for name, file in _packaged().items() if name.startswith(_PROBES)}


def _packaged() -> dict[str, Path]:
    import kvacc.configs as package

    folders = [Path(folder) for folder in package.__path__]
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}


def _find(path: str | os.PathLike[str], packaged: Mapping[str, Path]) -> tuple[Path, str]:
    """The file meant by ``path``, and its name as errors shall show it."""
    file = Path(path).expanduser()
    if file.is_file():
        return file.absolute(), str(path)
    if file.is_dir():
        raise KvaccError(f"configuration {str(path)!r} is a folder; name a YAML file in it")
    is_bare = str(file.parent) in (".", "configs") and file.suffix in ("", ".yaml", ".yml")
    if is_bare and file.stem in packaged:
        return packaged[file.stem], f"configs/{packaged[file.stem].name}"
    names = ", ".join(packaged) or "none"
    close = nearest(file.stem, packaged)
    raise KvaccError(f"no configuration file {str(path)!r}{close}; packaged ones: {names}")


def _absolute(document: MarkedYaml, config_folder: Path, path: tuple[str | int, ...], text: str) -> Path:
    base = Path.cwd() if document.where(path).startswith("--") else config_folder
    return Path(os.path.normpath(base / Path(text).expanduser()))


def _resolve_folders(document: MarkedYaml, config_folder: Path) -> None:
    """Make local folders absolute, so that a run does not depend on where it was started."""
    absolute = functools.partial(_absolute, document, config_folder)
    data_dir = document.value.get("data_dir")
    if data_dir is None and os.environ.get(DATA_DIR_VARIABLE):
        folder = Path(os.environ[DATA_DIR_VARIABLE]).expanduser().absolute()
        document.value["data_dir"] = str(folder)
        document.marks[("data_dir",)] = f"environment variable {DATA_DIR_VARIABLE}"
    elif isinstance(data_dir, str) and data_dir:
        folder = absolute(("data_dir",), data_dir)
        document.value["data_dir"] = str(folder)
    else:
        folder = None
    if folder is not None and not folder.is_dir():
        document.fault(("data_dir",), f"no folder {folder}; name an existing one, or leave data_dir out")
    tasks = document.value.get("tasks")
    for index, task in enumerate(tasks if isinstance(tasks, list) else [tasks]):
        for option in task_catalog.PATH_OPTIONS if isinstance(task, dict) else ():
            if isinstance(task.get(option), str) and task[option]:
                place = ("tasks", index, option) if isinstance(tasks, list) else ("tasks", option)
                found = absolute(place, task[option])
                task[option] = str(found)
                if not found.exists():
                    document.fault(place, f"no file or folder {found}; name an existing one")
    resolve_models_and_includes(document, config_folder)


def resolve_models_and_includes(document: MarkedYaml, config_folder: Path) -> None:
    """Make paths of local models and of strategy files absolute."""
    absolute = functools.partial(_absolute, document, config_folder)
    included = document.value.get("include")
    if isinstance(included, str):
        included = document.value["include"] = [included]
    for index, name in enumerate(included if isinstance(included, list) else []):
        if isinstance(name, str) and name:
            included[index] = str(absolute(("include", index), name))
    models = document.value.get("models")
    for index, model in enumerate(models if isinstance(models, list) else []):
        path = ("models", index, "pretrained")
        name = model.get("pretrained") if isinstance(model, dict) else model
        if not isinstance(name, str) or not name:
            continue
        local = absolute(path, name)
        # A hub name looks like a relative path; only an existing folder or GGUF file makes it one.
        if name.startswith((".", "~", "/")) or local.exists():
            if isinstance(model, dict):
                model["pretrained"] = str(local)
            else:
                models[index] = str(local)


def _apply_task_option(document: MarkedYaml, word: str) -> None:
    """Give ``option=value`` to every task of the configuration that takes it."""
    where = f"--task-option {word}"
    option, equals, text = word.partition("=")
    option = option.strip()
    if not equals or not option:
        what = "write OPTION=VALUE, such as length=1024 or depths=[0, 0.5, 1]"
        document.faults.append(Fault(where, (), what))
        return
    new = read_marked(text, where)
    document.faults.extend(Fault(where, (), fault.what) for fault in new.faults)
    if new.faults:
        return
    tasks = document.value.get("tasks", AUTO)
    tasks = document.value["tasks"] = tasks if isinstance(tasks, list) else [tasks]
    takers = 0
    for index, task in enumerate(tasks):
        name = task.get("name") if isinstance(task, dict) else task
        if not isinstance(name, str) or not task_catalog.takes_option(name, option):
            continue
        takers += 1
        if not isinstance(task, dict):
            tasks[index] = task = {"name": name}
        task[option] = new.value
        for mark in [mark for mark in document.marks if mark[:3] == ("tasks", index, option)]:
            del document.marks[mark]
        document.marks["tasks", index, option] = where
    if not takers:
        names = [str(task.get("name") if isinstance(task, dict) else task) for task in tasks]
        document.faults.append(Fault(where, (), task_catalog.no_such_option(names, option)))


def add_included(document: MarkedYaml, paths: Iterable[str | os.PathLike[str]]) -> None:
    """Put files named on the command line behind those of the configuration."""
    for path in paths:
        listed = document.value.setdefault("include", [])
        file = str(Path(path).expanduser().absolute())
        if isinstance(listed, list) and file not in listed:
            document.marks[("include", len(listed))] = f"--include {path}"
            listed.append(file)
