"""``kvacc tasks``."""

from __future__ import annotations

import functools

import click


@click.command()
@click.argument("name", required=False)
@click.option("--data-dir", type=click.Path(), envvar="KVACC_DATA_DIR", help="Folder with benchmark data.")
def tasks(name: str | None, data_dir: str | None) -> None:
    """List the tasks, or show NAME, and whether their documents can be reached."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from kvacc.cli.console import make_console
    from kvacc.task_catalog import TaskInfo, TaskSource, find_task, hub_reachable, task_names

    # The hub is asked once, not once per benchmark.
    hub = functools.cache(hub_reachable)

    def availability(info: TaskInfo) -> tuple[TaskSource, bool, str]:
        source = info.source(data_dir)
        return source, *(hub() if source is TaskSource.HUB else info.available(data_dir))

    infos = [find_task(name)] if name else list(task_names().values())
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
    for reason in obstacles:
        click.echo(f"not reachable: {reason}")
    if obstacles:
        click.echo("give --data-dir or set KVACC_DATA_DIR to use a folder of documents instead of the hub")
