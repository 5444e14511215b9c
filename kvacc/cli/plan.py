"""``kvacc plan``."""

from __future__ import annotations

import json
from typing import Any

import click


@click.command()
@click.option("--model", required=True, help="Packaged name, hub name, alias, folder, or a config.json.")
@click.option("--gpu", help="GPU by name, such as h100, a100-80gb, l4, rtx-4090, mi300x.")
@click.option("--count", type=int, default=1, show_default=True, help="GPUs that share the model.")
@click.option("--context", default="4096", show_default=True, help="Tokens of each prompt: 4096, 128k, 1M.")
@click.option("--output", default="256", show_default=True, help="Tokens generated after each prompt.")
@click.option("--batch", type=int, default=1, show_default=True, help="Prompts at once.")
@click.option("--strategy", default="full", show_default=True, help="KV-cache strategy.")
@click.option("--budget", help="Entries kept: a count or a fraction.")
@click.option("--budget-of", default="prompt", show_default=True, help="What a fraction refers to.")
@click.option("--option", "options", multiple=True, metavar="K=V", help="Option of the strategy; repeatable.")
@click.option("--protocol", default="serve", show_default=True, help="When the strategy acts.")
@click.option("--dtype", help="Of the weights: bf16, fp16, fp32, fp8, int8, int4.  [default: as published]")
@click.option("--kv-dtype", help="Of the cache.  [default: as the activations]")
@click.option("--prefill-chunk", help="Tokens of the prompt per forward pass.  [default: all]")
@click.option("--kernel", default="sdpa", show_default=True, help="eager, sdpa or flash_attention_2.")
@click.option("--reserve", help="Memory set aside on each GPU for what is not modelled.  [default: 1GiB]")
@click.option("--host-memory", help="Host memory for offloaded entries.  [default: not limited]")
@click.option("--gpu-memory", help="Instead of the table's: 24GB, 24GiB.")
@click.option("--gpu-bandwidth", help="Instead of the table's: 1TB/s.")
@click.option("--gpu-flops", help="Instead of the table's: 100T operations per second.")
@click.option("--host-bandwidth", help="Between host and GPU, one direction: 64GB/s.")
@click.option("--link-bandwidth", help="Between GPUs, one direction: 450GB/s.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "markdown"]),
    default="table",
    show_default=True,
    help="Of the output.",
)
@click.option("--require-fit", is_flag=True, help="Exit code 1 when it does not fit.")
@click.option(
    "--include", multiple=True, metavar="FILE", help="Python file with strategies; may be repeated."
)
def plan(
    model: str,
    gpu: str | None,
    count: int,
    context: str,
    output: str,
    batch: int,
    strategy: str,
    budget: str | None,
    budget_of: str,
    options: tuple[str, ...],
    protocol: str,
    dtype: str | None,
    kv_dtype: str | None,
    prefill_chunk: str | None,
    kernel: str,
    reserve: str | None,
    host_memory: str | None,
    gpu_memory: str | None,
    gpu_bandwidth: str | None,
    gpu_flops: str | None,
    host_bandwidth: str | None,
    link_bandwidth: str | None,
    form: str,
    require_fit: bool,
    include: tuple[str, ...],
) -> int:
    """Plan a model on GPUs that you may not have: memory by part, the longest prompt and the
    largest batch that fit, and lower bounds of time. Needs no weights and no GPU.

    Example: kvacc plan --model llama-3.1-70b --gpu h100 --count 4 --context 128k --batch 8
    --strategy h2o --budget 0.2
    """
    from kvacc.cli.calibrate import _options
    from kvacc.cli.console import make_console
    from kvacc.planner import planning
    from kvacc.planner.gpus import find_gpu
    from kvacc.planner.memory import RESERVE
    from kvacc.planner.report import as_dict, as_markdown, print_plan
    from kvacc.quantities import parse_bytes, parse_operations, parse_rate, parse_tokens

    def read(parse, text: str | None, name: str) -> Any:
        return None if text is None else parse(text, name)

    if include:
        from kvacc.include import include as include_files

        include_files(*include)
    machine = find_gpu(
        gpu,
        read(parse_bytes, gpu_memory, "--gpu-memory"),
        read(parse_rate, gpu_bandwidth, "--gpu-bandwidth"),
        read(parse_operations, gpu_flops, "--gpu-flops"),
        read(parse_rate, host_bandwidth, "--host-bandwidth"),
        read(parse_rate, link_bandwidth, "--link-bandwidth"),
    )
    made = planning.plan(
        model,
        machine,
        count,
        context=parse_tokens(context, "--context"),
        output=parse_tokens(output, "--output"),
        batch=batch,
        strategy=strategy,
        budget=budget,
        budget_of=budget_of,
        options=_options(options),
        protocol=protocol,
        dtype=dtype,
        kv_dtype=kv_dtype,
        prefill_chunk=read(parse_tokens, prefill_chunk, "--prefill-chunk"),
        kernel=kernel,
        reserve=RESERVE if reserve is None else parse_bytes(reserve, "--reserve"),
        host_memory=read(parse_bytes, host_memory, "--host-memory"),
    )
    if form == "json":
        click.echo(json.dumps(as_dict(made), indent=2, allow_nan=False))
    elif form == "markdown":
        click.echo(as_markdown(made), nl=False)
    else:
        print_plan(make_console(), made)
    return 1 if require_fit and not made.fits else 0
