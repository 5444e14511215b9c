"""Entries of a configuration: models, strategies with their budgets, tasks with their options."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import types
import typing
from collections.abc import Iterator, Mapping
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
    TypeAdapter,
    ValidationError,
    model_validator,
)

from kvacc import task_catalog
from kvacc.budget import REFERENCES, Budget
from kvacc.config.parts import Part, Text, as_list, by_name, faults_at, one_of, sentence
from kvacc.errors import KvaccError, nearest, unknown
from kvacc.models import DTYPES
from kvacc.strategy import Strategy, make_strategy, strategy_classes

AUTO = "auto"
_AMPLE_BUDGET = 10**9


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


Task = Annotated[Any, PlainValidator(_task_entry)]


class ModelEntry(Part):
    """A Hugging Face decoder, and how to load it."""

    pretrained: Text = Field(description="Name on the hub, folder, or the alias smollm2-135m.")
    revision: Text | None = Field(default=None, description="Branch, tag or commit on the hub.")
    dtype: Annotated[str, one_of("dtype", DTYPES)] = Field(default="float32", description="Number format.")
    device: Text | None = Field(default=None, description="cpu, cuda, cuda:1; null picks one.")
    device_map: Text | dict[str, Any] | None = Field(default=None, description="Spread, as in transformers.")
    trust_remote_code: StrictBool = Field(default=False, description="Run code that comes with the model.")
    gguf_file: Text | None = Field(default=None, description="GGUF file inside pretrained.")

    @model_validator(mode="after")
    def _one_placement(self) -> ModelEntry:
        if self.device is not None and self.device_map is not None:
            raise faults_at([(("device_map",), "give device or device_map, not both", self.device_map)])
        return self

    def identity(self) -> dict[str, Any]:
        """What decides the model's numbers; where it runs is left out."""
        return self.model_dump(exclude={"device", "device_map"})


class StrategyEntry(BaseModel):
    """A strategy, its budgets and its own options, which stand beside them."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    name: Text = Field(description="Name of the strategy.")
    budget: Any = Field(default=None, description="One budget: a count (256) or a fraction (0.2, '20%').")
    budgets: Annotated[list[Any] | None, BeforeValidator(as_list), Field(min_length=1)] = Field(
        default=None, description="Several budgets."
    )
    budget_of: Annotated[str, one_of("budget_of", REFERENCES)] = Field(
        default="prompt", description="What a fraction refers to: prompt or seen."
    )

    @model_validator(mode="after")
    def _makes_strategies(self) -> StrategyEntry:
        found = list(self._problems())
        if found:
            raise faults_at(found)
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
                yield (option,), sentence({**error.errors()[0], "input": value})
        try:
            # A budget that no sinks or recent tokens can exceed: what fails now is an option.
            has_budget = strategy_classes()[self.name].has_budget
            make_strategy(self.name, _AMPLE_BUDGET if has_budget else None, **typed)
        except KvaccError as error:
            named = [option for option in typed if option in str(error)]
            yield tuple(named[:1]), str(error)


ModelEntries = Annotated[
    list[Annotated[ModelEntry, by_name("pretrained")]], BeforeValidator(as_list), Field(min_length=1)
]
"""One model or more, each as a mapping or by its name."""
StrategyEntries = Annotated[
    list[Annotated[StrategyEntry, by_name("name")]], BeforeValidator(as_list), Field(min_length=1)
]
"""One strategy or more, likewise."""


class TaskEntry(BaseModel):
    """A task or a group of tasks, and its options, which stand beside the name."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    name: Annotated[str, AfterValidator(_known_task)] = Field(description="Name of the task or group.")

    @model_validator(mode="after")
    def _fits(self) -> TaskEntry:
        found = list(self._problems())
        if found:
            raise faults_at(found)
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
        raise KvaccError(sentence(error.errors()[0])) from None
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


def strategy_identity(strategy: Strategy) -> dict[str, Any]:
    # An edited file defines another strategy, whatever its name and options.
    file = {} if strategy.file_sha256 is None else {"file_sha256": strategy.file_sha256}
    return {
        "strategy": strategy.name,
        "options": {**strategy.options(), **file},
        "budget": str(strategy.budget) if strategy.has_budget else None,
        "budget_of": strategy.budget.of,
    }
