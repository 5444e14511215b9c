"""``kvacc strategies``."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kvacc.strategy import Strategy


@click.command()
@click.argument("name", required=False)
@click.option(
    "--include", multiple=True, metavar="FILE", help="Python file with strategies; may be repeated."
)
def strategies(name: str | None, include: tuple[str, ...]) -> None:
    """List the strategies, or show NAME with its options."""
    from kvacc.errors import unknown
    from kvacc.include import include as include_files
    from kvacc.strategy import strategy_classes

    include_files(*include)
    classes = strategy_classes()
    if name is None:
        _list(classes)
    elif name in classes:
        _show(classes[name])
    else:
        raise unknown("strategy", name, classes)


def _list(classes: dict[str, type[Strategy]]) -> None:
    from rich import box
    from rich.table import Table

    from kvacc.cli.console import make_console

    headers = ("strategy", "kind", "protocols", "options and defaults", "what it does", "source")
    table = Table(*headers, box=box.SIMPLE)
    for name, cls in classes.items():
        paper = cls.source.partition(",")[0]
        protocols = ", ".join(cls.protocols)
        table.add_row(name, kind(cls), protocols, _options(cls) or "-", cls.summary, paper)
    make_console().print(table)


def _show(cls: type[Strategy]) -> None:
    click.echo(f"{cls.name}: {cls.summary}")
    click.echo(f"  kind       {kind(cls)}")
    click.echo(f"  protocols  {', '.join(cls.protocols)}")
    click.echo(f"  budget     {'a fraction (0.2) or a count of entries (256)' if cls.has_budget else 'none'}")
    click.echo(f"  options    {_options(cls) or 'none'}")
    click.echo(f"  source     {cls.source}")
    click.echo("\n" + inspect.cleandoc(cls.__doc__ or ""))


def kind(cls: type[Strategy]) -> str:
    """DESIGN's word for what the strategy needs from the engine, from its base class:
    ``EvictStrategy`` is ``evict``. One without such a base keeps every token: ``engine``."""
    names = [base.__name__ for base in cls.__mro__ if base.__name__.endswith("Strategy")]
    word = names[0].removesuffix("Strategy").lower() or "engine"
    return f"{word} (control)" if cls.is_control else word


def _options(cls: type[Strategy]) -> str:
    options = [field for field in dataclasses.fields(cls) if field.init and field.name != "budget"]
    return ", ".join(f"{option.name}={option.default}" for option in options)
