"""``kvacc tasks``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kvacc.task_catalog import TaskInfo


@click.command()
@click.argument("name", required=False)
@click.option("--data-dir", type=click.Path(), envvar="KVACC_DATA_DIR", help="Folder with benchmark data.")
def tasks(name: str | None, data_dir: str | None) -> None:
    """List the tasks, or show NAME with its options and an example, and whether documents can be reached."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from kvacc.cli.console import make_console
    from kvacc.task_catalog import (
        GROUPS,
        TaskSource,
        find_task,
        hub_reachable,
        members,
        option_names,
        task_names,
    )

    # The hub is asked once, not once per benchmark.
    hub = functools.cache(hub_reachable)

    def availability(info: TaskInfo) -> tuple[TaskSource, bool, str]:
        source = info.source(data_dir)
        return source, *(hub() if source is TaskSource.HUB else info.available(data_dir))

    infos = [find_task(task) for task in (members(name) if name else task_names())]
    table = Table("task", "kind", "chance", "metric", "documents", "what it is", box=box.SIMPLE)
    obstacles: dict[str, None] = {}
    for info in infos:
        source, usable, reason = availability(info)
        if not usable:
            obstacles[reason] = None
        where = Text(str(source)) if usable else Text(f"{source}: not reachable", style="yellow")
        chance = "-" if info.chance is None else f"{info.chance:g}"
        table.add_row(info.name, info.kind, chance, info.default_metric, where, info.description)
    make_console().print(table)
    if name and (options := option_names(name)):
        _show_options(name, options)
    if name and len(infos) == 1 and infos[0].generator:
        _show_example(infos[0])
    for group, tasks_of_group in GROUPS.items() if not name else ():
        click.echo(f"{group}: all {len(tasks_of_group)} {group} tasks, in configurations")
    for reason in obstacles:
        click.echo(f"not reachable: {reason}")
    if obstacles:
        click.echo("give --data-dir or set KVACC_DATA_DIR to use a folder of documents instead of the hub")


_LONGTEXT_OPTIONS = {
    "texts": ("the data folder's, or kvacc's own", ".txt or .jsonl file, or a folder of them"),
    "window": ("the model's context", "tokens that are read together"),
    "characters": ("all", "at most so many of each text"),
}


def _show_options(name: str, options: tuple[str, ...]) -> None:
    """What ``--task-option`` and configurations can say of the task, and what holds without."""
    from rich import box
    from rich.table import Table

    from kvacc.cli.console import make_console
    from kvacc.task_catalog import find_task, members

    table = Table("option", "default", "what it is", box=box.SIMPLE)
    described = (
        _LONGTEXT_OPTIONS if name == "kvacc_longtext" else _retention_options(find_task(members(name)[0]))
    )
    for option in options:
        default, meaning = described.get(option, ("-", ""))
        table.add_row(option, default, meaning)
    make_console().print(table)


def _retention_options(info: TaskInfo) -> dict[str, tuple[str, str]]:
    """(default, meaning) of each option."""
    from kvacc.tasks.retention.settings import LONGEST, SHORTEST, Settings

    default = Settings()
    facts = info.kind_of_documents().facts
    return {
        "length": (
            str(default.length),
            f"tokens of the prompt, {SHORTEST} to {LONGEST}; several multiply cells",
        ),
        "depths": (
            ", ".join(f"{depth:g}" for depth in default.depths),
            "where the asked fact lies, 0 (start) to 1 (end)",
        ),
        "facts": (str(facts.default), str(facts)) if facts else ("-", "where a task has more than one"),
        "items": (str(default.items), "documents per depth"),
        "data_seed": (str(default.data_seed), "another seed, other documents"),
        "filler": ("generated", "text file or folder of .txt files to hide the facts in"),
    }


def _show_example(info: TaskInfo) -> None:
    """One document, as short as the task makes them."""
    from kvacc.tasks.retention.documents import documents
    from kvacc.tasks.retention.settings import SHORTEST, Settings

    (document, *_) = documents(info.kind_of_documents(), Settings(length=SHORTEST, items=1))
    depth = "" if document["depth"] is None else f", depth {document['depth']:g}"
    click.echo(f"an example ({SHORTEST} tokens{depth}):\n")
    click.echo(f"{document['context']}\n{document['question']}\n")
    if info.name.endswith("_generate"):
        click.echo(f"right: {document['answer']}")
        return
    for option in document["options"]:
        click.echo(f"{'right' if option == document['answer'] else 'wrong'}: {option}")
