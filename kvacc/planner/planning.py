"""Does it fit, what would, and how fast could it be? One plan from numbers alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvacc.errors import KvaccError, unknown
from kvacc.kv_size import kv_formula
from kvacc.planner.gpus import Gpu, find_gpu
from kvacc.planner.memory import KERNELS, RESERVE, MemoryParts, Workload, memory_of
from kvacc.planner.models import PlannedModel, find_model, planned_model
from kvacc.planner.speed import Step, first_token_time, token_time
from kvacc.planner.verdict import DTYPES, alternatives, notes_on, verdict
from kvacc.strategy import Strategy, make_strategy

SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}
MOST_TOKENS = 2**26
"""Longest text that is searched where the model names no limit."""
MOST_ROWS = 2**20


@dataclass(frozen=True)
class Plan:
    """A workload on a machine.

    Attributes:
        memory: bytes on each GPU.
        available: bytes of each GPU.
        longest_prompt, largest_batch: the largest that fit, everything else as asked; 0 when
            none does.
        limited_by: of the longest prompt: ``memory``, ``model`` (its positions or its window) or
            ``search``.
        alternatives: changes of one thing each that would make it fit.
        token, first_token: lower bounds of time; None where the GPU lacks the type of number.
        notes: what the reader must know.
    """

    model: PlannedModel
    gpu: Gpu
    strategy: Strategy
    work: Workload
    dtype: str
    kv_dtype: str
    memory: MemoryParts
    longest_prompt: int
    limited_by: str
    largest_batch: int
    alternatives: tuple[str, ...]
    token: Step | None
    first_token: Step | None
    notes: tuple[str, ...]
    host_memory: int | None = None

    @property
    def available(self) -> int:
        return self.gpu.memory

    @property
    def fits(self) -> bool:
        return _fits(self.memory, self.gpu, self.host_memory)

    @property
    def verdict(self) -> str:
        """One sentence."""
        return verdict(self)

    @property
    def formula(self) -> str:
        """What the cache stores, in words."""
        return kv_formula(self.model.config, self.strategy, self.work.kv_bytes)


def plan(
    model: Any,
    gpu: str | Gpu = "h100",
    count: int = 1,
    *,
    context: int = 4096,
    output: int = 256,
    batch: int = 1,
    strategy: str | Strategy = "full",
    budget: Any = None,
    budget_of: str = "prompt",
    options: dict[str, Any] | None = None,
    protocol: str = "serve",
    dtype: str | None = None,
    kv_dtype: str | None = None,
    prefill_chunk: int | None = None,
    kernel: str = "sdpa",
    reserve: int = RESERVE,
    host_memory: int | None = None,
) -> Plan:
    """Plan a workload without the machine, the weights or a GPU.

    Args:
        model: a name (:func:`kvacc.planner.models.find_model`), or a transformers configuration.
        gpu: a name of the table, or a :class:`~kvacc.planner.gpus.Gpu`; ``count`` of them share
            the model by tensor parallelism.
        context: tokens of each prompt; ``output`` tokens are made after it, for ``batch`` rows.
        dtype: of the weights: float32, bfloat16, float16, float8, int8 or int4 (scales and zero
            points not counted); by default as published. Activations have 16 bits below 16.
        kv_dtype: of the cache; by default that of the activations.
        kernel: whose activations are counted: eager, sdpa or flash_attention_2.
        reserve: bytes set aside on each GPU for what is not modelled.
        host_memory: bytes of host memory for the pool of strategies that select; None does not ask.

    Raises:
        KvaccError: an unknown name, or a number out of range.
    """
    planned = find_model(model) if isinstance(model, str) else planned_model(model)
    machine = find_gpu(gpu) if isinstance(gpu, str) else gpu
    chosen = strategy
    if isinstance(strategy, str):
        chosen = make_strategy(strategy, budget, budget_of, **(options or {}))
    chosen.require_protocol(protocol)
    weights = _dtype(dtype or planned.dtype or "bfloat16", "dtype")
    half = "bfloat16" if machine.operations_for("bfloat16") else "float16"
    activation = weights if DTYPES[weights] >= 2 else half
    cache = _dtype(kv_dtype, "kv-dtype") if kv_dtype else activation
    if kernel not in KERNELS:
        raise unknown("kernel", kernel, KERNELS)
    _require_positive(context=context, output=output, batch=batch, count=count)
    _require_divisible(planned, count)
    if prefill_chunk is not None:
        from kvacc.engine.prefill import require_chunk, require_chunked_prefill

        prefill_chunk = require_chunk(prefill_chunk)
        require_chunked_prefill(chosen, prefill_chunk)
    work = Workload(
        context,
        output,
        batch,
        protocol,
        prefill_chunk,
        kernel,
        DTYPES[weights],
        int(DTYPES[activation]),
        DTYPES[cache],
        count,
        reserve,
    )
    memory = memory_of(planned, chosen, work)
    fits = _fits_when(planned, chosen, machine, host_memory)
    longest, limited_by = _longest(planned, chosen, work, fits)
    notes = list(notes_on(planned, chosen, work, weights))
    compute = weights if weights == "float8" and machine.operations_for("float8") else activation
    token = first = None
    if machine.operations_for(compute) is None:
        notes.append(f"no times: {machine.name} has no matrix units for {compute}; try --dtype float16")
    else:
        token = token_time(planned, chosen, work, machine, compute)
        first = first_token_time(planned, chosen, work, machine, compute)
    return Plan(
        planned,
        machine,
        chosen,
        work,
        weights,
        cache,
        memory,
        longest,
        limited_by,
        _largest(lambda rows: fits(replace(work, batch=rows)), MOST_ROWS),
        () if _fits(memory, machine, host_memory) else tuple(alternatives(planned, chosen, work, fits)),
        token,
        first,
        tuple(notes),
        host_memory,
    )


def _dtype(name: str, what: str) -> str:
    name = SHORT_DTYPES.get(name, name)
    if name not in DTYPES:
        raise unknown(what, name, [*DTYPES, *SHORT_DTYPES])
    return name


def _require_positive(**numbers: int) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise KvaccError(f"{name} {value!r} is not a whole number of at least 1")


def _require_divisible(model: PlannedModel, count: int) -> None:
    heads = max((size.query_heads for size in model.layers), default=0)
    if heads and heads % count:
        allowed = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise KvaccError(
            f"{heads} attention heads cannot be shared equally by {count} GPUs; allowed counts: "
            f"{', '.join(allowed)}"
        )


def _fits(memory: MemoryParts, gpu: Gpu, host_memory: int | None) -> bool:
    return memory.peak <= gpu.memory and (host_memory is None or memory.host <= host_memory)


def _fits_when(
    model: PlannedModel, strategy: Strategy, gpu: Gpu, host_memory: int | None
) -> Callable[[Workload], bool]:
    return lambda work: _fits(memory_of(model, strategy, work), gpu, host_memory)


def _longest(
    model: PlannedModel, strategy: Strategy, work: Workload, fits: Callable[[Workload], bool]
) -> tuple[int, str]:
    """The longest prompt that fits, and what ends it. The same function decides as for the verdict."""
    most, why = MOST_TOKENS, "search"
    if model.positions:
        most, why = max(1, model.positions - work.output_tokens), "model"
    window = _window_of_the_strategy(model, strategy)
    if window and window - work.output_tokens + 1 < most:
        most, why = max(1, window - work.output_tokens + 1), "model"
    found = _largest(lambda tokens: fits(replace(work, prompt_tokens=tokens)), most)
    return found, why if found == most else "memory"


def _window_of_the_strategy(model: PlannedModel, strategy: Strategy) -> int:
    """Tokens up to which a strategy can act in a model whose every layer slides; 0 is no limit."""
    kinds = {(size.kind, size.window) for size in model.layers if size.kind != "none"}
    only = next(iter(kinds)) if len(kinds) == 1 else ("", 0)
    return only[1] if only[0] == "sliding" and strategy.has_budget else 0


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to ``most`` that fits, 0 when none does. What fits a number fits
    every smaller one."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)  # the smallest that is known, or assumed, not to fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
