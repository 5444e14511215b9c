"""``kvacc models``."""

from __future__ import annotations

import click


@click.group()
def models() -> None:
    """Models by alias or name. Any Hugging Face decoder works, not only those listed."""


@models.command("list")
def list_models() -> None:
    """List the models that the examples use."""
    from rich import box
    from rich.table import Table

    from kvacc.cli.console import make_console
    from kvacc.embedded_model import EMBEDDED, is_ready
    from kvacc.models import KNOWN_MODELS

    table = Table("model", "parameters", "origin", "note", box=box.SIMPLE)
    for model in KNOWN_MODELS:
        note = model.note
        if model.name in EMBEDDED:
            note += "; ready" if is_ready(EMBEDDED[model.name]) else "; converted at first use"
        table.add_row(model.name, model.parameters, model.origin, note)
    make_console().print(table)
    click.echo("Any other Hugging Face decoder works too: give its hub name or a folder as pretrained.")


@models.command()
@click.argument("alias")
def path(alias: str) -> None:
    """Print the folder of an embedded model's checkpoint, making it when needed."""
    from kvacc.embedded_model import EMBEDDED, checkpoint
    from kvacc.errors import unknown

    if alias not in EMBEDDED:
        raise unknown("alias", alias, EMBEDDED)
    click.echo(str(checkpoint(EMBEDDED[alias])))
