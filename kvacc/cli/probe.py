"""``kvacc probe``."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("config")
@click.option("--output", type=click.Path(), help="Folder of the results.  [default: runs/NAME]")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change one value of CONFIG, such as --set prompts=[4096]; may be repeated.",
)
@click.option(
    "--include", multiple=True, metavar="FILE", help="Python file with strategies; may be repeated."
)
@click.option(
    "--only", metavar="MEASURES", help="Of latency, memory, transfers, capacity: those to measure, by commas."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "markdown", "csv"]),
    default="table",
    show_default=True,
    help="How to print it.",
)
def probe(
    config: str,
    output: str | None,
    settings: tuple[str, ...],
    include: tuple[str, ...],
    only: str | None,
    form: str,
) -> None:
    """Measure time, memory and transfers as CONFIG describes: a YAML file, or the name of one
    that comes with kvacc (probe, probe-h2o-4k).

    Cases of the same sizes are timed in turns, on the step path. Finished cases are kept: the
    same command again goes on where it was stopped.
    """
    from kvacc.cli.console import make_console
    from kvacc.probes.config import load_probe_config
    from kvacc.probes.run import run_probes

    overrides = list(settings)
    if only is not None:
        overrides.append(f"measures={json.dumps([word.strip() for word in only.split(',')])}")
    checked = load_probe_config(config, overrides, include)
    folder = Path(output) if output else Path("runs") / checked.name
    # Progress goes to the error stream, so that a pipe gets the table alone.
    report = run_probes(checked, folder, console=make_console(stderr=True))
    _show(report, form)
    failed = len(report.failures) + len(report.refused)
    if failed and failed == report.planned:
        raise click.ClickException(f"none of {report.planned} cases could run, as listed above")


def _show(report, form: str) -> None:
    from kvacc.cli.console import make_console
    from kvacc.probes import report as tables
    from kvacc.probes.rows import build_rows

    rows = build_rows(report.records)
    if form == "table":
        make_console().print(tables.render_table(rows, report.capacities))
    elif form == "csv":
        # One table has one kind of line; JSON has both.
        only_searches = report.capacities and not rows
        text = tables.capacities_to_csv(report.capacities) if only_searches else tables.to_csv(rows)
        click.echo(text, nl=False)
    else:
        text = tables.to_json if form == "json" else tables.to_markdown
        click.echo(text(rows, report.capacities), nl=False)
