"""The arguments that the backend checks itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvacc.errors import KvaccError, nearest
from kvacc.strategy import Strategy, make_strategy

HF_OPTIONS = (
    "max_length", "truncation", "add_bos_token", "prefix_token_id", "think_end_token",
    "enable_thinking", "chat_template_args",
)  # fmt: skip
"""Arguments of lm-eval's ``hf`` backend that are passed on to it."""


def strategy_from(
    name: str, budget: Any, budget_of: str, options: dict[str, Any], arguments: Iterable[str]
) -> Strategy:
    """The strategy of that name. ``arguments`` are the backend's own, one of which may have been
    meant by an option that the strategy does not have."""
    try:
        return make_strategy(name, budget, budget_of, **options)
    except KvaccError as error:
        if "has no option" not in str(error):
            raise
        unknown = next(o for o in options if f"option {o!r}" in str(error))
        hint = nearest(unknown, (*HF_OPTIONS, *arguments))
        raise KvaccError(f"{error}{hint and f'; or the backend argument{hint}'}") from None


def positive(name: str, value: Any, otherwise: str) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1 or number != float(value):
        raise KvaccError(f"{name} {value!r} is not a whole number of at least 1; give one, or {otherwise}")
    return number


def rows_of(batch_size: int | str | None) -> int:
    """Rows per pass of a generation; 0 for as many as fit."""
    automatic = batch_size is None or str(batch_size).startswith("auto")
    return 0 if automatic else positive("batch_size", batch_size, "auto")


def true_or_false(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise KvaccError(f"{name} {value!r} is neither true nor false; give one of them")
    return value


def require_tail_tokens(tail_tokens: int) -> int:
    if not isinstance(tail_tokens, int) or tail_tokens < 0:
        raise KvaccError(f"tail_tokens {tail_tokens!r} is not a whole number of at least 0")
    return tail_tokens
