"""Bytes of what strategies that select choose by: on the device, for every entry in the host pool, as
much as each strategy's :class:`~kvacc.select_strategy.Selector` holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING

from kvacc.errors import KvaccError
from kvacc.layer_sizes import FLOAT32, LayerSize
from kvacc.select_strategy import SelectStrategy

if TYPE_CHECKING:
    from kvacc.kv_size import Reading

_LONG = 8
"""Bytes of a position."""


def summary_bytes(
    strategy: SelectStrategy, size: LayerSize, reading: Reading, number_bytes: int | Fraction
) -> int | Fraction:
    """Bytes of what a selection is chosen by, on the device, of one row and layer.

    Raises:
        KvaccError: a strategy whose summary has no formula here, or depends on the model's weights.
    """
    if strategy.name not in _SUMMARIES:
        raise KvaccError(
            f"the size of the summary of strategy {strategy.name!r} is not known here; known: "
            f"{', '.join(sorted(_SUMMARIES))}; measure it with `kvacc probe`"
        )
    # A selector is given the keys that queries meet: of all heads where they share a latent.
    heads = size.query_heads if size.latent else size.heads
    return _SUMMARIES[strategy.name](strategy, heads, size.full_key_size, reading, number_bytes)


def _quest(strategy, heads: int, key_size: int, reading: Reading, number_bytes):
    """Least and largest key, and a place, of each page, the one that fills up included."""
    return -(-reading.tokens // strategy.page_size) * (2 * heads * key_size * number_bytes + _LONG)


def _infinigen(strategy, heads: int, key_size: int, reading: Reading, number_bytes):
    """Partial keys in float32. ``columns=union`` has up to twice as many columns, which the model's
    weights decide: its largest is given."""
    columns = math.ceil(Fraction(repr(float(strategy.partial_ratio))) * key_size)
    if strategy.columns == "union":
        columns = min(2 * columns, key_size)
    return heads * reading.tokens * columns * FLOAT32


def _infllm(strategy, heads: int, key_size: int, reading: Reading, number_bytes):
    """Every key in float32, and how much it was wanted: representatives are chosen late."""
    return heads * reading.tokens * (key_size + 1) * FLOAT32


_SUMMARIES: dict[str, Callable] = {"quest": _quest, "infinigen": _infinigen, "infllm": _infllm}
