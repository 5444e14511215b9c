"""What a retention task can be asked for: length, depths, facts, items, seed, filler.

The same names are used on the command line (``--task-option length=1024``), in a
configuration (``{name: kvacc_needle, length: 1024}``) and in lm-eval's ``--metadata``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, ValidationError

from kvacc.errors import KvaccError, nearest

if TYPE_CHECKING:
    from kvacc.tasks.retention.sketch import Kind

SHORTEST, LONGEST = 256, 131072
DEFAULT_DEPTHS = (0.1, 0.5, 0.9)


def _depth_grid(depths: tuple[float, ...]) -> tuple[float, ...]:
    for depth in depths:
        # Scores per depth are named by whole percents.
        if not 0 <= depth <= 1 or abs(100 * depth - round(100 * depth)) > 1e-9:
            raise ValueError(f"depth {depth:g} is no share from 0 (start) to 1 (end) in whole hundredths")
    ordered = tuple(sorted(round(depth, 2) for depth in depths))
    if len(set(ordered)) < len(ordered):
        raise ValueError(f"depths {', '.join(f'{depth:g}' for depth in ordered)}: one is listed twice")
    return ordered


class Settings(BaseModel):
    """Options of one retention task, checked.

    Args:
        length: tokens of the whole prompt, haystack and question, counted by the model's own
            tokenizer, chat template and few-shot examples aside. Met within 2 %, never exceeded.
        depths: where the asked fact lies in the haystack: 0 is its start, 1 its end.
        facts: how many facts there are; None takes the task's default, or as many as fit.
        items: documents per depth (three times as many for a task without depths).
        data_seed: same seed, same bytes.
        filler: None for generated prose, or a text file, or a folder with ``.txt`` files.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    length: Annotated[StrictInt, Field(ge=SHORTEST, le=LONGEST)] = 512
    depths: Annotated[tuple[float, ...], Field(min_length=1), AfterValidator(_depth_grid)] = DEFAULT_DEPTHS
    facts: Annotated[StrictInt, Field(ge=1)] | None = None
    items: Annotated[StrictInt, Field(ge=1)] = 20
    data_seed: Annotated[StrictInt, Field(ge=0)] = 1
    filler: Annotated[str, Field(min_length=1)] | None = None


OPTIONS = tuple(Settings.model_fields)


def taken(kind: Kind, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``options`` that a task of this kind has a use for."""
    return {name: value for name, value in options.items() if name in kind.options}


def problems(kind: Kind, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(option, what is wrong with it), for every option that is wrong."""
    known = ", ".join(kind.options)
    fit: dict[str, Any] = {}
    for name, value in options.items():
        if name not in OPTIONS:
            close = nearest(name, kind.options)
            yield name, f"retention tasks have no option {name!r}{close}; known: {known}"
        elif name not in kind.options:
            yield name, f"kvacc_{kind.name} takes no {name}: {kind.refused[name]}; its options: {known}"
        else:
            fit[name] = value
    try:
        facts = Settings.model_validate(fit).facts
    except ValidationError as error:
        for item in error.errors():
            yield str(item["loc"][0]), _sentence(item)
        return
    if facts is not None and not kind.facts.allows(facts):
        yield "facts", f"facts={facts} is refused for kvacc_{kind.name}: give {kind.facts}"


def settings_of(kind: Kind, options: Mapping[str, Any]) -> Settings:
    """The options as checked settings.

    Raises:
        KvaccError: an unknown option, or a value out of range.
    """
    for _, what in problems(kind, options):
        raise KvaccError(what)
    return Settings.model_validate(dict(options))


def canonical(kind: Kind, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that differ from their defaults, in one order and as plain JSON values.

    Equal questions then have equal options, however they were written.

    Raises:
        KvaccError: an unknown option, or a value out of range.
    """
    return settings_of(kind, options).model_dump(mode="json", exclude_defaults=True)


def _sentence(item: Any) -> str:
    name, value = item["loc"][0], item["input"]
    if item["type"] == "value_error":
        return item["msg"].removeprefix("Value error, ")
    if name == "length":
        return f"length={value!r} is refused: give a whole number of tokens from {SHORTEST} to {LONGEST}"
    if name == "depths":
        return f"depths={value!r} is refused: give a list of shares from 0 to 1, such as [0, 0.5, 1]"
    if name == "filler":
        return f"filler={value!r} is refused: give a text file or a folder with .txt files"
    return f"{name}={value!r} is refused: {item['msg'][0].lower()}{item['msg'][1:]}"
