"""``kvacc baseline``: make, change and show the file that ``kvacc check`` compares with."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def baseline() -> None:
    """Make, change or show the baseline file that kvacc check compares with."""


@baseline.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path())
@click.option("--output", required=True, type=click.Path(), help="The file to make.")
@click.option("--reason", required=True, help="Why; kept in the file.")
def create(runs: tuple[str, ...], output: str, reason: str) -> None:
    """Make a baseline of all cells below the folders RUNS."""
    from kvacc.errors import KvaccError
    from kvacc.gate.baseline import make_baseline, write_baseline
    from kvacc.results import read_cells

    if Path(output).exists():
        raise KvaccError(
            f"{output} exists; change it with: kvacc baseline update RUNS --baseline {output} --reason ..."
        )
    made = make_baseline(read_cells(runs), reason)
    write_baseline(output, made)
    _print_changes(made.history[-1].changes)
    click.echo(f"written: {output}, {len(made.cells)} cells")


@baseline.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path())
@click.option("--baseline", "file", required=True, type=click.Path(), help="The file to change.")
@click.option("--reason", required=True, help="Why; kept in the file.")
@click.option("--remove-missing", is_flag=True, help="Drop cells that RUNS lack.")
def update(runs: tuple[str, ...], file: str, reason: str, remove_missing: bool) -> None:
    """Put the cells below RUNS in place of those that they answer, and say what changes."""
    from kvacc.gate.baseline import read_baseline, update_baseline, write_baseline
    from kvacc.results import read_cells

    known = read_baseline(file)
    changed, lines = update_baseline(known, read_cells(runs), reason, remove_missing=remove_missing)
    if not lines:
        click.echo(f"{file} has these results already; nothing changed")
        return
    write_baseline(file, changed)
    _print_changes(lines)
    click.echo(f"written: {file}, {len(changed.cells)} cells")


@baseline.command()
@click.argument("file", type=click.Path())
def show(file: str) -> None:
    """Show the cells of a baseline FILE, and the reasons for its changes."""
    from rich import box
    from rich.table import Table

    from kvacc.cli.console import make_console
    from kvacc.gate.baseline import read_baseline

    known = read_baseline(file)
    table = Table("cell", "metric", "score", "items", "kept", "seed", "task version", box=box.SIMPLE)
    for one in known.cells:
        table.add_row(
            one.label,
            str(one.task["primary_metric"]),
            f"{100 * one.score:.1f}",
            str(one.items),
            f"{100 * one.kept_fraction:.1f}%",
            str(one.spec["seed"]),
            str(one.task["version"]),
        )
    make_console().print(table)
    for number, entry in enumerate(known.history, 1):
        count = len(entry.changes)
        click.echo(f"{number}. {entry.reason} (kvacc {entry.kvacc}, {count} cell{'s' if count != 1 else ''})")


def _print_changes(lines: list[str]) -> None:
    for line in lines:
        click.echo(line)
