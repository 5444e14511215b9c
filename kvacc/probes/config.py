"""Configuration of a probe run: what is measured, on which cases.

A configuration is a YAML file, in the manner of a sweep's (:mod:`kvacc.config`)::

    models: [{pretrained: smollm2-135m, dtype: float32}]
    strategies: [full, {name: h2o, budgets: [0.5, 0.2]}]
    prompts: [512, 2048]        # tokens of each prompt
    outputs: [32]               # tokens generated after it

:func:`load_probe_config` reports every mistake at once, each with ``file:line:column``.
Nothing here loads a model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictInt, model_validator

from kvacc.config import (
    BASELINE,
    ModelEntries,
    Part,
    StrategyEntries,
    add_included,
    as_list,
    faults_at,
    one_of,
    packaged_probe_configs,
    read_document,
    resolve_models_and_includes,
    strategy_identity,
    validated,
)
from kvacc.errors import KvaccError
from kvacc.marked_yaml import MarkedYaml
from kvacc.probes.records import KERNELS
from kvacc.quantities import parse_bytes
from kvacc.strategy import PROTOCOLS

OWN_KERNEL = "kvacc"
MEASURES = ("latency", "memory", "transfers", "capacity")
"""What :attr:`ProbeConfig.measures` may name."""


def _size(value: Any) -> int:
    """``4GB``, ``512MiB`` or a number of bytes, as bytes."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return parse_bytes(f"{value}B" if whole else value, "size")


def _nullable(value: Any) -> Any:
    """One entry, ``null`` included, may be written without its list."""
    return value if isinstance(value, list) else [value]


_Text = Annotated[str, Field(min_length=1)]
_Count = Annotated[StrictInt, Field(ge=1)]
_Natural = Annotated[StrictInt, Field(ge=0)]
_Counts = Annotated[list[_Count], BeforeValidator(as_list), Field(min_length=1)]
_Kernel = Annotated[str, one_of("kernel", KERNELS)]
_Measure = Annotated[str, one_of("measure", MEASURES)]
_Size = Annotated[int, BeforeValidator(_size)]


class CapacityEntry(Part):
    """A search for the largest prompt or batch that fits."""

    limit: _Size | None = Field(
        default=None, description="Bytes allowed, such as 4GB; null is the device's own memory (CUDA only)."
    )
    search: Annotated[
        list[Literal["prompt_tokens", "batch"]], BeforeValidator(as_list), Field(min_length=1)
    ] = Field(default=["prompt_tokens"], description="What is made larger.")
    most: _Count | None = Field(
        default=None, description="Largest prompt or batch to try; null is up to the model's positions."
    )


class ProbeConfig(Part):
    """Everything that a probe run was asked for."""

    name: _Text = Field(default="probe", description="Title of the run.")
    models: ModelEntries = Field(description="Models, each loaded once.")
    strategies: StrategyEntries = Field(description="Strategies with their budgets.")
    protocols: Annotated[
        list[Annotated[str, one_of("protocol", PROTOCOLS)]], BeforeValidator(as_list), Field(min_length=1)
    ] = Field(default=["serve"], description="When compression acts.")
    kernels: Annotated[list[_Kernel], BeforeValidator(as_list), Field(min_length=1)] = Field(
        default=[OWN_KERNEL], description="kvacc, and for full also eager, sdpa, flash_attention_2."
    )
    prompts: _Counts = Field(default=[512, 2048], description="Tokens of each prompt.")
    batches: _Counts = Field(default=[1], description="Prompts read at once.")
    outputs: _Counts = Field(default=[32], description="Tokens generated after each prompt.")
    prefill_chunks: Annotated[list[_Count | None], BeforeValidator(_nullable), Field(min_length=1)] = Field(
        default=[None], description="Tokens per prefill pass; null reads the prompt in one."
    )
    repeats: Annotated[StrictInt, Field(ge=2)] = Field(
        default=5, description="Timed runs of each case; no interval can be had of one."
    )
    warmup: _Natural = Field(default=1, description="Runs of each case before the first that counts.")
    seed: _Natural = Field(default=1234, description="Seed of the order of cases, and of intervals.")
    measures: Annotated[list[_Measure], BeforeValidator(as_list), Field(min_length=1)] = Field(
        default=["latency", "memory", "transfers"], description="latency, memory, transfers, capacity."
    )
    capacity: CapacityEntry | None = Field(default=None, description="What to search for, with capacity.")
    include: Annotated[list[_Text], BeforeValidator(as_list)] = Field(
        default=[], description="Python files with strategies of your own."
    )

    @model_validator(mode="after")
    def _consistent(self) -> ProbeConfig:
        found = [*self._repetitions(), *self._impossible()]
        if found:
            raise faults_at(found)
        return self

    def _repetitions(self) -> Iterator[tuple[tuple[str | int, ...], str, Any]]:
        for field in ("protocols", "kernels", "prompts", "batches", "outputs", "prefill_chunks", "measures"):
            values = getattr(self, field)
            for index, value in enumerate(values):
                if value in values[:index]:
                    yield (field, index), f"{value!r} is listed twice; keep one", value
        seen: dict[str, int] = {}
        for index, entry in enumerate(self.strategies):
            for strategy in entry.strategies():
                key = json.dumps(strategy_identity(strategy), sort_keys=True)
                if seen.setdefault(key, index) != index:
                    what = f"{strategy!r} is also planned by strategies.{seen[key]}; keep one"
                    yield ("strategies", index), what, entry.name

    def _impossible(self) -> Iterator[tuple[tuple[str | int, ...], str, Any]]:
        names = [entry.name for entry in self.strategies]
        for index, entry in enumerate(self.strategies):
            for protocol in self.protocols:
                try:
                    entry.strategies()[0].require_protocol(protocol)
                except KvaccError as error:
                    yield ("strategies", index), str(error), entry.name
            if not entry.strategies()[0].causal:
                what = f"{entry.name} with these options reads future tokens, so it cannot decode"
                yield ("strategies", index), what, entry.name
            if entry.name != BASELINE and OWN_KERNEL not in self.kernels:
                what = f"{entry.name} runs in kernel {OWN_KERNEL} only; add it to kernels"
                yield ("strategies", index), what, entry.name
        for index, kernel in enumerate(self.kernels):
            if kernel != OWN_KERNEL and BASELINE not in names:
                what = f"{kernel} serves strategy {BASELINE} alone; add {BASELINE} to strategies"
                yield ("kernels", index), what, kernel
        if "capacity" in self.measures and self.capacity is None:
            what = "is measured under a limit; add capacity: {limit: 4GB}"
            yield ("measures", self.measures.index("capacity")), what, "capacity"


def load_probe_config(
    path: str | os.PathLike[str],
    overrides: Iterable[str] = (),
    include: Iterable[str | os.PathLike[str]] = (),
) -> ProbeConfig:
    """Read and check a configuration file, and include the strategy files that it names.

    Args:
        path: a YAML file, or the name of a packaged one (``probe``).
        overrides: ``a.b.0=c``, applied in order; ``c`` is YAML.
        include: strategy files beside those that the configuration includes.

    Raises:
        KvaccError: all mistakes, each on its line as ``file:line:column: path: what``.
    """
    document, folder = read_document(path, overrides, packaged_probe_configs())
    if isinstance(document.value, dict):
        resolve_models_and_includes(document, folder)
        add_included(document, include)
    return validated(document, ProbeConfig)


def probe_config_from(values: dict[str, Any], source: str = "configuration") -> ProbeConfig:
    """The configuration given as plain values; raises KvaccError as :func:`load_probe_config` does."""
    return validated(MarkedYaml(source, values), ProbeConfig)
