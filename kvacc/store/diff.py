"""Two results item by item: what changed, by how much, and which settings differ.

:mod:`kvacc.pairing` compares a strategy with ``full`` and is strict about everything
else. Here both sides are free: two strategies, two machines, two versions of the
code. Only the questions must be the same, document by document.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvacc.errors import KvaccError
from kvacc.pairing import Items, read_items
from kvacc.results import Cell
from kvacc.statistics import Difference, flips, paired_difference


@dataclass(frozen=True)
class CellDifference:
    """Cell B against cell A on the same documents. Every difference is B minus A."""

    a: Cell
    b: Cell
    why_not: str | None = None
    """Why the items cannot be paired; None when they are, and only then the fields below mean anything."""
    items: int = 0
    """Documents paired."""
    difference: Difference | None = None
    """In the metric's unit (accuracy: 0 to 1), with its 95 % interval; None with too few items."""
    lost: list[int] = field(default_factory=list)
    """Ids of the documents right in A and wrong in B."""
    gained: list[int] = field(default_factory=list)
    """Ids of the documents wrong in A and right in B."""
    changed: int = 0
    """Documents whose value differs at all, whatever the metric."""
    loglikelihoods: int = 0
    """Requests that have a log-likelihood on both sides."""
    loglikelihood_max: float | None = None
    """Largest absolute log-likelihood difference, in nats; inf where one side is -inf."""
    loglikelihood_mean: float | None = None
    """Average absolute log-likelihood difference, in nats."""
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """What differs apart from results and time: dotted field of cell.json -> (in A, in B)."""

    @property
    def is_identical(self) -> bool:
        """The same value on every document, and the same log-likelihoods to the last bit."""
        return self.why_not is None and not self.changed and not self.loglikelihood_max


def diff_cells(a: Cell, b: Cell) -> CellDifference:
    """Compare two cells document by document.

    Raises:
        KvaccError: the samples of one are damaged.
    """
    settings = differing_settings(a, b)
    ours, theirs = read_items(a), read_items(b)
    reason = _why_not(a, ours, b, theirs)
    if reason is not None:
        return CellDifference(a, b, why_not=reason, settings=settings)
    keys = list(ours.values)
    before, after = [ours.values[key] for key in keys], [theirs.values[key] for key in keys]
    lost: list[int] = []
    gained: list[int] = []
    if set(before) | set(after) <= {0.0, 1.0}:
        lost = [key[0] for key, old, new in zip(keys, before, after, strict=True) if old > new]
        gained = [key[0] for key, old, new in zip(keys, before, after, strict=True) if old < new]
        assert (len(lost), len(gained)) == flips(before, after)
    both = ours.loglikelihoods.keys() & theirs.loglikelihoods.keys()
    gaps = [_gap(ours.loglikelihoods[key], theirs.loglikelihoods[key]) for key in sorted(both)]
    return CellDifference(
        a,
        b,
        items=len(keys),
        difference=paired_difference(before, after, [ours.clusters[key] for key in keys]),
        lost=lost,
        gained=gained,
        changed=sum(old != new for old, new in zip(before, after, strict=True)),
        loglikelihoods=len(gaps),
        loglikelihood_max=max(gaps, default=None),
        loglikelihood_mean=math.fsum(gaps) / len(gaps) if gaps else None,
        settings=settings,
    )


def match_cells(
    a: Sequence[Cell], b: Sequence[Cell]
) -> tuple[list[tuple[Cell, Cell]], list[Cell], list[Cell]]:
    """Cells of two runs that were asked for the same: the pairs, those of A alone, those of B alone.

    Raises:
        KvaccError: there is no pair; the message says what differs between the closest two.
    """
    ours, theirs = ({cell.cell_id: cell for cell in cells} for cells in (a, b))
    pairs = [(ours[cell_id], theirs[cell_id]) for cell_id in sorted(ours.keys() & theirs.keys())]
    if not pairs:
        closest = min(
            ((one, other) for one in a for other in b),
            key=lambda pair: len(differing_settings(*pair, "spec")),
        )
        differing = differing_settings(*closest, "spec")
        shown = ", ".join(f"{name} {_shown(old)} and {_shown(new)}" for name, (old, new) in differing.items())
        raise KvaccError(
            "the two runs have no cell in common (the closest differ in "
            f"{shown or 'the source of the data'}); "
            "name two cells to compare them: kvacc results diff RUN/CELL RUN/CELL"
        )
    return (
        pairs,
        [ours[cell_id] for cell_id in sorted(ours.keys() - theirs.keys())],
        [theirs[cell_id] for cell_id in sorted(theirs.keys() - ours.keys())],
    )


def differing_settings(a: Cell, b: Cell, *parts: str) -> dict[str, tuple[Any, Any]]:
    """Fields of cell.json with another value in ``b``, by dotted name; results and time are no settings."""
    parts = parts or ("spec", "task", "model", "strategy", "environment")
    ours, theirs = (_flat({part: cell.record()[part] for part in parts}) for cell in (a, b))
    names = [*ours, *(name for name in theirs if name not in ours)]
    pairs = {name: (ours.get(name), theirs.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _why_not(a: Cell, ours: Items, b: Cell, theirs: Items) -> str | None:
    checks = {"task": lambda c: c.task.name, "metric": lambda c: c.task.primary_metric,
              "task version": lambda c: c.task.version}  # fmt: skip
    for name, value in checks.items():
        if value(a) != value(b):
            return f"the {name} differs: {value(a)} and {value(b)}"
    if ours.prompts.keys() != theirs.prompts.keys():
        common = len(ours.prompts.keys() & theirs.prompts.keys())
        return f"the documents differ: {len(ours.prompts)} and {len(theirs.prompts)}, {common} in common"
    for key, requests in ours.prompts.items():
        if requests != theirs.prompts[key]:
            others = "another number of shots, sampler, seed or template?"
            return f"the prompts differ, first at document {key[0]} ({others})"
    if not ours.values or ours.values.keys() != theirs.values.keys():
        return f"there are no values of {a.task.primary_metric} per item"
    return None


def _gap(one: float, other: float) -> float:
    # Equality first: two answers of probability 0 are both -inf, whose difference is NaN.
    return 0.0 if one == other else abs(one - other)


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Nested dictionaries by dotted path."""
    if not isinstance(value, dict):
        return {path: value}
    flat: dict[str, Any] = {}
    for key, part in value.items():
        flat |= _flat(part, f"{path}.{key}" if path else str(key))
    return flat


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
