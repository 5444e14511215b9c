"""``kvacc plot``."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from kvacc.leaderboard_rows import Row
    from kvacc.plots.figure import Figure
    from kvacc.results import Cell

_FILTERS = ("model", "task", "shots", "protocol", "strategy")


@click.group()
def plot() -> None:
    """Draw results as SVG, PNG, HTML or Vega-Lite JSON, by the suffix of --output.

    RUNS are folders of results; each kind of picture shows the cells that have what it needs. PROBES
    are folders of kvacc probe.
    """


_OUTPUT = click.option("--output", "-o", metavar="FILE", help="Where to write it.  [default: KIND.svg]")
_MODEL = click.option("--model", multiple=True, help="Only this model; may be repeated.")
_STRATEGY = click.option(
    "--strategy", multiple=True, help="Only this strategy, beside full; may be repeated."
)
_COLUMNS = click.option(
    "--columns", type=click.IntRange(1), default=3, show_default=True, help="Pictures beside each other."
)


def _with(options: list[Callable], command: Callable) -> Callable:
    """The command with the options, in their order."""
    for option in reversed(options):
        command = option(command)
    return command


def _of_results(command: Callable) -> Callable:
    """Arguments that every picture of results takes."""
    options = [
        click.argument("runs", nargs=-1, required=True, type=click.Path()),
        _OUTPUT,
        _MODEL,
        click.option("--task", multiple=True, help="Only this task; may be repeated."),
        click.option(
            "--shots", multiple=True, type=int, help="Only this number of examples; may be repeated."
        ),
        click.option("--protocol", multiple=True, help="Only this protocol, beside full; may be repeated."),
        _STRATEGY,
        _COLUMNS,
    ]
    return _with(options, command)


@plot.command()
@_of_results
def budget(**arguments: Any) -> None:
    """Score by budget, with the paired interval of each difference to full."""
    from kvacc.plots.budget import budget_figures

    _draw("budget", arguments, lambda cells, rows: budget_figures(rows), "rows of a strategy with a budget")


@plot.command()
@_of_results
def pareto(**arguments: Any) -> None:
    """Score against what a strategy really keeps, and moves."""
    from kvacc.plots.pareto import pareto_figures

    _draw("pareto", arguments, lambda cells, rows: pareto_figures(rows), "two rows of strategies that acted")


@plot.command()
@_of_results
@click.option("--metric", help="Metric of the samples, such as graded.  [default: the leaderboard's]")
def heatmap(metric: str | None, **arguments: Any) -> None:
    """Retention by depth of the fact and length of the text."""
    from kvacc.plots.heatmap import heatmap_figures

    def figures(cells: list[Cell], rows: list[Row]) -> list[Figure]:
        return heatmap_figures(cells, rows, metric)

    _draw("heatmap", arguments, figures, "samples with the depth of a fact: run tasks of the group retention")


@plot.command()
@_of_results
def fidelity(**arguments: Any) -> None:
    """KL divergence and agreement with full, by position in the text."""
    from kvacc.plots.fidelity import fidelity_figures

    _draw("fidelity", arguments, fidelity_figures, "fidelity by position")


@plot.command()
@_of_results
def perplexity(**arguments: Any) -> None:
    """Perplexity of long texts, by position."""
    from kvacc.plots.perplexity import perplexity_figures

    _draw("perplexity", arguments, perplexity_figures, "log-likelihoods by position")


def _of_probes(command: Callable) -> Callable:
    """Arguments that every picture of probes takes."""
    options = [
        click.argument("probes", nargs=-1, required=True, type=click.Path()),
        _OUTPUT,
        _MODEL,
        _STRATEGY,
        click.option("--prompt", multiple=True, type=int, help="Only this prompt length; may be repeated."),
        click.option("--batch", multiple=True, type=int, help="Only this batch; may be repeated."),
        _COLUMNS,
    ]
    return _with(options, command)


@plot.command()
@_of_probes
def ttft(**arguments: Any) -> None:
    """Time to first token by prompt length, with the point of failure.

    PROBES are folders of kvacc probe.
    """
    from kvacc.plots.time_to_first_token import time_to_first_token_figures

    _draw_probes("ttft", arguments, time_to_first_token_figures, "time to first token")


@plot.command()
@_of_probes
def memory(**arguments: Any) -> None:
    """Memory in parts, with the peaks of prefill and decode.

    PROBES are folders of kvacc probe.
    """
    from kvacc.plots.memory_bars import memory_figures

    _draw_probes("memory", arguments, memory_figures, "memory")


@plot.command()
@_of_results
@click.option("--probes", multiple=True, required=True, type=click.Path(), help="Folder of kvacc probe.")
@click.option("--prompt", type=click.IntRange(1), help="Tokens of a prompt.  [default: the longest that ran]")
@click.option("--batch", type=click.IntRange(1), help="Prompts at once.  [default: the fewest]")
def latency(probes: tuple[str, ...], prompt: int | None, batch: int | None, **arguments: Any) -> None:
    """Difference to full against the time per output token, as probed."""
    from kvacc.advice.cost import Wanted
    from kvacc.plots.latency_accuracy import latency_accuracy_figures
    from kvacc.probes.store import read_probes

    def figures(cells: list[Cell], rows: list[Row]) -> list[Figure]:
        wanted = Wanted(prompt_tokens=prompt, batch=batch)
        return latency_accuracy_figures(cells, rows, read_probes(probes), wanted)

    _draw("latency", arguments, figures, "two strategies with a difference and a probed time per token")


@plot.command()
@click.option("--model", required=True, metavar="M", help="Name, folder or alias such as smollm2-135m.")
@click.option("--strategy", required=True, help="What decides what is kept, such as h2o.")
@click.option("--budget", default="0.2", show_default=True, help="Share or number of entries kept.")
@click.option(
    "--option", "options", multiple=True, metavar="K=V", help="Option of the strategy; may be repeated."
)
@click.option("--protocol", default="stream", show_default=True, help="stream, context or serve.")
@click.option("--text", type=click.Path(), help="File with the prompt; - is standard input.")
@click.option("--task", help="Take the prompt of this task instead.")
@click.option(
    "--task-option",
    "task_options",
    multiple=True,
    metavar="K=V",
    help="Option of the task, such as length=512.",
)
@click.option(
    "--item", type=click.IntRange(0), default=0, show_default=True, help="Which of the task's documents."
)
@click.option(
    "--shots", type=click.IntRange(0), default=0, show_default=True, help="Examples in the task's prompt."
)
@click.option("--data-dir", type=click.Path(), envvar="KVACC_DATA_DIR", help="Folder with benchmark data.")
@click.option("--tokens", type=click.IntRange(2), help="Use the first N tokens of the prompt only.")
@click.option("--dtype", default="float32", show_default=True, help="Number format of the weights.")
@click.option(
    "--include", multiple=True, metavar="FILE", help="Python file with strategies; may be repeated."
)
@click.option(
    "--output", "-o", metavar="FILE", default="kept.svg", show_default=True, help="Where to write it."
)
def kept(
    model: str,
    strategy: str,
    budget: str,
    options: tuple[str, ...],
    protocol: str,
    text: str | None,
    task: str | None,
    task_options: tuple[str, ...],
    item: int,
    shots: int,
    data_dir: str | None,
    tokens: int | None,
    dtype: str,
    include: tuple[str, ...],
    output: str,
) -> None:
    """Which entries of one prompt each layer still holds at its end."""
    from kvacc.errors import KvaccError
    from kvacc.include import include as include_files
    from kvacc.plots.drawing import require_suffix, save

    # Whatever can be wrong is said before a model loads.
    require_suffix(output)
    if (text is None) == (task is None):
        raise KvaccError("give either --text FILE or --task NAME: the prompt whose entries are shown")
    include_files(*include)
    chosen = _strategy(strategy, budget, options)
    chosen.require_protocol(protocol)
    prompt = (
        _text_of(text)
        if text is not None
        else _prompt_of(
            task, _pairs(task_options, "--task-option", "length=512"), model, item, shots, data_dir
        )
    )
    figure = _kept_figure(model, dtype, chosen, protocol, prompt, tokens, _named(text, task, item, shots))
    _say(save([figure], output), 1)


def _draw(
    kind: str,
    arguments: dict[str, Any],
    figures_of: Callable[[list[Cell], list[Row]], list[Figure]],
    needs: str,
) -> None:
    from kvacc.errors import KvaccError
    from kvacc.leaderboard_rows import build
    from kvacc.plots.drawing import require_suffix, save
    from kvacc.results import read_cells

    output = arguments["output"] or f"{kind}.svg"
    require_suffix(output)
    cells = read_cells([Path(run) for run in arguments["runs"]])
    rows = _wanted(build(cells), {name: arguments[name] for name in _FILTERS})
    figures = figures_of(cells, rows)
    if not figures:
        raise KvaccError(f"nothing to draw: {', '.join(arguments['runs'])} hold no {needs}")
    _say(save(figures, output, arguments["columns"]), len(figures))


def _draw_probes(
    kind: str, arguments: dict[str, Any], figures_of: Callable[[list], list[Figure]], needs: str
) -> None:
    from kvacc.errors import KvaccError, unknown
    from kvacc.leaderboard_rows import FULL
    from kvacc.plots.drawing import require_suffix, save
    from kvacc.probes.store import read_probes

    output = arguments["output"] or f"{kind}.svg"
    require_suffix(output)
    records = read_probes(arguments["probes"])
    values_of: dict[str, Callable[[Any], Any]] = {
        "model": lambda case: case.model.get("pretrained"),
        "strategy": lambda case: case.strategy,
        "prompt": lambda case: case.prompt_tokens,
        "batch": lambda case: case.batch,
    }
    for name, value_of in values_of.items():
        wanted = arguments[name]
        known = {value_of(record.case) for record in records}
        for value in wanted:
            if value not in known:
                raise unknown(name, str(value), map(str, known))
        records = [
            record for record in records
            if not wanted or value_of(record.case) in wanted
            or (name == "strategy" and record.case.strategy == FULL)
        ]  # fmt: skip
    figures = figures_of(records)
    if not figures:
        raise KvaccError(f"nothing to draw: {', '.join(arguments['probes'])} hold no measured {needs}")
    _say(save(figures, output, arguments["columns"]), len(figures))


def _wanted(rows: list[Row], filters: dict[str, tuple]) -> list[Row]:
    """Rows that pass every filter; ``full`` passes those of protocol and strategy.

    Raises:
        KvaccError: no row has a value that was asked for.
    """
    from kvacc.errors import unknown

    for name, wanted in filters.items():
        known = {getattr(row, name) for row in rows}
        for value in wanted:
            if value not in known:
                raise unknown(name, str(value), map(str, known))
        of_full = name in ("protocol", "strategy")
        rows = [
            row for row in rows if not wanted or getattr(row, name) in wanted or (of_full and row.is_full)
        ]
    return rows


def _strategy(name: str, budget: str, options: tuple[str, ...]) -> Any:
    from kvacc.config import strategy_from_words
    from kvacc.errors import KvaccError
    from kvacc.verify.bench import with_budget

    values = _pairs(options, "--option", "recent_fraction=0.5")
    strategy = strategy_from_words(name, values)
    if not strategy.has_budget:
        raise KvaccError(
            f"{name} keeps everything: there is nothing to show; choose a strategy with a budget"
        )
    return with_budget(strategy, budget)


def _text_of(path: str) -> str:
    from kvacc.errors import KvaccError

    try:
        text = (
            click.get_text_stream("stdin").read() if path == "-" else Path(path).read_text(encoding="utf-8")
        )
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise KvaccError(f"cannot read --text {path}: {reason}; give a text file") from None
    if not text.strip():
        raise KvaccError(f"--text {path} is empty; give a text file with a prompt")
    return text


def _pairs(words: tuple[str, ...], option: str, example: str) -> dict[str, str]:
    """``("length=512",)`` as a dictionary, values as typed."""
    from kvacc.errors import KvaccError

    values = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise KvaccError(f"{option} {word!r}: write NAME=VALUE, such as {example}")
        values[key] = value
    return values


def _prompt_of(
    task: str, options: dict[str, str], model: str, item: int, shots: int, data_dir: str | None
) -> str:
    """What lm-eval asks for one document of a task."""
    import yaml

    from kvacc.errors import KvaccError
    from kvacc.models import load_tokenizer
    from kvacc.task_catalog import check_options, find_task, load_tasks

    info = find_task(task)
    typed = {name: yaml.safe_load(value) for name, value in options.items()}
    check_options(info, typed)
    tokenizer = load_tokenizer(model) if info.takes_options else None
    loaded = load_tasks([task], data_dir=data_dir, num_fewshot=shots, options=typed, tokenizer=tokenizer)[
        task
    ]
    count = len(loaded.eval_docs)
    if item >= count:
        raise KvaccError(f"--item {item}: {task} has {count} documents; give 0 to {count - 1}")
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar for one prompt
        loaded.build_all_requests(limit=item + 1, rank=0, world_size=1)
    return next(instance.args[0] for instance in loaded.instances if instance.doc_id == item)


def _kept_figure(
    model: str, dtype: str, strategy: Any, protocol: str, prompt: str, tokens: int | None, name: str
) -> Figure:
    from kvacc.backend import KvaccLM
    from kvacc.plots.kept import kept_figure
    from kvacc.plots.kept_entries import kept_entries

    lm = KvaccLM(model, strategy=strategy, protocol=protocol, dtype=dtype)
    encoded = lm.tok_encode(prompt)[: tokens or None]
    encoded = encoded[: lm.max_length]
    found = kept_entries(lm.wrapped, strategy, encoded, protocol)
    label = Path(model).name if Path(model).exists() else model
    budget = str(strategy.budget)
    title = f"{label}, {strategy.name} {budget}, {protocol}: {name}, {found.tokens} tokens"
    return kept_figure(found, title)


def _named(text: str | None, task: str | None, item: int, shots: int) -> str:
    if text is not None:
        return "standard input" if text == "-" else Path(text).name
    return f"{task} {item}, {shots}-shot"


def _say(path: Path, count: int) -> None:
    click.echo(f"written: {path} ({count} {'picture' if count == 1 else 'pictures'})")
