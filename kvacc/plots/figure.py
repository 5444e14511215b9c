"""A picture before it is drawn: its chart, its title, and the same content in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvacc.leaderboard_rows import budget_order
from kvacc.shots import shots_text

if TYPE_CHECKING:
    import altair

    from kvacc.leaderboard_rows import Row


__all__ = ["Figure", "about_row", "budget_order", "inline", "number", "shots_text", "title_of", "y_domain"]


@dataclass(frozen=True)
class Figure:
    """One picture of a leaderboard."""

    kind: str
    """``budget``, ``pareto``, ``heatmap``, ``fidelity``, ``perplexity``, ``kept``, ``ttft``, ``memory`` or
    ``latency``."""
    title: str
    chart: altair.TopLevelMixin
    """Without title, theme or configuration: those belong to where it is shown."""
    description: str
    """What the picture shows, in words and numbers, for people who do not see it."""
    caption: str = ""
    """How to read pictures of this kind."""
    remark: str = ""
    """What is particular to this one."""
    about: Mapping[str, str] = field(default_factory=dict)
    """``model``, ``task``, ``shots`` and ``protocol``: what a page's filters ask for."""


def about_row(row: Row, protocol: str) -> dict[str, str]:
    """What a picture of rows like ``row`` is about."""
    return {"model": row.model, "task": row.task, "shots": row.shots_label, "protocol": protocol}


def title_of(row: Row, protocol: str) -> str:
    """``smollm2-135m, piqa, 5-shot, stream``, with task options where there are any."""
    smoke = ["smoke test"] if row.kind == "smoke" else []
    return ", ".join([row.model, row.task_label, row.shots_label, protocol, *smoke])


def inline(values: Sequence[Mapping[str, Any]]) -> altair.InlineData:
    """Chart data, numbers rounded to six significant digits: finer ones differ between machines."""
    import altair

    return altair.InlineData(values=[{name: _rounded(value) for name, value in v.items()} for v in values])


def y_domain(
    numbers: Iterable[float | None], limits: tuple[float, float] | None = None
) -> tuple[float, float]:
    """From the smallest to the largest number that is known, with a margin of 6 % on both sides.

    Args:
        limits: what the numbers cannot exceed; no margin goes beyond, and no interval is cut.
    """
    known = [number for number in numbers if number is not None and math.isfinite(number)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    margin = 0.06 * (high - low) or max(abs(high), 1.0) * 0.05
    least, most = low - margin, high + margin
    if limits is not None:
        least, most = max(least, min(low, limits[0])), min(most, max(high, limits[1]))
    return round(least, 4), round(most, 4)


def number(value: float, digits: int = 1) -> str:
    """``66.0``; never ``-0.0``."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
