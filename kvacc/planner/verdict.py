"""What a plan comes to, in words, and what would make it fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from kvacc.planner.memory import KERNELS, MemoryParts, Workload
from kvacc.planner.models import PlannedModel
from kvacc.quantities import gib
from kvacc.strategy import Strategy

if TYPE_CHECKING:
    from kvacc.planner.planning import Plan

DTYPES = {
    "float32": Fraction(4), "bfloat16": Fraction(2), "float16": Fraction(2),
    "float8": Fraction(1), "int8": Fraction(1), "int4": Fraction(1, 2),
}  # fmt: skip
"""Bytes of a number."""
CHUNKS = (8192, 4096, 2048, 1024, 512, 256)
"""Prefill chunks that are tried, in tokens."""


def alternatives(
    model: PlannedModel, strategy: Strategy, work: Workload, fits: Callable[[Workload], bool]
) -> list[str]:
    """Changes of one thing each after which it fits, found by trying."""
    found = []
    heads = max((size.query_heads for size in model.layers), default=1) or 1
    counts = [n for n in range(work.devices + 1, heads + 1) if heads % n == 0]
    count = next((n for n in counts if fits(replace(work, devices=n))), None)
    if count:
        found.append(f"--count {count}")
    for kernel in KERNELS[1:]:
        if work.kernel == "eager" and fits(replace(work, kernel=kernel)):
            found.append(f"--kernel {kernel}")
            break
    if strategy.chunked_prefill:
        for chunk in CHUNKS:
            shorter = chunk < (work.prefill_chunk or work.prompt_tokens)
            if shorter and fits(replace(work, prefill_chunk=chunk)):
                found.append(f"--prefill-chunk {chunk}")
                break
    for dtype in ("float8", "int4"):
        if DTYPES[dtype] < work.weight_bytes and fits(replace(work, weight_bytes=DTYPES[dtype])):
            found.append(f"--dtype {dtype}")
            break
    if work.kv_bytes > 1 and fits(replace(work, kv_bytes=Fraction(1))):
        found.append("--kv-dtype float8")
    return found


def verdict(made: Plan) -> str:
    """Whether it fits, and the part that is too big where it does not."""
    memory, each = made.memory, "each GPU" if made.work.devices > 1 else "the GPU"
    if made.fits:
        free = made.available - memory.peak
        return f"fits: {gib(memory.peak)} of {gib(made.available)} on {each} at the peak, {gib(free)} left"
    if memory.peak <= made.available:
        return f"does not fit: the pool in host memory needs {gib(memory.host)} of {gib(made.host_memory)}"
    phase = "reading the prompt" if memory.prefill_peak >= memory.decode_peak else "decoding"
    name, size = largest_part(memory)
    return (
        f"does not fit: {phase} needs {gib(memory.peak)} of {gib(made.available)} on {each}; "
        f"the largest part is {name}, {gib(size)}"
    )


def largest_part(memory: MemoryParts) -> tuple[str, int]:
    """The largest part at the peak, in words, and its bytes."""
    in_prefill = memory.prefill_peak >= memory.decode_peak
    cache = memory.cache_in_prefill if in_prefill else memory.cache.on_device
    active = memory.prefill_activations if in_prefill else memory.decode_activations
    parts = {
        "the weights": memory.weights,
        "the KV cache": cache,
        f"the activations of {'prefill' if in_prefill else 'decoding'}": active,
        "the reserve": memory.reserve,
    }
    name = max(parts, key=lambda part: parts[part])
    return name, parts[name]


def notes_on(model: PlannedModel, strategy: Strategy, work: Workload, weights: str) -> list[str]:
    """What the reader must know about these numbers."""
    notes = [model.note] if model.note else []
    total = work.prompt_tokens + work.output_tokens
    if model.positions and total > model.positions:
        notes.append(f"{total:,} tokens are more than the {model.positions:,} that the model was made for")
    if strategy.name != "full":
        notes.append(
            "activations are those of the named kernel; kvacc's own step path takes more while it reads a "
            "prompt"
        )
    if work.kernel == "sdpa" and not model.parameters.sdpa:
        notes.append("transformers has no sdpa for this family: give --kernel eager or flash_attention_2")
    if any(size.latent for size in model.layers):
        notes.append("the cache holds latents, as transformers 5 and serving engines store them")
        if work.kernel == "sdpa":
            notes.append(
                "keys are longer than values here: where sdpa has no kernel for that (on a processor, say), "
                "it holds a square as eager does, which is not counted"
            )
    if DTYPES[weights] < 2:
        notes.append(f"{weights} weights without scales, embeddings and norms included")
    return notes
