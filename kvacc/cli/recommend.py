"""``kvacc recommend``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path())
@click.option("--probes", multiple=True, type=click.Path(), help="Folder of kvacc probe; may be repeated.")
@click.option(
    "--max-drop",
    "max_drops",
    multiple=True,
    metavar="[TASK=]POINTS",
    help="Largest drop of every task and of their average, such as 1pt; of one task: piqa=2pt.",
)
@click.option("--memory", metavar="SIZE", help="Most device memory, weights included, such as 24GB.")
@click.option("--kv-memory", metavar="SIZE", help="Most device memory of the KV cache, such as 2GB.")
@click.option("--latency", metavar="TIME", help="Longest time per output token, such as 40ms.")
@click.option("--ttft", metavar="TIME", help="Longest time to the first token, such as 2s.")
@click.option("--prompt", type=click.IntRange(1), help="Tokens of a prompt.  [default: the longest that ran]")
@click.option("--batch", type=click.IntRange(1), help="Prompts at once.  [default: the fewest]")
@click.option("--prefill-chunk", type=click.IntRange(1), help="Tokens per prefill pass.  [default: all]")
@click.option("--model", help="Only this model.")
@click.option("--dtype", help="Only this number format.")
@click.option("--task", multiple=True, help="Only this task; may be repeated.")
@click.option("--shots", type=int, help="Only this number of examples.")
@click.option("--protocol", help="Only this protocol.")
@click.option("--confidence", type=float, default=0.95, show_default=True, help="Of the bound of each drop.")
@click.option(
    "--certain/--point",
    default=True,
    help="Accept what holds with that confidence, or what point estimates say.  [default: certain]",
)
@click.option(
    "--prefer",
    type=click.Choice(["memory", "latency", "accuracy"]),
    default="memory",
    show_default=True,
    help="What decides among strategies of which none beats the other in everything.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "markdown"]),
    default="table",
    show_default=True,
    help="How to print it.",
)
def recommend(
    runs: tuple[str, ...],
    probes: tuple[str, ...],
    max_drops: tuple[str, ...],
    memory: str | None,
    kv_memory: str | None,
    latency: str | None,
    ttft: str | None,
    prompt: int | None,
    batch: int | None,
    prefill_chunk: int | None,
    model: str | None,
    dtype: str | None,
    task: tuple[str, ...],
    shots: int | None,
    protocol: str | None,
    confidence: float,
    certain: bool,
    prefer: str,
    form: str,
) -> int:
    """Recommend a strategy that loses little enough, and fits the memory and time there is.

    RUNS are folders of results, with full in them. Exit code 0: there is one; 1: nothing
    satisfies the limits, and the nearest misses are named.
    """
    from kvacc.advice import Selection, Wanted, output
    from kvacc.advice import recommend as advise
    from kvacc.advice.limits import Limits, parse_drops, parse_seconds, require
    from kvacc.cli.console import make_console
    from kvacc.quantities import parse_bytes
    from kvacc.results import read_cells

    max_drop, max_drop_of = parse_drops(max_drops)
    limits = Limits(
        max_drop=max_drop,
        max_drop_of=max_drop_of,
        memory=None if memory is None else parse_bytes(memory, "--memory"),
        kv_memory=None if kv_memory is None else parse_bytes(kv_memory, "--kv-memory"),
        latency=None if latency is None else parse_seconds(latency, "--latency"),
        time_to_first_token=None if ttft is None else parse_seconds(ttft, "--ttft"),
        confidence=confidence,
        certain=certain,
    )
    require(limits)
    advice = advise(
        read_cells([Path(run) for run in runs]),
        limits,
        probes=_probes(probes),
        selection=Selection(model=model, dtype=dtype, protocol=protocol, tasks=task, shots=shots),
        wanted=Wanted(prompt_tokens=prompt, batch=batch, prefill_chunk=prefill_chunk),
        prefer=prefer,
    )
    if form == "table":
        output.render(advice, make_console())
    else:
        click.echo(output.to_json(advice) if form == "json" else output.to_markdown(advice), nl=False)
    return advice.exit_code


def _probes(folders: tuple[str, ...]) -> list:
    if not folders:
        return []
    from kvacc.probes.store import read_probes

    return read_probes([Path(folder) for folder in folders])
