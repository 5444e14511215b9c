"""``kvacc verify``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from kvacc.strategy import Strategy
    from kvacc.verify.results import Failure, Report, Result

_STYLES = {"holds": "green", "fails": "bold red", "not applicable": "dim"}
_NOTES_SHOWN = 3


@click.command()
@click.argument("strategy")
@click.option(
    "--model", metavar="M", help="Name, folder or alias such as smollm2-135m.  [default: tiny models]"
)
@click.option(
    "--include", multiple=True, metavar="FILE", help="Python file with strategies; may be repeated."
)
@click.option(
    "--option", "options", multiple=True, metavar="K=V", help="Option of the strategy; may be repeated."
)
@click.option("--budget", "budgets", multiple=True, metavar="B", help="Budget to try; may be repeated.")
@click.option("--tokens", type=click.IntRange(8, 400), help="Length of the longer text.  [default: 26]")
def verify(
    strategy: str,
    model: str | None,
    include: tuple[str, ...],
    options: tuple[str, ...],
    budgets: tuple[str, ...],
    tokens: int | None,
) -> int:
    """Check STRATEGY, one of kvacc's or of an included file, against ten invariants.

    Shows what holds, and for what fails the smallest failing case. The exit code is 0
    when all that applies holds, and 1 when something fails.
    """
    from kvacc.cli.console import make_console
    from kvacc.include import include as include_files
    from kvacc.verify.bench import DEFAULT_TOKENS, with_budget

    include_files(*include)
    checked = _strategy(strategy, options)
    if budgets and checked.has_budget:
        for budget in budgets:
            with_budget(checked, budget)  # a wrong one is said before a model is loaded
    report = _run(checked, model, budgets, tokens or DEFAULT_TOKENS)
    console = make_console()
    _print(console, report)
    if report.failures:
        return 1
    _require_acted(checked, report)
    return 0


def _strategy(name: str, options: tuple[str, ...]) -> Strategy:
    from kvacc.config import strategy_from_words
    from kvacc.errors import KvaccError

    values = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key:
            raise KvaccError(f"--option {option!r}: write NAME=VALUE, such as recent_fraction=0.5")
        values[key] = value
    return strategy_from_words(name, values)


def _run(strategy: Strategy, model: str | None, budgets: tuple[str, ...], tokens: int) -> Report:
    from kvacc.verify import loaded_subject, verify_strategy

    subjects = None if model is None else [loaded_subject(model)]
    with _few_threads(model), _progress() as tell:
        return verify_strategy(strategy, subjects, budgets or None, tokens, progress=tell)


@contextlib.contextmanager
def _few_threads(model: str | None) -> Iterator[None]:
    """Tiny models are slower on several threads than on one."""
    import torch

    before = torch.get_num_threads()
    if model is None:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is being checked, on the error stream of a terminal."""
    from kvacc.cli.console import make_console

    console = make_console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("preparing") as status:
        yield status.update


def _print(console: Console, report: Report) -> None:
    from rich import box
    from rich.table import Table

    console.print(f"{report.strategy} on {', '.join(report.models)}", highlight=False, markup=False)
    table = Table("", "invariant", "result", "checked", "note", box=box.SIMPLE)
    for result in report.results:
        style = _STYLES[result.status]
        table.add_row(
            str(result.invariant),
            result.title,
            f"[{style}]{result.status}[/]",
            _checked(result),
            _note(result),
        )
    console.print(table)
    for line in report.refused:
        console.print(f"not run on {line}", highlight=False, markup=False)
    told: dict[str, int] = {}
    for number, result in enumerate(report.failures):
        if number == 0:
            console.print("Smallest failing cases, the most telling first:\n")
        raised = result.failure.found.split(":")[0] if result.failure.what == "an exception" else None
        if raised in told:
            console.print(
                f"{result.invariant}. {result.title}: {raised} as in {told[raised]}\n", markup=False
            )
            continue
        if raised is not None:
            told[raised] = result.invariant
        console.print(_case(result), highlight=False, markup=False)
    console.print(_summary(report), highlight=False)


def _checked(result: Result) -> str:
    if not result.cases and not result.failure:
        return "-"
    models = len(result.models)
    return f"{result.cases} cases, {models} model{'s' if models != 1 else ''}"


def _note(result: Result) -> str:
    from rich.markup import escape

    notes = []
    if result.failing_models:
        notes.append("fails on " + ", ".join(result.failing_models))
    if result.undecided:
        notes.append(f"{result.undecided} left out: decided by rounding")
    shown = result.reasons[:_NOTES_SHOWN]
    more = len(result.reasons) - len(shown)
    return escape("; ".join([*notes, *shown, *([f"and {more} more"] if more else [])]))


def _case(result: Result) -> str:
    failure: Failure = result.failure
    place = {"layer": failure.layer, "KV head": failure.head, "position": failure.position}
    where = ", ".join(f"{name} {value}" for name, value in place.items() if value is not None)
    lines = [
        f"{result.invariant}. {result.title}",
        f"   case      {failure.model}, {failure.protocol}, budget {failure.budget}, {failure.tokens} tokens",
        *([f"   where     {where}"] if where else []),
        f"   what      {failure.what}",
        f"   expected  {failure.expected}",
        f"   found     {failure.found}",
        f"   {failure.why}",
    ]
    return "\n".join([*lines, ""])


def _summary(report: Report) -> str:
    seconds = f"{report.seconds:.0f} s"
    if report.failing:
        numbers = ", ".join(map(str, sorted(report.failing)))
        return f"[bold red]{len(report.failing)} of {len(report.results)} fail[/]: {numbers} ({seconds})"
    skipped = sum(result.status == "not applicable" for result in report.results)
    rest = f", {skipped} do not apply" if skipped else ""
    return f"[green]{len(report.results) - skipped} hold{rest}[/] ({seconds})"


def _require_acted(strategy: Strategy, report: Report) -> None:
    from kvacc.errors import KvaccError

    if strategy.has_budget and not report.acted:
        raise KvaccError(
            f"{strategy.name} hid no entry in any of these runs, so they say nothing about it; give a "
            "smaller --budget, smaller options (--option) or longer texts (--tokens)"
        )
