"""``kvacc lm-eval``: lm-eval's own command line, with the kvacc backend and tasks in it.

Arguments go to lm-eval as they are. Taken out of them are only ``--data-dir DIR`` (the
six benchmarks then come from that folder, under their own names) and ``--include FILE``
(strategies of your own), and refused is only
``--use_cache``, whose key knows neither the model nor the strategy: a second strategy
would be given the first one's answers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from kvacc.errors import KvaccError


@click.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lm_eval(arguments: tuple[str, ...]) -> None:
    """Run lm-eval's command line: kvacc lm-eval run --model kvacc --model_args ... --tasks ..."""
    rest, included = take_included(arguments)
    rest, data_dir = take_data_dir(rest)
    refuse_use_cache(rest)

    import kvacc  # noqa: F401 - registers the backend
    from kvacc.include import include

    include(*included)
    with our_tasks(data_dir), _command_line(["lm-eval", *rest]):
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()


def take_included(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without ``--include``, and its values. ``--include_path`` is lm-eval's."""
    rest: list[str] = []
    included: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name != "--include":
            rest.append(word)
            continue
        included.append(value if equals else next(words, ""))
        if not included[-1] or included[-1].startswith("--"):
            raise KvaccError(
                "--include needs a Python file with strategies, such as --include my_strategy.py"
            )
    return rest, included


def take_data_dir(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """The arguments without ``--data-dir``, and its value (else ``KVACC_DATA_DIR``'s)."""
    rest: list[str] = []
    data_dir = os.environ.get("KVACC_DATA_DIR") or None
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in ("--data-dir", "--data_dir"):
            rest.append(word)
            continue
        data_dir = value if equals else next(words, "")
        if not data_dir or data_dir.startswith("--"):
            raise KvaccError("--data-dir needs a folder, such as --data-dir ../shared/data")
    return rest, data_dir


def refuse_use_cache(arguments: Sequence[str]) -> None:
    """Raise KvaccError when lm-eval's result cache is asked for, on the command line or in
    the file that ``--config`` names."""
    # argparse takes unique beginnings of an option for the option.
    names = [word.partition("=")[0] for word in arguments]
    asked = any(name.startswith("-c") or (len(name) > 3 and "--use_cache".startswith(name)) for name in names)
    for word, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, attached = word.partition("=")
        if name in ("--config", "-C"):
            asked = asked or _asks_for_cache(attached if equals else value)
    if asked:
        raise KvaccError(
            "--use_cache is refused: lm-eval's cache does not tell models or strategies apart, so one "
            "strategy would get another's answers; leave it out (`kvacc run` resumes safely)"
        )


def _asks_for_cache(file: str) -> bool:
    import yaml

    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False  # lm-eval says what is wrong with the file
    return isinstance(content, dict) and bool(content.get("use_cache"))


@contextlib.contextmanager
def our_tasks(data_dir: str | None) -> Iterator[None]:
    """Within it, lm-eval finds kvacc's tasks beside those of ``--include_path``.

    lm-eval takes one folder, and a folder's YAML files include their neighbours by
    relative path, so folders cannot be merged. Its ``TaskManager`` accepts several: the
    class is replaced by one that adds ours, and put back at the end.
    """
    import lm_eval.tasks as tasks

    from kvacc.task_catalog import write_task_yamls

    original = tasks.TaskManager
    ours: Path

    class WithOurTasks(original):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, include_path: Any = None, **options: Any) -> None:
            given = include_path or []
            given = [given] if isinstance(given, (str, Path)) else list(given)
            # Later folders win, so what the user gives comes last.
            with _without_override_warnings(ours):
                super().__init__(*args, include_path=[str(ours), *given], **options)

    with tempfile.TemporaryDirectory(prefix="kvacc-tasks-") as folder:
        ours = write_task_yamls(folder, data_dir)
        tasks.TaskManager = WithOurTasks
        try:
            yield
        finally:
            tasks.TaskManager = original


@contextlib.contextmanager
def _without_override_warnings(folder: Path) -> Iterator[None]:
    """Holds back lm-eval's warning for each benchmark that comes from the data folder, as asked."""
    logger = logging.getLogger("lm_eval.tasks._index")

    def is_wanted(record: logging.LogRecord) -> bool:
        task, overrides, _ = record.getMessage().partition(" overrides existing task")
        return not (overrides and f"from {folder}" in task)

    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)


@contextlib.contextmanager
def _command_line(words: list[str]) -> Iterator[None]:
    """lm-eval reads ``sys.argv``."""
    before = sys.argv
    sys.argv = words
    try:
        yield
    finally:
        sys.argv = before
