"""``kvacc calibrate``."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from kvacc.calibrate import Answer, Calibration


@click.command()
@click.argument("config")
@click.option("--strategy", required=True, help="Whose budget is searched.")
@click.option("--margin", default="1", show_default=True, help="Largest loss accepted, in points.")
@click.option("--confidence", type=float, default=0.95, show_default=True, help="Of the bound of the loss.")
@click.option("--step", type=float, help="Distance of the fractions searched.  [default: 0.05]")
@click.option("--budgets", metavar="B,B,...", help="Search these budgets, counts or fractions, instead.")
@click.option(
    "--option", "options", multiple=True, metavar="K=V", help="Option of the strategy; may be repeated."
)
@click.option("--output", type=click.Path(), help="Folder of the runs.  [default: runs/calibrate-STRATEGY]")
@click.option("--json", "json_file", type=click.Path(), help="Write what was found as JSON too.")
@click.option("--data-dir", type=click.Path(), help="Folder with benchmark data.  [default: $KVACC_DATA_DIR]")
@click.option("--limit", type=click.IntRange(min=1), help="First items of each task only.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change one value of CONFIG; may be repeated.",
)
@click.option(
    "--include", multiple=True, metavar="FILE", help="Python file with strategies; may be repeated."
)
def calibrate(
    config: str,
    strategy: str,
    margin: str,
    confidence: float,
    step: float | None,
    budgets: str | None,
    options: tuple[str, ...],
    output: str | None,
    json_file: str | None,
    data_dir: str | None,
    limit: int | None,
    settings: tuple[str, ...],
    include: tuple[str, ...],
) -> int:
    """Find the smallest budget whose loss against the full cache stays within a margin, for each
    task of CONFIG and for their average.

    Finished cells are kept: a search with another margin or step uses them. Exit code 1 when no
    budget holds for the average of the tasks.
    """
    from kvacc.calibrate import calibrate as search
    from kvacc.calibrate import explicit_grid, fraction_grid
    from kvacc.cli.check import points
    from kvacc.cli.console import make_console
    from kvacc.config import load_config
    from kvacc.errors import KvaccError

    if budgets is not None and step is not None:
        raise KvaccError("give --step or --budgets, not both")
    if not 0.5 < confidence < 1:
        raise KvaccError(f"--confidence {confidence:g} is out of range; give one between 0.5 and 1")
    allowed = points(margin, "--margin")
    overrides = list(settings)
    if data_dir is not None:
        overrides.append(f"data_dir={json.dumps(data_dir)}")
    if limit is not None:
        overrides.append(f"limit={limit}")
    checked = load_config(config, overrides, include)
    grid = explicit_grid(budgets.split(",")) if budgets is not None else fraction_grid(step or 0.05)
    found = search(
        checked,
        strategy,
        Path(output) if output else Path("runs") / f"calibrate-{strategy}",
        margin=allowed,
        confidence=confidence,
        grid=grid,
        options=_options(options) if options else None,
        console=make_console(stderr=True),
    )
    _print(make_console(), found)
    if json_file:
        from kvacc.gate.outputs import write_text

        write_text(json_file, json.dumps(as_dict(found), indent=2, allow_nan=False) + "\n")
    return 0 if found.answers[-1].budget is not None else 1


def as_dict(found: Calibration) -> dict[str, Any]:
    """A calibration as plain values; losses in points."""
    return {
        "schema_version": 1,
        "strategy": found.strategy,
        "margin": 100 * found.margin,
        "confidence": found.confidence,
        "answers": [vars(answer) for answer in found.answers],
        "tried": [
            {
                "task": one.task,
                "budget": one.budget,
                "items": one.test.items,
                "full": one.full,
                "score": one.score,
                "kept_fraction": one.kept_fraction,
                "acted": one.acted,
                "loss": 100 * one.test.drop,
                "loss_at_most": None if one.test.high is None else 100 * one.test.high,
                "p_within": one.test.p_within,
                "method": one.test.method,
                "holds": one.holds,
            }
            for one in found.tried
        ],
        "falls": found.falls,
    }


def _options(words: tuple[str, ...]) -> dict[str, Any]:
    import yaml

    from kvacc.errors import KvaccError

    values = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise KvaccError(f"--option {word!r}: write NAME=VALUE, such as recent_fraction=0.5")
        values[key] = yaml.safe_load(value)
    return values


def _print(console: Console, found: Calibration) -> None:
    from rich import box
    from rich.table import Table

    bound = f"{100 * found.confidence:g} % bound"
    for task, group in itertools.groupby(found.tried, key=lambda one: one.task):
        members = list(group)
        first = members[0]
        heading = f"{found.strategy} on {task}: {first.test.items} items, full {100 * first.full:.1f}"
        console.print(heading, highlight=False, markup=False)
        table = Table("budget", "kept", "score", "loss", bound, "holds", box=box.SIMPLE)
        for one in members:
            high = "-" if one.test.high is None else f"{100 * one.test.high:+.1f}"
            table.add_row(
                one.budget,
                f"{100 * one.kept_fraction:.1f}%",
                f"{100 * one.score:.1f}",
                f"{100 * one.test.drop + 0.0:+.1f}",
                "unchanged" if one.test.method == "unchanged" else high,
                ("yes" if one.holds else "no") + ("" if one.acted else " (did not act)"),
            )
        console.print(table)
    for line in found.falls:
        console.print(f"not rising with the budget: {line}", highlight=False, markup=False)
    console.print(
        f"smallest budget that loses at most {100 * found.margin:g} points, "
        f"with {100 * found.confidence:g} % confidence:"
    )
    for answer in found.answers:
        console.print(f"  {answer.task}: {_words(answer)}", highlight=False, markup=False)


def _words(answer: Answer) -> str:
    against = f" ({answer.contradicted} was tried and did not hold, so smaller ones are not trusted)"
    against = against if answer.contradicted else ""
    if answer.budget is not None:
        return f"{answer.budget}{against}"
    needed = f"; about {answer.needed} items would show one that loses nothing" if answer.needed else ""
    return f"no budget below everything holds at this margin with {answer.items} items{against or needed}"
