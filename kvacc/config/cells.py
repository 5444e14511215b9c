"""The cells that a configuration plans: models x strategies x budgets x protocols x tasks x shots."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from kvacc import task_catalog
from kvacc.config.entries import AUTO, ModelEntry, strategy_identity
from kvacc.config.run_config import RunConfig
from kvacc.errors import KvaccError
from kvacc.shots import DEFAULT_SAMPLER, shots_text
from kvacc.strategy import Strategy

BASELINE = "full"
_ID_LENGTH = 16


@dataclass(frozen=True)
class CellSpec:
    """One cell as asked for: model x strategy x budget x protocol x task x shots.

    ``full`` gives the same scores under every protocol, so it is planned once, with
    the first protocol in its ``protocol`` field.
    """

    model: ModelEntry
    strategy: Strategy
    protocol: str
    task: str
    shots: int
    limit: int | None
    seed: int
    tail_tokens: int
    source: str
    """Where the documents come from: hub, folder or embedded."""
    why_source: str = dataclasses.field(default="", compare=False)
    task_options: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """Of a task that takes options, those that differ from the defaults; files by name and content."""
    task_paths: dict[str, str] = dataclasses.field(default_factory=dict, compare=False)
    """Where those files lie."""
    fidelity: bool = False
    """Compare every distribution with ``full``'s; a cell of ``full`` keeps its own for that, and is
    the same cell without."""
    fewshot_sampler: str = DEFAULT_SAMPLER
    """How the examples are chosen; without any it is ``default``, whatever was given."""

    def __post_init__(self) -> None:
        if not self.shots:
            object.__setattr__(self, "fewshot_sampler", DEFAULT_SAMPLER)

    def asked(self) -> dict[str, Any]:
        """What was asked for, as plain values with the field names of a result's ``spec``."""
        return {
            "model": self.model.identity(),
            **strategy_identity(self.strategy),
            "protocol": self.protocol,
            "task": self.task,
            "shots": self.shots,
            "limit": self.limit,
            "seed": self.seed,
            "tail_tokens": self.tail_tokens,
            # Ids of cells without options stay what they were before there were any.
            **({"task_options": self.task_options} if self.task_options else {}),
            # Only where they were asked for: ids of earlier cells stay what they are.
            **({"fewshot_sampler": self.fewshot_sampler} if self.fewshot_sampler != DEFAULT_SAMPLER else {}),
            **({"fidelity": True} if self.fidelity and self.strategy.name != BASELINE else {}),
        }

    @property
    def cell_id(self) -> str:
        """Short hash of everything that was asked for, the source of the data included."""
        text = json.dumps({**self.asked(), "source": self.source}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:_ID_LENGTH]

    @property
    def label(self) -> str:
        """``smollm2-135m h2o 0.2 stream piqa 0-shot``, for a person to read."""
        budget = f" {self.strategy.budget}" if self.strategy.has_budget else ""
        model = self.model.pretrained.rstrip("/").rsplit("/", 1)[-1]
        options = "".join(f" {name}={_shown_option(value)}" for name, value in self.task_options.items())
        shots = shots_text(self.shots, self.fewshot_sampler)
        return f"{model} {self.strategy.name}{budget} {self.protocol} {self.task}{options} {shots}"

    @property
    def task_settings(self) -> dict[str, Any]:
        """The task's options as :func:`kvacc.task_catalog.load_tasks` takes them."""
        return {**self.task_options, **self.task_paths}


def _shown_option(value: Any) -> str:
    return ",".join(f"{part:g}" for part in value) if isinstance(value, list) else str(value)


def plan_cells(config: RunConfig) -> list[CellSpec]:
    """Every cell of the sweep, model by model, ``full`` first.

    Raises:
        KvaccError: a task's documents cannot be reached.
    """
    tasks = _resolve_tasks(config)
    planned: dict[str, CellSpec] = {}
    for model in config.models:
        strategies = [strategy for entry in config.strategies for strategy in entry.strategies()]
        # A stable sort: the baseline first, so that every later cell can be compared.
        for strategy in sorted(strategies, key=lambda strategy: strategy.name != BASELINE):
            protocols = config.protocols[:1] if strategy.name == BASELINE else config.protocols
            for protocol in protocols:
                for task in tasks:
                    for shots in config.shots:
                        spec = CellSpec(
                            model, strategy, protocol, task.name, shots, config.limit, config.seed,
                            config.tail_tokens, task.source, task.why, fidelity=config.fidelity,
                            task_options=task.options, task_paths=task.paths,
                            fewshot_sampler=config.fewshot_sampler,
                        )  # fmt: skip
                        planned.setdefault(spec.cell_id, spec)
    return list(planned.values())


@dataclass(frozen=True)
class _ResolvedTask:
    """A task as it will be run."""

    name: str
    options: dict[str, Any]
    paths: dict[str, str]
    source: str
    why: str
    """Why the documents come from this source."""


def _resolve_tasks(config: RunConfig) -> list[_ResolvedTask]:
    """Every task asked for, each with its options once.

    Whether the hub has a task that is asked for by name shows when it is loaded, which is
    before any model is: it may be in the hub's local cache, without a network.
    """
    infos = task_catalog.task_names()
    chosen: dict[tuple[str, str], _ResolvedTask] = {}

    def choose(name: str, options: dict[str, Any], why: str) -> None:
        stated, paths = task_catalog.canonical_options(infos[name], options)
        source = str(infos[name].source(config.data_dir))
        if "texts" in paths:  # the user's own documents
            source, why = str(task_catalog.TaskSource.FOLDER), "the option texts"
        key = (name, json.dumps(stated, sort_keys=True))
        chosen.setdefault(key, _ResolvedTask(name, stated, paths, source, why))

    for name, options in config.asked_tasks():
        if name == AUTO:
            for task, why in _automatic_tasks(config.data_dir).items():
                choose(task, {}, why)
        elif infos[name].source(config.data_dir) is task_catalog.TaskSource.HUB:
            choose(name, options, "no data folder is named")
        else:
            usable, why = infos[name].available(config.data_dir)
            if not usable:
                raise KvaccError(why)
            choose(name, options, why)
    return list(chosen.values())


def _automatic_tasks(data_dir: str | None) -> dict[str, str]:
    """The benchmarks that can be reached, else the embedded tasks; each with the reason."""
    # The hub is asked once for all tasks: where it is unreachable, each time costs seconds.
    hub_answer = functools.cache(task_catalog.hub_reachable)
    reached, missing = {}, ""
    for name in task_catalog.BENCHMARKS:
        info = task_catalog.find_task(name)
        on_hub = info.source(data_dir) is task_catalog.TaskSource.HUB
        usable, why = hub_answer() if on_hub else info.available(data_dir)
        if usable:
            reached[name] = why
        missing = missing or why
    if reached:
        return reached
    return dict.fromkeys(task_catalog.SMOKE_TESTS, f"no benchmark can be reached: {missing}")
