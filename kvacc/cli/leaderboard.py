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
@click.option(
    "--write", "folder", type=click.Path(), help="Write leaderboard.md, .csv, .json and .html here too."
)
@click.option("--html", "page", type=click.Path(), metavar="FILE", help="Write the page alone to this file.")
@click.option("--quiet", is_flag=True, help="Do not print the table.")
def leaderboard(runs: tuple[str, ...], folder: str | None, page: str | None, quiet: bool) -> None:
    """Compare the cells below the folders RUNS, each paired with the full cache on the same
    items.

    The page is one HTML file that works offline: table, pictures, the items that flipped,
    and the configuration behind every number.
    """
    from kvacc.cli.console import make_console

    show([Path(run) for run in runs], console=make_console(), write_to=folder, page=page, table=not quiet)


def show(
    runs: Sequence[Path],
    *,
    console: Console,
    write_to: str | None = None,
    page: str | None = None,
    table: bool = True,
) -> None:
    """Print the leaderboard of result folders, and write its files where ``write_to`` (a folder)
    or ``page`` (an HTML file) is given."""
    from kvacc import leaderboard as board
    from kvacc.page import write_page
    from kvacc.store import Store

    _require_html(page)
    cells = Store.open(runs).cells
    rows = board.build(cells)
    if table:
        console.print(board.render_table(rows, width=console.width))
    if write_to is not None:
        board.write(rows, Path(write_to))
        write_page(cells, Path(write_to) / "leaderboard.html", rows)
        console.print(f"written: {Path(write_to)}/leaderboard.md, .csv, .json and .html", highlight=False)
    if page is not None:
        console.print(f"written: {write_page(cells, page, rows)}", highlight=False)


def _require_html(page: str | None) -> None:
    """Before minutes are spent on the results of a mistyped name."""
    from kvacc.errors import KvaccError

    if page is not None and Path(page).suffix.lower() not in (".html", ".htm"):
        raise KvaccError(f"--html {page}: the page is HTML; name a file that ends in .html")
