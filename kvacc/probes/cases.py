"""The cases that a configuration plans, in groups that are measured together.

A group is one model, prompt length, batch and output length. Its cases differ by strategy,
budget, protocol, kernel and prefill chunk, and are timed in turns, so that whatever the
machine does meanwhile hits all of them alike; only within a group are times compared.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass
from typing import Any

from kvacc.config import BASELINE, ModelEntry, strategy_identity
from kvacc.probes.config import OWN_KERNEL, ProbeConfig
from kvacc.probes.records import ProbeCase
from kvacc.strategy import Strategy

_ID_LENGTH = 16


@dataclass(frozen=True)
class PlannedCase:
    """One case, with the strategy that it is about."""

    strategy: Strategy
    case: ProbeCase


@dataclass(frozen=True)
class Group:
    """Cases that are measured together."""

    entry: ModelEntry
    prompt_tokens: int
    batch: int
    output_tokens: int
    cases: tuple[PlannedCase, ...]

    @property
    def label(self) -> str:
        """``smollm2-135m, prompt 1024, batch 1, output 32``"""
        return (
            f"{model_label(self.entry.pretrained)}, prompt {self.prompt_tokens}, batch {self.batch}, "
            f"output {self.output_tokens}"
        )


def plan_groups(config: ProbeConfig) -> list[Group]:
    """Every group of the configuration, models outermost and shorter prompts first as listed.

    ``full`` is the same under every protocol and is planned once, with the first.
    """
    sizes = list(itertools.product(config.prompts, config.batches, config.outputs))
    return [
        Group(entry, prompt, batch, output, tuple(_cases(config, entry, prompt, batch, output)))
        for entry in config.models
        for prompt, batch, output in sizes
    ]


@dataclass(frozen=True)
class Search:
    """A search for the largest prompt or batch of a case; the size searched for is 1 in it."""

    entry: ModelEntry
    planned: PlannedCase
    searched: str

    @property
    def label(self) -> str:
        """``smollm2-135m full sdpa, longest prompt of batch 1``"""
        case = self.planned.case
        what = (
            f"longest prompt of batch {case.batch}"
            if self.searched == "prompt_tokens"
            else f"largest batch of prompts of {case.prompt_tokens}"
        )
        return f"{model_label(self.entry.pretrained)} {case_label(case)}, {what}"


def plan_searches(config: ProbeConfig) -> list[Search]:
    """Every search for a capacity: the longest prompt of each batch size, or the largest batch of
    each prompt length, as the configuration asks."""
    if "capacity" not in config.measures or config.capacity is None:
        return []
    found = []
    for entry, searched in itertools.product(config.models, config.capacity.search):
        longest = searched == "prompt_tokens"
        sizes = [(1, batch) for batch in config.batches] if longest else [(n, 1) for n in config.prompts]
        for prompt, batch in sizes:
            cases = _cases(config, entry, prompt, batch, config.outputs[0])
            found += [Search(entry, planned, searched) for planned in cases]
    return found


def case_id(case: ProbeCase, device: str, measured: dict[str, Any]) -> str:
    """Short hash of a case, of the device that it is measured on, and of what is measured how."""
    content = {"case": case.model_dump(mode="json"), "device": device, "measured": measured}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_ID_LENGTH]


def model_label(pretrained: str) -> str:
    """The last part of a hub name or folder."""
    return pretrained.rstrip("/").rsplit("/", 1)[-1]


def case_label(case: ProbeCase) -> str:
    """``h2o 0.2 serve``, with the kernel and the prefill chunk where they are not the usual ones."""
    parts = [case.strategy, *([case.budget] if case.budget is not None else [])]
    if case.strategy != BASELINE:
        parts.append(case.protocol)
    if case.kernel != OWN_KERNEL:
        parts.append(case.kernel)
    if case.prefill_chunk is not None:
        parts.append(f"chunk {case.prefill_chunk}")
    return " ".join(parts)


def _cases(config: ProbeConfig, entry: ModelEntry, prompt: int, batch: int, output: int):
    for strategies in config.strategies:
        for strategy in strategies.strategies():
            for protocol, kernel, chunk in _variants(config, strategy):
                case = ProbeCase(
                    model=entry.identity(),
                    **strategy_identity(strategy),
                    protocol=protocol,
                    kernel=kernel,
                    prompt_tokens=prompt,
                    batch=batch,
                    output_tokens=output,
                    prefill_chunk=chunk,
                )
                yield PlannedCase(strategy, case)


def _variants(config: ProbeConfig, strategy: Strategy) -> list[tuple[str, str, int | None]]:
    baseline = strategy.name == BASELINE
    protocols = config.protocols[:1] if baseline else config.protocols
    kernels = config.kernels if baseline else [OWN_KERNEL]
    return list(itertools.product(protocols, kernels, config.prefill_chunks))
