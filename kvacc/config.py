"""Configuration of a sweep, and the cells that it plans.

A configuration is a YAML file (see ``configs/``)::

    models: [{pretrained: smollm2-135m, dtype: float32}]
    strategies:
      - full                                   # short for {name: full}
      - {name: h2o, budgets: [0.5, 0.2], recent_fraction: 0.5}
    protocols: [stream]
    tasks: [piqa, {name: kvacc_needle, length: [512, 1024]}]
    limit: 100

:func:`load_config` reports every mistake at once, each with ``file:line:column``.
:func:`plan_cells` multiplies it out: models x strategies x budgets x protocols x
tasks x shots. Nothing here loads a model or a document.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    StrictInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from kvacc import task_catalog
from kvacc.budget import REFERENCES, Budget
from kvacc.errors import KvaccError, nearest, unknown
from kvacc.include import include_faults
from kvacc.marked_yaml import Fault, MarkedYaml, apply_override, read_marked
from kvacc.models import DTYPES
from kvacc.strategy import PROTOCOLS, Strategy, make_strategy, strategy_classes
from kvacc.task_catalog import DATA_DIR_VARIABLE

AUTO = "auto"
BASELINE = "full"
_ID_LENGTH = 16
_AMPLE_BUDGET = 10**9


def _one_of(what: str, allowed: Sequence[str]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in allowed:
            raise unknown(what, value, allowed)
        return value

    return AfterValidator(check)


def _task_entry(value: Any) -> str | TaskEntry:
    """A name, or a mapping with a name and options; without options it is its name."""
    if isinstance(value, TaskEntry):
        return value
    if isinstance(value, dict):
        entry = TaskEntry.model_validate(value)
        return entry if entry.model_extra else entry.name
    return _known_task(value)


def _known_task(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is no task; give a name, or {{name: ..., length: ...}}")
    if name != AUTO:
        task_catalog.members(name)
    return name


def _wrap(value: Any) -> Any:
    """One entry may be written without its list."""
    return value if value is None or isinstance(value, list) else [value]


def _named(field: str) -> BeforeValidator:
    """One entry may be written as its name alone."""
    return BeforeValidator(lambda value: {field: value} if isinstance(value, str) else value)


_Text = Annotated[str, Field(min_length=1)]
_Count = Annotated[StrictInt, Field(ge=1)]
_Natural = Annotated[StrictInt, Field(ge=0)]
_Protocol = Annotated[str, _one_of("protocol", PROTOCOLS)]
_Task = Annotated[Any, PlainValidator(_task_entry)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelEntry(_Part):
    """A Hugging Face decoder, and how to load it."""

    pretrained: _Text = Field(description="Name on the hub, folder, or the alias smollm2-135m.")
    revision: _Text | None = Field(default=None, description="Branch, tag or commit on the hub.")
    dtype: Annotated[str, _one_of("dtype", DTYPES)] = Field(default="float32", description="Number format.")
    device: _Text | None = Field(default=None, description="cpu, cuda, cuda:1; null picks one.")
    device_map: _Text | dict[str, Any] | None = Field(default=None, description="Spread, as in transformers.")
    trust_remote_code: StrictBool = Field(default=False, description="Run code that comes with the model.")
    gguf_file: _Text | None = Field(default=None, description="GGUF file inside pretrained.")

    @model_validator(mode="after")
    def _one_placement(self) -> ModelEntry:
        if self.device is not None and self.device_map is not None:
            raise _faults([(("device_map",), "give device or device_map, not both", self.device_map)])
        return self

    def identity(self) -> dict[str, Any]:
        """What decides the model's numbers; where it runs is left out."""
        return self.model_dump(exclude={"device", "device_map"})


class StrategyEntry(BaseModel):
    """A strategy, its budgets and its own options, which stand beside them."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    name: _Text = Field(description="Name of the strategy.")
    budget: Any = Field(default=None, description="One budget: a count (256) or a fraction (0.2, '20%').")
    budgets: Annotated[list[Any] | None, BeforeValidator(_wrap), Field(min_length=1)] = Field(
        default=None, description="Several budgets."
    )
    budget_of: Annotated[str, _one_of("budget_of", REFERENCES)] = Field(
        default="prompt", description="What a fraction refers to: prompt or seen."
    )

    @model_validator(mode="after")
    def _makes_strategies(self) -> StrategyEntry:
        found = list(self._problems())
        if found:
            raise _faults(found)
        return self

    def strategies(self) -> list[Strategy]:
        """One strategy per budget, in the order given."""
        options = self._typed_options()
        return [make_strategy(self.name, budget, self.budget_of, **options) for _, budget in self._budgets()]

    def _budgets(self) -> list[tuple[tuple[str | int, ...], Any]]:
        if self.budgets is None:
            return [(("budget",), self.budget)]
        return [(("budgets", index), budget) for index, budget in enumerate(self.budgets)]

    def _typed_options(self) -> dict[str, Any]:
        kinds = _option_types(strategy_classes()[self.name])
        return {name: _typed(kinds[name], value) for name, value in self.model_extra.items()}

    def _problems(self) -> Iterator[tuple[tuple[str | int, ...], str, Any]]:
        classes = strategy_classes()
        if self.name not in classes:
            yield ("name",), str(unknown("strategy", self.name, classes)), self.name
            return
        wrong_options = list(self._option_problems())
        for path, message in wrong_options:
            yield path, message, self.model_extra.get(path[0] if path else "")
        if self.budget is not None and self.budgets is not None:
            yield ("budgets",), "give budget or budgets, not both", self.budgets
            return
        seen: dict[str, Any] = {}
        for path, budget in self._budgets():
            try:
                # With wrong options only what is wrong with the budget itself can be said.
                parsed = None if budget is None else Budget.parse(budget, self.budget_of)
                if not wrong_options:
                    parsed = make_strategy(self.name, parsed, self.budget_of, **self._typed_options()).budget
            except KvaccError as error:
                missing = self.budgets is None and budget is None
                yield () if missing else path, str(error), budget
                continue
            if str(parsed) in seen:
                yield path, f"budget {budget!r} is the same as {seen[str(parsed)]!r}; keep one", budget
            seen.setdefault(str(parsed), budget)

    def _option_problems(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        kinds = _option_types(strategy_classes()[self.name])
        typed = {}
        for option, value in self.model_extra.items():
            if option not in kinds:
                close = nearest(option, [*kinds, *type(self).model_fields])
                what = f"strategy {self.name!r} has no option {option!r}{close}"
                yield (option,), f"{what}; its options: {', '.join(kinds) or 'none'}"
                continue
            try:
                typed[option] = _typed(kinds[option], value)
            except ValidationError as error:
                yield (option,), _sentence({**error.errors()[0], "input": value})
        try:
            # A budget that no sinks or recent tokens can exceed: what fails now is an option.
            has_budget = strategy_classes()[self.name].has_budget
            make_strategy(self.name, _AMPLE_BUDGET if has_budget else None, **typed)
        except KvaccError as error:
            named = [option for option in typed if option in str(error)]
            yield tuple(named[:1]), str(error)


class TaskEntry(BaseModel):
    """A task or a group of tasks, and its options, which stand beside the name."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    name: Annotated[str, AfterValidator(_known_task)] = Field(description="Name of the task or group.")

    @model_validator(mode="after")
    def _fits(self) -> TaskEntry:
        found = list(self._problems())
        if found:
            raise _faults(found)
        return self

    def asked(self) -> list[tuple[str, dict[str, Any]]]:
        """(task, its options) for every task of the group and every length, in the order given."""
        lengths = self.model_extra.get("length")
        variants = (
            [{**self.model_extra, "length": length} for length in lengths]
            if isinstance(lengths, list)
            else [dict(self.model_extra)]
        )
        return [
            (name, self._taken(name, options))
            for options in variants
            for name in task_catalog.members(self.name)
        ]

    def _taken(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        # A group's options go to those of its tasks that have them.
        return options if name == self.name else task_catalog.taken_options(name, options)

    def _problems(self) -> Iterator[tuple[tuple[str | int, ...], str, Any]]:
        if self.name == AUTO:
            for option, value in self.model_extra.items():
                yield (option,), f"tasks: auto takes no options; {option} belongs to a task's name", value
            return
        lengths = self.model_extra.get("length")
        if isinstance(lengths, list):
            if not lengths:
                yield ("length",), "an empty list plans nothing; give one length or more", lengths
                return
            repeated = [index for index, length in enumerate(lengths) if length in lengths[:index]]
            for index in repeated:
                yield ("length", index), f"{lengths[index]!r} is listed twice; keep one", lengths[index]
        useless = set(self.model_extra) - {option for _, options in self.asked() for option in options}
        for option in self.model_extra:
            if option in useless:
                yield (option,), task_catalog.no_such_option([self.name], option), self.model_extra[option]
        said = set()
        for task, options in self.asked():
            for option, what in task_catalog.option_problems(task_catalog.find_task(task), options):
                path = (option, lengths.index(options[option])) if _is_listed(option, lengths) else (option,)
                # A group's tasks refuse a value in the same words.
                if (path, what) not in said:
                    said.add((path, what))
                    yield path, what, options[option]


def _is_listed(option: str, lengths: Any) -> bool:
    """True when the option is one of several lengths, each of which stands at its own place."""
    return option == "length" and isinstance(lengths, list)


def strategy_from_words(name: str, options: Mapping[str, str]) -> Strategy:
    """The strategy with options as typed on a command line, under a budget of everything.

    Raises:
        KvaccError: an unknown strategy or option, or a value that does not fit.
    """
    values = {}
    for option, text in options.items():
        try:
            values[option] = yaml.safe_load(text)
        except yaml.YAMLError:
            values[option] = text
    cls = strategy_classes().get(name)
    budget = 1.0 if cls is not None and cls.has_budget else None
    for option in values:
        if option in StrategyEntry.model_fields:
            known = ", ".join(_option_types(cls)) if cls is not None else ""
            raise KvaccError(f"{option!r} is no option of strategy {name!r}; its options: {known or 'none'}")
    try:
        (strategy,) = StrategyEntry(name=name, budget=budget, **values).strategies()
    except ValidationError as error:
        raise KvaccError(_sentence(error.errors()[0])) from None
    return strategy


def _typed(kind: TypeAdapter, value: Any) -> Any:
    # As JSON, a list may stand for a tuple, while 1 is still no bool and "1" no number.
    return kind.validate_json(json.dumps(value, default=str), strict=True)


@functools.cache
def _option_types(cls: type[Strategy]) -> dict[str, TypeAdapter]:
    """The strategy's options and the type of their values."""
    kinds = {}
    for option in dataclasses.fields(cls):
        if option.init and option.name != "budget":
            # Only this annotation is resolved: others may name types imported for checking only.
            owner = next(base for base in cls.__mro__ if option.name in vars(base).get("__annotations__", {}))
            holder = types.SimpleNamespace(__annotations__={option.name: option.type})
            hints = typing.get_type_hints(holder, vars(sys.modules[owner.__module__]))
            kinds[option.name] = TypeAdapter(hints[option.name])
    return kinds


class RunConfig(_Part):
    """Everything that a sweep was asked for."""

    name: _Text = Field(default="run", description="Title of the run.")
    models: Annotated[
        list[Annotated[ModelEntry, _named("pretrained")]], BeforeValidator(_wrap), Field(min_length=1)
    ] = Field(description="Models, each loaded once.")
    strategies: Annotated[
        list[Annotated[StrategyEntry, _named("name")]], BeforeValidator(_wrap), Field(min_length=1)
    ] = Field(description="Strategies with their budgets.")
    protocols: Annotated[list[_Protocol], BeforeValidator(_wrap), Field(min_length=1)] = Field(
        default=["stream"], description="When compression acts."
    )
    tasks: Annotated[list[_Task], BeforeValidator(_wrap), Field(min_length=1)] = Field(
        default=[AUTO],
        description="Task ids, groups or mappings with options; auto: the six benchmarks, or the embedded "
        "tasks without them.",
    )
    shots: Annotated[list[_Natural], BeforeValidator(_wrap), Field(min_length=1)] = Field(
        default=[0], description="Few-shot examples per prompt."
    )
    limit: _Count | None = Field(default=None, description="First items of each task; null is all.")
    seed: _Natural = Field(default=1234, description="Seed of the few-shot examples.")
    data_dir: _Text | None = Field(default=None, description="Folder with the benchmarks' documents.")
    tail_tokens: _Count = Field(default=32, description="Tokens after the context when a task names none.")
    max_batch_tokens: _Count | None = Field(default=None, description="Most tokens in a batch; null decides.")
    fidelity: StrictBool = Field(
        default=False, description="Compare next-token distributions with full's too; costs time."
    )
    include: Annotated[list[_Text], BeforeValidator(_wrap)] = Field(
        default=[], description="Python files with strategies of your own."
    )

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        found = [*self._repetitions(), *self._unsupported_protocols()]
        if found:
            raise _faults(found)
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
                key = json.dumps(_strategy_identity(strategy), sort_keys=True)
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

    def asked(self) -> dict[str, Any]:
        """What was asked for, as plain values with the field names of a result's ``spec``."""
        return {
            "model": self.model.identity(),
            **_strategy_identity(self.strategy),
            "protocol": self.protocol,
            "task": self.task,
            "shots": self.shots,
            "limit": self.limit,
            "seed": self.seed,
            "tail_tokens": self.tail_tokens,
            # Ids of cells without options stay what they were before there were any.
            **({"task_options": self.task_options} if self.task_options else {}),
            # Only where it was asked for: ids of earlier cells stay what they are.
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
        return f"{model} {self.strategy.name}{budget} {self.protocol} {self.task}{options} {self.shots}-shot"

    @property
    def task_settings(self) -> dict[str, Any]:
        """The task's options as :func:`kvacc.task_catalog.load_tasks` takes them."""
        return {**self.task_options, **self.task_paths}


def _shown_option(value: Any) -> str:
    return ",".join(f"{part:g}" for part in value) if isinstance(value, list) else str(value)


def _strategy_identity(strategy: Strategy) -> dict[str, Any]:
    # An edited file defines another strategy, whatever its name and options.
    file = {} if strategy.file_sha256 is None else {"file_sha256": strategy.file_sha256}
    return {
        "strategy": strategy.name,
        "options": {**strategy.options(), **file},
        "budget": str(strategy.budget) if strategy.has_budget else None,
        "budget_of": strategy.budget.of,
    }


def load_config(
    path: str | os.PathLike[str],
    overrides: Iterable[str] = (),
    include: Iterable[str | os.PathLike[str]] = (),
    task_options: Iterable[str] = (),
) -> RunConfig:
    """Read and check a configuration file, and include the strategy files that it names.

    Args:
        path: a YAML file, or the name of a packaged one (``quickstart``).
        overrides: ``a.b.0=c``, applied in order; ``c`` is YAML.
        include: strategy files beside those that the configuration includes.
        task_options: ``option=value`` for every task that takes it; ``value`` is YAML.

    Returns:
        The configuration, with local paths made absolute: those in the file stand
        relative to the file, those in overrides and ``include`` relative to the working
        folder.

    Raises:
        KvaccError: all mistakes, each on its line as ``file:line:column: path: what``.
    """
    file, shown = _find(path)
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise KvaccError(f"{shown}: byte {error.start} is not UTF-8 text; save the file as UTF-8") from None
    except OSError as error:
        raise KvaccError(f"{shown}: cannot be read: {error.strerror}") from None
    document = read_marked(text, shown)
    for override in overrides:
        apply_override(document, override)
    if isinstance(document.value, dict):
        document.value.setdefault("name", file.stem)
        for option in task_options:
            _apply_task_option(document, option)
        _resolve_folders(document, file.parent)
        _add_included(document, include)
    return _validated(document)


def config_from(values: dict[str, Any], source: str = "configuration") -> RunConfig:
    """The configuration given as plain values; raises KvaccError as :func:`load_config` does."""
    return _validated(MarkedYaml(source, values))


def packaged_configs() -> dict[str, Path]:
    """The configurations that come with kvacc, by name."""
    import kvacc.configs as package

    folders = [Path(folder) for folder in package.__path__]
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}


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


def _find(path: str | os.PathLike[str]) -> tuple[Path, str]:
    """The file meant by ``path``, and its name as errors shall show it."""
    file = Path(path).expanduser()
    if file.is_file():
        return file.absolute(), str(path)
    if file.is_dir():
        raise KvaccError(f"configuration {str(path)!r} is a folder; name a YAML file in it")
    packaged = packaged_configs()
    is_bare = str(file.parent) in (".", "configs") and file.suffix in ("", ".yaml", ".yml")
    if is_bare and file.stem in packaged:
        return packaged[file.stem], f"configs/{packaged[file.stem].name}"
    names = ", ".join(packaged) or "none"
    close = nearest(file.stem, packaged)
    raise KvaccError(f"no configuration file {str(path)!r}{close}; packaged ones: {names}")


def _resolve_folders(document: MarkedYaml, config_folder: Path) -> None:
    """Make local folders absolute, so that a run does not depend on where it was started."""

    def absolute(path: tuple[str | int, ...], text: str) -> Path:
        base = Path.cwd() if document.where(path).startswith("--") else config_folder
        return Path(os.path.normpath(base / Path(text).expanduser()))

    data_dir = document.value.get("data_dir")
    if data_dir is None and os.environ.get(DATA_DIR_VARIABLE):
        folder = Path(os.environ[DATA_DIR_VARIABLE]).expanduser().absolute()
        document.value["data_dir"] = str(folder)
        document.marks[("data_dir",)] = f"environment variable {DATA_DIR_VARIABLE}"
    elif isinstance(data_dir, str) and data_dir:
        folder = absolute(("data_dir",), data_dir)
        document.value["data_dir"] = str(folder)
    else:
        folder = None
    if folder is not None and not folder.is_dir():
        document.fault(("data_dir",), f"no folder {folder}; name an existing one, or leave data_dir out")
    tasks = document.value.get("tasks")
    for index, task in enumerate(tasks if isinstance(tasks, list) else [tasks]):
        for option in task_catalog.PATH_OPTIONS if isinstance(task, dict) else ():
            if isinstance(task.get(option), str) and task[option]:
                place = ("tasks", index, option) if isinstance(tasks, list) else ("tasks", option)
                found = absolute(place, task[option])
                task[option] = str(found)
                if not found.exists():
                    document.fault(place, f"no file or folder {found}; name an existing one")
    included = document.value.get("include")
    if isinstance(included, str):
        included = document.value["include"] = [included]
    for index, name in enumerate(included if isinstance(included, list) else []):
        if isinstance(name, str) and name:
            included[index] = str(absolute(("include", index), name))
    models = document.value.get("models")
    for index, model in enumerate(models if isinstance(models, list) else []):
        path = ("models", index, "pretrained")
        name = model.get("pretrained") if isinstance(model, dict) else model
        if not isinstance(name, str) or not name:
            continue
        local = absolute(path, name)
        # A hub name looks like a relative path; only an existing folder or GGUF file makes it one.
        if name.startswith((".", "~", "/")) or local.exists():
            if isinstance(model, dict):
                model["pretrained"] = str(local)
            else:
                models[index] = str(local)


def _apply_task_option(document: MarkedYaml, word: str) -> None:
    """Give ``option=value`` to every task of the configuration that takes it."""
    where = f"--task-option {word}"
    option, equals, text = word.partition("=")
    option = option.strip()
    if not equals or not option:
        what = "write OPTION=VALUE, such as length=1024 or depths=[0, 0.5, 1]"
        document.faults.append(Fault(where, (), what))
        return
    new = read_marked(text, where)
    document.faults.extend(Fault(where, (), fault.what) for fault in new.faults)
    if new.faults:
        return
    tasks = document.value.get("tasks", AUTO)
    tasks = document.value["tasks"] = tasks if isinstance(tasks, list) else [tasks]
    takers = 0
    for index, task in enumerate(tasks):
        name = task.get("name") if isinstance(task, dict) else task
        if not isinstance(name, str) or not task_catalog.takes_option(name, option):
            continue
        takers += 1
        if not isinstance(task, dict):
            tasks[index] = task = {"name": name}
        task[option] = new.value
        for mark in [mark for mark in document.marks if mark[:3] == ("tasks", index, option)]:
            del document.marks[mark]
        document.marks["tasks", index, option] = where
    if not takers:
        names = [str(task.get("name") if isinstance(task, dict) else task) for task in tasks]
        document.faults.append(Fault(where, (), task_catalog.no_such_option(names, option)))


def _add_included(document: MarkedYaml, paths: Iterable[str | os.PathLike[str]]) -> None:
    """Put files named on the command line behind those of the configuration."""
    for path in paths:
        listed = document.value.setdefault("include", [])
        file = str(Path(path).expanduser().absolute())
        if isinstance(listed, list) and file not in listed:
            document.marks[("include", len(listed))] = f"--include {path}"
            listed.append(file)


def _run_included(document: MarkedYaml) -> None:
    """Run the included files, so that their strategies are known.

    Raises:
        KvaccError: one of them cannot be included; without its strategies nothing else
            that is wrong could be told apart.
    """
    files = document.value.get("include") if isinstance(document.value, dict) else None
    files = [files] if isinstance(files, str) else files
    if not isinstance(files, list) or not all(isinstance(file, str) and file for file in files):
        return  # said when the whole is checked
    for index, what in include_faults(files):
        raise KvaccError(str(Fault(document.where(("include", index)), ("include", index), what)))


def _validated(document: MarkedYaml) -> RunConfig:
    _run_included(document)
    faults = list(document.faults)
    config = None
    # A fault without a path means that the text could not be read as a whole.
    if all(fault.path for fault in faults):
        try:
            if not isinstance(document.value, dict):
                what = "is empty" if document.value is None else "is no mapping"
                raise KvaccError(f"{document.source}: {what}; write models, strategies and tasks")
            config = RunConfig.model_validate(document.value)
        except ValidationError as error:
            # Where a part could not be read, that the whole is wrong needs no saying.
            found = (_as_fault(document, item) for item in error.errors())
            known = [fault.path for fault in faults]
            faults += [
                fault for fault in found if not any(path[: len(fault.path)] == fault.path for path in known)
            ]
    if not faults and config is not None:
        return config
    # The same place can be at fault for two reasons; each is said once.
    lines = list(dict.fromkeys(str(fault) for fault in faults))
    if len(lines) == 1:
        raise KvaccError(lines[0])
    raise KvaccError("\n".join([f"{len(lines)} mistakes in {document.source}:", *lines]))


def _as_fault(document: MarkedYaml, item: dict[str, Any]) -> Fault:
    path = tuple(item["loc"])
    # For a union pydantic adds the name of the member that was tried.
    while len(path) > 1 and path not in document.marks and not _is_field(path):
        path = path[:-1]
    if item["type"] == "extra_forbidden":
        fields = (ModelEntry if path[0] == "models" else RunConfig).model_fields
        what = f"unknown key{nearest(str(path[-1]), fields)}; known: {', '.join(fields)}"
    elif item["type"] == "missing":
        what = "is missing"
    else:
        what = _sentence(item)
    return Fault(document.where(path), path, what)


def _is_field(path: tuple[str | int, ...]) -> bool:
    """True when the last part of ``path`` is a key that a configuration can have."""
    if isinstance(path[-1], int) or (path[0] == "tasks" and path[-1] in task_catalog.every_option()):
        return True
    return any(path[-1] in part.model_fields for part in (RunConfig, ModelEntry, StrategyEntry, TaskEntry))


def _sentence(item: dict[str, Any]) -> str:
    """pydantic's message with the value it is about."""
    if item["type"] == "kvacc":
        return item["msg"]
    if item["type"] == "value_error":
        return item["msg"].removeprefix("Value error, ")
    message = item["msg"][0].lower() + item["msg"][1:]
    return f"{item['input']!r} is refused: {message}"


def _faults(found: Iterable[tuple[tuple[str | int, ...], str, Any]]) -> ValidationError:
    """An error that a validator raises to point at parts of its value."""
    return ValidationError.from_exception_data(
        "configuration",
        [
            InitErrorDetails(
                type=PydanticCustomError("kvacc", "{what}", {"what": what}), loc=path, input=value
            )
            for path, what, value in found
        ],
    )
