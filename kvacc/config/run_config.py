"""Everything that a sweep is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictBool, model_validator

from kvacc.config.entries import (
    AUTO,
    ModelEntries,
    StrategyEntries,
    Task,
    TaskEntry,
    strategy_identity,
)
from kvacc.config.parts import (
    Count,
    Natural,
    Part,
    ProtocolName,
    Text,
    as_list,
    faults_at,
    one_of,
)
from kvacc.errors import KvaccError
from kvacc.shots import DEFAULT_SAMPLER, FEWSHOT_SAMPLERS


class RunConfig(Part):
    """Everything that a sweep was asked for."""

    name: Text = Field(default="run", description="Title of the run.")
    models: ModelEntries = Field(description="Models, each loaded once.")
    strategies: StrategyEntries = Field(description="Strategies with their budgets.")
    protocols: Annotated[list[ProtocolName], BeforeValidator(as_list), Field(min_length=1)] = Field(
        default=["stream"], description="When compression acts."
    )
    tasks: Annotated[list[Task], BeforeValidator(as_list), Field(min_length=1)] = Field(
        default=[AUTO],
        description="Task ids, groups or mappings with options; auto: the six benchmarks, or the embedded "
        "tasks without them.",
    )
    shots: Annotated[list[Natural], BeforeValidator(as_list), Field(min_length=1)] = Field(
        default=[0], description="Few-shot examples per prompt."
    )
    fewshot_sampler: Annotated[str, one_of("fewshot_sampler", FEWSHOT_SAMPLERS)] = Field(
        default=DEFAULT_SAMPLER,
        description="default: other examples for every document; first_n: the first ones for all, read once.",
    )
    limit: Count | None = Field(default=None, description="First items of each task; null is all.")
    seed: Natural = Field(default=1234, description="Seed of the few-shot examples.")
    data_dir: Text | None = Field(default=None, description="Folder with the benchmarks' documents.")
    tail_tokens: Count = Field(default=32, description="Tokens after the context when a task names none.")
    max_batch_tokens: Count | None = Field(default=None, description="Most tokens in a batch; null decides.")
    fidelity: StrictBool = Field(
        default=False, description="Compare next-token distributions with full's too; costs time."
    )
    include: Annotated[list[Text], BeforeValidator(as_list)] = Field(
        default=[], description="Python files with strategies of your own."
    )

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        found = [*self._repetitions(), *self._unsupported_protocols()]
        if found:
            raise faults_at(found)
        return self

    def asked_tasks(self) -> list[tuple[str, dict[str, Any]]]:
        """(task, options) for every task, those of groups included; ``auto`` stays what it is."""
        entries = [entry if isinstance(entry, TaskEntry) else TaskEntry(name=entry) for entry in self.tasks]
        return [pair for entry in entries for pair in ([(AUTO, {})] if entry.name == AUTO else entry.asked())]

    def _repetitions(self) -> Iterator[tuple[tuple[str | int, ...], str, Any]]:
        for field in ("protocols", "tasks", "shots"):
            values = getattr(self, field)
            for index, value in enumerate(values):
                if value in values[:index]:
                    yield (field, index), f"{value!r} is listed twice; keep one", value
        models = [model.identity() for model in self.models]
        for index, identity in enumerate(models):
            if identity in models[:index]:
                what = f"the same model as models.{models.index(identity)}; keep one"
                yield ("models", index), what, identity
        seen: dict[Any, int] = {}
        for index, entry in enumerate(self.strategies):
            for strategy in entry.strategies():
                key = json.dumps(strategy_identity(strategy), sort_keys=True)
                if seen.setdefault(key, index) != index:
                    what = f"{strategy!r} is also planned by strategies.{seen[key]}; keep one"
                    yield ("strategies", index), what, entry.name

    def _unsupported_protocols(self) -> Iterator[tuple[tuple[str | int, ...], str, Any]]:
        for index, entry in enumerate(self.strategies):
            for protocol in self.protocols:
                try:
                    entry.strategies()[0].require_protocol(protocol)
                except KvaccError as error:
                    yield ("strategies", index), str(error), entry.name
