"""Measure the cases of one group: times in turns, then memory and transfers of each by itself.

Memory and transfers are never measured in the passes that are timed: watching slows them down.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvacc.engine.scoring import is_out_of_memory
from kvacc.errors import KvaccError
from kvacc.probes.cases import PlannedCase
from kvacc.probes.config import ProbeConfig
from kvacc.probes.latency import TimedCase, clock_for, time_in_turns
from kvacc.probes.memory_pass import measure_memory
from kvacc.probes.probed_model import ProbedModel
from kvacc.probes.records import LatencyRecord, MemoryRecord, TransferRecord
from kvacc.probes.transfers import measure_transfers


@dataclass
class Measured:
    """What is known of a case; ``failure`` says why the rest is not."""

    planned: PlannedCase
    latency: LatencyRecord | None = None
    memory: MemoryRecord | None = None
    transfers: TransferRecord | None = None
    failure: str | None = None


def runs_of_a_case(config: ProbeConfig) -> int:
    """Requests that one case takes, as far as can be said before."""
    timed = config.warmup + config.repeats if "latency" in config.measures else 0
    return timed + sum(measure in config.measures for measure in ("memory", "transfers"))


def measure_group(
    config: ProbeConfig,
    planned: Sequence[PlannedCase],
    model: ProbedModel,
    advance: Callable[[], None] = lambda: None,
) -> list[Measured]:
    """Measure cases of one prompt length, batch and output length.

    Args:
        advance: called after each request.
    """
    measured = [Measured(case) for case in planned]
    usable = [each for each in measured if _done(each, functools.partial(_prepare, model=model))]
    if not usable:
        return measured
    case = planned[0].case
    prompts = model.prompts(case.prompt_tokens, case.batch)
    if "latency" in config.measures:
        _time(config, usable, model, prompts, advance)
    for measure, name in ((_measure_memory, "memory"), (_measure_transfers, "transfers")):
        for each in usable:
            if name in config.measures and each.failure is None:
                _done(each, functools.partial(measure, model=model, prompts=prompts), f"{name}: ")
                advance()
    return measured


def _prepare(each: Measured, model: ProbedModel) -> None:
    """What a strategy prepares once for a model; refuses what cannot run at all."""
    model.require_length(each.planned.case)
    model.decoder(each.planned)


def _time(
    config: ProbeConfig,
    usable: Sequence[Measured],
    model: ProbedModel,
    prompts: torch.Tensor,
    advance: Callable[[], None],
) -> None:
    def failed(place: int, error: Exception) -> None:
        usable[place].failure = reason_of(error)

    timed = [
        TimedCase(
            functools.partial(model.decoder, each.planned),
            prompts,
            each.planned.case.output_tokens,
            each.planned.case.prefill_chunk,
        )
        for each in usable
    ]
    found = time_in_turns(timed, config.repeats, config.warmup, config.seed, failed, advance)
    clock = clock_for(prompts.device).name
    for each, timings in zip(usable, found, strict=True):
        if timings is not None:
            each.latency = timings.record(prompts.shape[0], config.warmup, clock, config.seed)


def _measure_memory(each: Measured, model: ProbedModel, prompts: torch.Tensor) -> None:
    planned = each.planned
    make = functools.partial(model.decoder, planned)
    each.memory = measure_memory(make, model.model, planned.strategy, planned.case, prompts)


def _measure_transfers(each: Measured, model: ProbedModel, prompts: torch.Tensor) -> None:
    case = each.planned.case
    if each.planned.strategy.offloads:
        make = functools.partial(model.decoder, each.planned)
        each.transfers = measure_transfers(make, prompts, case.output_tokens, case.prefill_chunk)


def _done(each: Measured, work: Callable[[Measured], None], what: str = "") -> bool:
    """Do a part of a case's measuring; False, with the reason noted, when that is not possible."""
    try:
        work(each)
    except Exception as error:
        each.failure = what + reason_of(error)
        return False
    return True


def reason_of(error: Exception) -> str:
    """Why a case could not run, in a line. Raises ``error`` again when it is a defect of kvacc.

    Memory that the case held is free afterwards.
    """
    if isinstance(error, KvaccError):
        return str(error)
    if not is_out_of_memory(error):
        raise error
    first = (str(error).strip().splitlines() or ["no message"])[0]
    # The traceback holds the tensors that did not fit.
    error.__traceback__ = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return f"out of memory: {first}"
