"""``kvacc results``: list, show, compare, export, merge and check what was computed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvacc.errors import KvaccError, nearest, unknown

if TYPE_CHECKING:
    from kvacc.results import Cell
    from kvacc.store import Store

FORMATS = ("csv", "json", "markdown", "latex")
TABLES = ("cells", "scores", "samples", "documents")
# Option of the command line -> column of the table cells.
_FILTERS = ("model", "task", "strategy", "budget", "protocol", "shots")

_RUNS = click.argument("runs", nargs=-1, required=True, type=click.Path())


def _filtered(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that choose cells; the command gets the chosen ones as ``store``."""

    @functools.wraps(command)
    def with_store(*, runs: tuple[str, ...], where: str | None, skip_damaged: bool, **options: Any) -> Any:
        from kvacc.store import Store

        chosen = {name: options.pop(name) for name in _FILTERS}
        store = Store.open(runs, skip_damaged=skip_damaged)
        for damage in store.damaged:
            click.echo(f"left out: {damage.message}", err=True)
        return command(store=store.select(where, **chosen), **options)

    with_store = click.option(
        "--skip-damaged", is_flag=True, help="Leave damaged cells out and name them, instead of stopping."
    )(with_store)
    with_store = click.option(
        "--where", metavar="SQL", help="A condition over the columns of cells, such as 'kept_fraction < 0.3'."
    )(with_store)
    for name in reversed(_FILTERS):
        with_store = click.option(f"--{name}", multiple=True, help=f"Only this {name}; may be repeated.")(
            with_store
        )
    return _RUNS(with_store)


class _Group(click.Group):
    """Names the nearest command for one that there is not."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if not args[0].startswith("-") and args[0] not in self.commands:
            raise unknown("command", args[0], self.commands)
        return super().resolve_command(ctx, args)


@click.group(cls=_Group)
def results() -> None:
    """Look into results: folders that `kvacc run` filled, one or several at once.

    Every file is checked first. What is damaged is named, and never averaged in.
    """


@results.command("list")
@_filtered
def list_cells(store: Store) -> None:
    """List the cells below the folders RUNS."""
    from kvacc.cli.console import make_console
    from kvacc.cli.results_view import cells_view

    make_console().print(cells_view(store.rows("cells")))


@results.command()
@click.argument("cell", type=click.Path())
@click.option(
    "--samples", default=5, show_default=True, type=click.IntRange(0), help="Rows of samples to show."
)
def show(cell: str, samples: int) -> None:
    """Show everything of one CELL: RUN/ID, or RUN and the first letters of the id."""
    from kvacc.cli.console import make_console
    from kvacc.cli.results_view import cell_view

    make_console().print(cell_view(find_cell(Path(cell)), samples), soft_wrap=False)


@results.command()
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option(
    "--flips", "shown", default=20, show_default=True, type=click.IntRange(0), help="Documents to list."
)
def diff(a: str, b: str, shown: int) -> None:
    """Compare B with A, item by item: two cells, or two runs whose cells of equal settings are matched."""
    from kvacc.cli.console import make_console
    from kvacc.cli.results_view import diff_view, run_diff_view
    from kvacc.store import Store
    from kvacc.store.diff import diff_cells, match_cells

    console = make_console()
    runs = [_is_run(Path(path)) for path in (a, b)]
    if runs[0] != runs[1]:
        run, cell = (a, b) if runs[0] else (b, a)
        raise KvaccError(f"{run} is a run and {cell} a cell; name two cells (RUN/ID) or two runs")
    if not runs[0]:
        console.print(diff_view(diff_cells(find_cell(Path(a)), find_cell(Path(b))), shown))
        return
    pairs, only_a, only_b = match_cells(Store.open(a).cells, Store.open(b).cells)
    console.print(run_diff_view([diff_cells(*pair) for pair in pairs], only_a, only_b))


@results.command()
@click.option("--by", multiple=True, metavar="COLUMN", help="Group by this column of cells; may be repeated.")
@click.option("--metric", help="A metric of the samples; by default each task's own.")
@_filtered
def aggregate(store: Store, by: tuple[str, ...], metric: str | None) -> None:
    """Average over the documents of groups of cells; protocols and metrics are never mixed."""
    from kvacc.cli.console import make_console
    from kvacc.cli.results_view import rows_view
    from kvacc.store import DEFAULT_GROUPS

    names = [name for word in by for name in word.split(",")] or DEFAULT_GROUPS
    make_console().print(rows_view(store.aggregate(names, metric)))


@results.command()
@click.option(
    "--format", "format", type=click.Choice(FORMATS), default="csv", show_default=True, help="Of the file."
)
@click.option(
    "--what", type=click.Choice(TABLES), default="cells", show_default=True, help="Table to export."
)
@click.option("--columns", metavar="A,B,...", help="Columns in this order; see them in a CSV export.")
@click.option("--output", type=click.Path(dir_okay=False), help="File to write; by default the terminal.")
@_filtered
def export(store: Store, format: str, what: str, columns: str | None, output: str | None) -> None:
    """Export a table of the results; the same results give the same bytes."""
    from kvacc.store.export import as_text, choose_columns, write_text

    names = [name.strip() for name in columns.split(",")] if columns else None
    table = choose_columns(store.table(what), what, format, names)
    if output is None:
        for piece in as_text(table, format):
            sys.stdout.write(piece)
        return
    write_text(as_text(table, format), output)
    click.echo(f"written: {output} ({_count(table.num_rows, 'row')})")


@results.command()
@_RUNS
@click.option(
    "--output", required=True, type=click.Path(), help="Folder of the merged run; may have cells already."
)
def merge(runs: tuple[str, ...], output: str) -> None:
    """Copy the cells of RUNS, from other machines too, into one folder.

    The same cell with different results in two folders is an error, and then nothing is copied.
    """
    from kvacc.store.merge import merge as merge_runs

    report = merge_runs(runs, output)
    known = f", {len(report.present)} were there already" if report.present else ""
    click.echo(f"{_count(len(report.copied), 'cell')} copied to {report.folder}{known}")


@results.command()
@_RUNS
def check(runs: tuple[str, ...]) -> None:
    """Check every file below the folders RUNS; exit code 1 when a cell is damaged."""
    from kvacc.store import Store
    from kvacc.store.check import examine_runs

    store = Store.open(runs, skip_damaged=True)
    problems, notes = examine_runs(runs, store.cells)
    for message in [*(damage.message for damage in store.damaged), *problems]:
        click.echo(f"damaged: {message}")
    for note in notes:
        click.echo(f"note: {note}")
    rows = store.sql("SELECT count(*) AS rows FROM samples").to_pylist()[0]["rows"]
    wrong = f"{len(store.damaged)} damaged" if store.damaged else "none damaged"
    also = f", {_count(len(problems), 'other problem')}" if problems else ""
    click.echo(
        f"{_count(len(store.cells), 'sound cell')} with {_count(rows, 'row')} of samples, {wrong}{also}"
    )
    if store.damaged or problems:
        sys.exit(1)


@results.command()
@click.argument("query")
@_RUNS
@click.option("--format", "format", type=click.Choice(FORMATS), help="By default a table for the terminal.")
def sql(query: str, runs: tuple[str, ...], format: str | None) -> None:
    """Ask QUERY, one SELECT in DuckDB's SQL, of the results below RUNS.

    \b
    Tables: cells (one row per cell), scores (per cell and metric),
    samples (per request), documents (per cell and document: average over these).
    Columns: kvacc results sql 'FROM (DESCRIBE cells)' RUNS
    """
    from kvacc.cli.console import make_console
    from kvacc.cli.results_view import rows_view
    from kvacc.store import Store
    from kvacc.store.export import as_text

    answer = Store.open(runs).sql(query)
    if format is None:
        make_console().print(rows_view(answer.to_pylist(), answer.column_names))
        return
    for piece in as_text(answer, format):
        sys.stdout.write(piece)


def find_cell(path: Path) -> Cell:
    """The cell that a person means by a folder, or by a run's folder and the first letters of an id.

    Raises:
        KvaccError: there is none, or there are several.
    """
    from kvacc.results import CELL_FILE, find_folders, read_cell

    if (path / CELL_FILE).exists() or path.name == CELL_FILE:
        return read_cell(path)
    folders = find_folders([path]) if path.exists() else []
    if len(folders) == 1:
        return read_cell(folders[0])
    if folders:
        raise KvaccError(f"{path} holds {len(folders)} cells; name one, such as {path}/{folders[0].name}")
    known = {folder.name: folder for folder in find_folders([path.parent])}
    meant = [name for name in known if name.startswith(path.name)]
    if len(meant) > 1:
        raise KvaccError(
            f"{path.name!r} begins {len(meant)} ids in {path.parent}: {', '.join(meant)}; give one"
        )
    if not meant:
        raise KvaccError(
            f"no cell in {path.parent} has an id that begins with {path.name!r}{nearest(path.name, known)}; "
            f"see them with: kvacc results list {path.parent}"
        )
    return read_cell(known[meant[0]])


def _is_run(path: Path) -> bool:
    from kvacc.results import CELL_FILE, SAMPLES_FILE

    is_cell = (path / CELL_FILE).exists() or (path / SAMPLES_FILE).exists() or path.name == CELL_FILE
    return path.is_dir() and not is_cell


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
