"""``kvacc doctor``."""

from __future__ import annotations

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--data-dir", type=click.Path(), envvar="KVACC_DATA_DIR", help="Folder with benchmark data.")
def doctor(as_json: bool, data_dir: str | None) -> None:
    """Show what is installed, which devices there are, and what can be reached."""
    from kvacc.doctor import examine

    findings = examine(data_dir=data_dir)
    if as_json:
        import json

        click.echo(json.dumps([finding.as_dict() for finding in findings], indent=2))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from kvacc.cli.console import make_console

    table = Table("", "what", "finding", "to change it", box=box.SIMPLE)
    styles = {"ok": "green", "absent": "yellow", "problem": "red"}
    for finding in findings:
        state = Text(finding.state, style=styles[finding.state])
        table.add_row(state, Text(finding.what), Text(finding.finding), Text(finding.mend))
    make_console().print(table)
    if any(finding.state == "problem" for finding in findings):
        raise click.exceptions.Exit(1)
