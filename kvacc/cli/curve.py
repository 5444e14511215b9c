"""``kvacc curve``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path())
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "markdown", "csv"]),
    default="table",
    show_default=True,
    help="How to print it.",
)
def curve(runs: tuple[str, ...], form: str) -> None:
    """Perplexity by position over long texts, full beside every strategy, from the results
    below the folders RUNS (task kvacc_longtext)."""
    from kvacc import curve as by_position
    from kvacc.cli.console import make_console
    from kvacc.results import read_cells

    tables = by_position.curves(read_cells([Path(run) for run in runs]))
    if form == "table":
        make_console().print(by_position.render_table(tables))
    else:
        text = by_position.to_csv(tables) if form == "csv" else by_position.to_markdown(tables)
        click.echo(text, nl=False)
