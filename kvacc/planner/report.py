"""A plan as a table, Markdown or plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvacc.planner.planning import Plan
from kvacc.planner.speed import Step
from kvacc.quantities import duration, gib

if TYPE_CHECKING:
    from rich.console import Console


def heading(made: Plan) -> str:
    """Model, machine and workload in a line."""
    work, strategy = made.work, made.strategy
    budget = f" {strategy.budget}" if strategy.has_budget else ""
    rows = f"{work.batch} prompt{'s' if work.batch != 1 else ''} of {work.prompt_tokens:,} tokens"
    chunk = f", prefill in chunks of {work.prefill_chunk:,}" if work.prefill_chunk else ""
    protocol = f" ({work.protocol})" if strategy.has_budget else ""
    return (
        f"{made.model.name} ({made.dtype}, KV {made.kv_dtype}) on {work.devices} x {made.gpu.name}: "
        f"{rows}, {work.output_tokens:,} tokens of output each; {strategy.name}{budget}{protocol}, "
        f"{work.kernel}{chunk}"
    )


def memory_rows(made: Plan) -> list[tuple[str, str, str]]:
    """(part, while the prompt is read, while tokens are made)."""
    memory, cache = made.memory, made.memory.cache
    rows = [
        ("weights", gib(memory.weights), gib(memory.weights)),
        ("KV cache on the GPU", gib(memory.cache_in_prefill), gib(cache.device)),
    ]
    if cache.summaries:
        rows.append(("summaries to select by", "in the cache", gib(cache.summaries)))
    if cache.state:
        rows.append(("state of recurrent layers", "in the cache", gib(cache.state)))
    rows += [
        ("activations", gib(memory.prefill_activations), gib(memory.decode_activations)),
        ("reserve", gib(memory.reserve), gib(memory.reserve)),
        ("needed on each GPU", gib(memory.prefill_peak), gib(memory.decode_peak)),
    ]
    if memory.host:
        rows.append(("KV cache in host memory, all GPUs", "", gib(memory.host)))
    return rows


def answer_lines(made: Plan) -> list[str]:
    """The verdict, the limits and the times, one sentence each."""
    active = f", {made.model.active_parameters:,} active per token" if made.model.experts else ""
    counted = f"{made.model.parameters.total:,} parameters{active} ({made.model.origin})"
    lines = [counted, f"cache: {made.formula}", made.verdict]
    if made.alternatives:
        lines.append(f"one of these alone would make it fit: {'; '.join(made.alternatives)}")
    reasons = {"memory": "", "model": ", the model's own limit", "search": ", the most that was tried"}
    longest = f"longest prompt that fits at batch {made.work.batch}: {made.longest_prompt:,} tokens"
    lines.append(longest + reasons[made.limited_by] if made.longest_prompt else f"no prompt fits {_at(made)}")
    batch = f"largest batch that fits at {made.work.prompt_tokens:,} tokens: {made.largest_batch:,}"
    lines.append(batch if made.largest_batch else "no batch fits at this length")
    if made.token is not None and made.first_token is not None:
        first, token = made.first_token, made.token
        lines += [
            f"time to the first token: at least {duration(first.seconds)}, {_why(first)}",
            f"time per output token: at least {duration(token.seconds)}, {_why(token)}",
            f"output of all rows: at most {made.work.batch / token.seconds:,.0f} tokens/s",
        ]
    return lines


def _at(made: Plan) -> str:
    return f"at batch {made.work.batch}"


def _why(step: Step) -> str:
    parts = {
        "weights": step.weights,
        "cache": step.cache,
        "arithmetic": step.arithmetic,
        "host": step.host,
        "exchange": step.exchange,
    }
    shown = ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items() if seconds)
    return f"bound by {step.bound_by} ({shown})"


CAVEAT = (
    "Estimates: weights and cache are exact, activations a formula, times lower bounds at peak rates, which "
    "nothing reaches. Measure with `kvacc probe` where you can."
)


def print_plan(console: Console, made: Plan) -> None:
    """Write a plan for a terminal."""
    from rich import box
    from rich.table import Table

    console.print(heading(made), highlight=False, markup=False)
    table = Table("", "while reading the prompt", "while decoding", box=box.SIMPLE)
    for name, first, second in memory_rows(made):
        table.add_row(name, first, second)
    console.print(table)
    for line in [*answer_lines(made), *(f"note: {note}" for note in made.notes), CAVEAT]:
        console.print(line, highlight=False, markup=False)


def as_markdown(made: Plan) -> str:
    """The same as Markdown."""
    lines = [heading(made), "", "| | while reading the prompt | while decoding |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {first} | {second} |" for name, first, second in memory_rows(made)]
    lines += ["", *(f"- {line}" for line in answer_lines(made)), *(f"- note: {note}" for note in made.notes)]
    return "\n".join([*lines, "", CAVEAT, ""])


def as_dict(made: Plan) -> dict[str, Any]:
    """All numbers: bytes, seconds, tokens."""
    memory, work = made.memory, made.work
    return {
        "schema_version": 1,
        "model": {
            "name": made.model.name,
            "origin": made.model.origin,
            "parameters": made.model.parameters.total,
            "active_parameters": made.model.active_parameters,
            "dtype": made.dtype,
            "kv_dtype": made.kv_dtype,
            "positions": made.model.positions,
        },
        "gpu": {"name": made.gpu.name, "count": work.devices, "memory": made.gpu.memory},
        "workload": {
            "prompt_tokens": work.prompt_tokens,
            "output_tokens": work.output_tokens,
            "batch": work.batch,
            "strategy": made.strategy.name,
            "options": made.strategy.options(),
            "budget": str(made.strategy.budget) if made.strategy.has_budget else None,
            "protocol": work.protocol,
            "kernel": work.kernel,
            "prefill_chunk": work.prefill_chunk,
        },
        "memory_per_gpu": {
            "weights": memory.weights,
            "cache_in_prefill": memory.cache_in_prefill,
            "prefill_activations": memory.prefill_activations,
            "kv_device": memory.cache.device,
            "summaries": memory.cache.summaries,
            "state": memory.cache.state,
            "decode_activations": memory.decode_activations,
            "reserve": memory.reserve,
            "prefill_peak": memory.prefill_peak,
            "decode_peak": memory.decode_peak,
        },
        "host_memory": memory.host,
        "fits": made.fits,
        "verdict": made.verdict,
        "alternatives": list(made.alternatives),
        "longest_prompt": made.longest_prompt,
        "longest_prompt_limited_by": made.limited_by,
        "largest_batch": made.largest_batch,
        "seconds_to_first_token_at_least": None if made.first_token is None else made.first_token.seconds,
        "seconds_per_token_at_least": None if made.token is None else made.token.seconds,
        "bound_by": None if made.token is None else made.token.bound_by,
        "formula": made.formula,
        "notes": list(made.notes),
    }
