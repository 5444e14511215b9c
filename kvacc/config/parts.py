"""What configurations are made of: types of fields, and errors that point at their place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from kvacc.errors import unknown
from kvacc.strategy import PROTOCOLS


def one_of(what: str, allowed: Sequence[str]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in allowed:
            raise unknown(what, value, allowed)
        return value

    return AfterValidator(check)


def as_list(value: Any) -> Any:
    """One entry may be written without its list."""
    return value if value is None or isinstance(value, list) else [value]


def by_name(field: str) -> BeforeValidator:
    """One entry may be written as its name alone."""
    return BeforeValidator(lambda value: {field: value} if isinstance(value, str) else value)


Text = Annotated[str, Field(min_length=1)]
Count = Annotated[StrictInt, Field(ge=1)]
Natural = Annotated[StrictInt, Field(ge=0)]
ProtocolName = Annotated[str, one_of("protocol", PROTOCOLS)]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def sentence(item: dict[str, Any]) -> str:
    """pydantic's message with the value it is about."""
    if item["type"] == "kvacc":
        return item["msg"]
    if item["type"] == "value_error":
        return item["msg"].removeprefix("Value error, ")
    message = item["msg"][0].lower() + item["msg"][1:]
    return f"{item['input']!r} is refused: {message}"


def faults_at(found: Iterable[tuple[tuple[str | int, ...], str, Any]]) -> ValidationError:
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
