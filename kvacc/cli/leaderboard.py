"""``kvacc leaderboard``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path())
@click.option("--write", "folder", type=click.Path(), help="Write leaderboard.md, .csv and .json here too.")
@click.option("--quiet", is_flag=True, help="Do not print the table.")
def leaderboard(runs: tuple[str, ...], folder: str | None, quiet: bool) -> None:
    """Compare the cells below the folders RUNS, each paired with the full cache on the same
    items."""
    from kvacc.cli.console import make_console

    show([Path(run) for run in runs], console=make_console(), write_to=folder, table=not quiet)


def show(runs: Sequence[Path], *, console: Console, write_to: str | None = None, table: bool = True) -> None:
    """Print the leaderboard of result folders, and write its files when ``write_to`` is given."""
    from kvacc import leaderboard as board
    from kvacc.results import read_cells

    rows = board.build(read_cells(runs))
    if table:
        console.print(board.render_table(rows, width=console.width))
    if write_to is not None:
        board.write(rows, Path(write_to))
        console.print(f"written: {Path(write_to)}/leaderboard.md, .csv and .json", highlight=False)
