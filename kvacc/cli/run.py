"""``kvacc run``."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("config")
@click.option("--output", type=click.Path(), help="Folder of the results.  [default: runs/NAME]")
@click.option("--data-dir", type=click.Path(), help="Folder with benchmark data.  [default: $KVACC_DATA_DIR]")
@click.option("--limit", type=click.IntRange(min=1), help="First items of each task only.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change one value of CONFIG, such as --set strategies.1.budgets=[0.5]; may be repeated.",
)
@click.option(
    "--task-option",
    "task_options",
    multiple=True,
    metavar="OPTION=VALUE",
    help="Option of every task that takes it, such as length=1024 or depths=[0,0.5,1]; may be repeated.",
)
@click.option(
    "--include", multiple=True, metavar="FILE", help="Python file with strategies; may be repeated."
)
@click.option("--extend", is_flag=True, help="Add the cells to a folder made by another configuration.")
def run(
    config: str,
    output: str | None,
    data_dir: str | None,
    limit: int | None,
    settings: tuple[str, ...],
    task_options: tuple[str, ...],
    include: tuple[str, ...],
    extend: bool,
) -> None:
    """Run the sweep that CONFIG describes: a YAML file, or the name of one that comes with
    kvacc (quickstart, ci, paper, paradigms, retention, depths, long-context, gpu-llama).

    Finished cells are kept: the same command again goes on where it was stopped.
    """
    from kvacc.cli.console import make_console
    from kvacc.cli.leaderboard import show
    from kvacc.config import load_config
    from kvacc.sweep import run_sweep

    overrides = list(settings)
    # JSON is YAML, and quotes whatever a folder's name may contain.
    if data_dir is not None:
        overrides.append(f"data_dir={json.dumps(data_dir)}")
    if limit is not None:
        overrides.append(f"limit={limit}")
    checked = load_config(config, overrides, include, task_options)

    folder = Path(output) if output else Path("runs") / checked.name
    # Progress goes to the error stream, so that a pipe gets the table alone.
    report = run_sweep(checked, folder, console=make_console(stderr=True), extend=extend)
    if len(report.failed) < report.planned:
        show([folder], console=make_console())
    if report.failed:
        raise click.ClickException(f"{len(report.failed)} of {report.planned} cells failed, as listed above")
