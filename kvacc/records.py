"""What the backend measured about each request, beside lm-eval's own answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SELECTION = ("moved_bytes", "attention_mass", "recall")
"""Fields that only strategies have which select what each query reads."""
SELECTION_BY_LAYER = ("mass_by_layer", "recall_by_layer")
FIDELITY = ("kl", "agreement", "loglikelihood_difference")
"""Fields that are known where a strategy was compared with ``full`` on the same tokens."""


@dataclass(frozen=True)
class RequestRecord:
    """One request as the engine ran it.

    ``kept_fraction`` is measured, not derived: KV entries visible to a query over the
    tokens it could see, averaged over the scored queries, layers and KV heads.

    ``moved_bytes`` and ``recall`` are None unless the strategy selects what each query reads; so is
    ``attention_mass``, unless fidelity was measured. The fields of :data:`FIDELITY` are None
    unless it was.
    """

    task: str
    doc_id: int | None
    option: int
    """lm-eval's ``Instance.idx``: the answer option of a multiple-choice document."""
    kind: str
    """``loglikelihood``, ``loglikelihood_rolling`` or ``generate_until``."""
    prompt_tokens: int
    scored_tokens: int
    """Continuation tokens scored, or tokens generated."""
    truncated_tokens: int
    """Tokens cut from the left because the model's context is shorter."""
    budget_entries: int | None
    """Entries allowed per KV head; None without a budget."""
    kept_fraction: float
    acted: bool
    """The strategy hid at least one entry from at least one scored query."""
    unreachable_tokens: int
    """Scored tokens whose distribution came from an uncompressed prefill."""
    bos_tokens: int = 0
    """Beginning-of-sequence tokens that the prompt starts with. 0 or 2 where a model expects 1 changes
    its scores, and which token is the first attention sink."""
    loglikelihood: float | None = None
    greedy: bool | None = None
    moved_bytes: float | None = None
    """Bytes brought from the host pool per scored token, all layers together."""
    attention_mass: float | None = None
    """Share of the true attention that falls on what was read, averaged over the scored
    queries, query heads and the layers in which the strategy acts."""
    recall: float | None = None
    """Share of the true top entries, as many as were read, that were read; averaged likewise."""
    mass_by_layer: tuple[float | None, ...] | None = None
    """One for each layer of the model; None where the layer reads everything."""
    recall_by_layer: tuple[float | None, ...] | None = None
    kl: float | None = None
    """Mean over the scored tokens of KL(full || strategy), nats. Of a generation: over the tokens of
    ``full``'s own greedy answer, which the strategy reads under its protocol and budget."""
    agreement: float | None = None
    """Share of these tokens where both find the same token most likely."""
    loglikelihood_difference: float | None = None
    """Log-likelihood of these tokens under the strategy minus that under ``full``, nats."""
    compared_tokens: int = 0
    """Tokens that the last three speak of: the scored ones, or those of ``full``'s answer."""


def weighted_mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Mean of the values that are known; None when those have no weight."""
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = math.fsum(weight for _, weight in known)
    return math.fsum(value * weight for value, weight in known) / total if total else None


def selection_of(measured: Any) -> dict[str, Any]:
    """:data:`SELECTION` and :data:`SELECTION_BY_LAYER` of what the engine measured."""
    return {name: getattr(measured, name, None) for name in (*SELECTION, *SELECTION_BY_LAYER)}


def mean_selection(parts: Sequence[Any], weights: Sequence[float]) -> dict[str, Any]:
    """:data:`SELECTION` and :data:`SELECTION_BY_LAYER` of several parts, averaged.

    Args:
        parts: records or scores of one model.
        weights: scored tokens of each.
    """
    means: dict[str, Any] = {
        name: weighted_mean([getattr(part, name) for part in parts], weights) for name in SELECTION
    }
    for name in SELECTION_BY_LAYER:
        known = [(getattr(part, name), weight) for part, weight in zip(parts, weights, strict=True)]
        known = [(layers, weight) for layers, weight in known if layers is not None]
        by_layer = zip(*(layers for layers, _ in known), strict=True)
        shares = tuple(weighted_mean(values, [weight for _, weight in known]) for values in by_layer)
        means[name] = shares or None
    return means


def mean_fidelity(parts: Sequence[Any], weights: Sequence[float]) -> dict[str, float | None]:
    """:data:`FIDELITY` of the parts of one text: means, and the sum of the differences.

    Args:
        parts: records or scores. weights: scored tokens of each.
    """
    means: dict[str, float | None] = {
        name: weighted_mean([getattr(part, name) for part in parts], weights) for name in FIDELITY[:2]
    }
    known = [part.loglikelihood_difference for part in parts if part.loglikelihood_difference is not None]
    return means | {"loglikelihood_difference": math.fsum(known) if known else None}


def fidelity_of(measured: Any) -> dict[str, float | None]:
    """:data:`FIDELITY` of what the engine measured."""
    return {name: getattr(measured, name) for name in FIDELITY}


def fidelity_words(kl: float | None, agreement: float | None) -> list[str]:
    """What is known of the fidelity, for a line of progress."""
    said = [] if kl is None else [f"KL {kl:.3g}"]
    return said if agreement is None else [*said, f"agreement {agreement:.1%}"]


def selection_words(
    moved_bytes: float | None, attention_mass: float | None, recall: float | None
) -> list[str]:
    """What is known of a selection, for a line of progress."""
    said = []
    if moved_bytes is not None:
        said.append(f"moved {as_bytes(moved_bytes)}/token")
    if attention_mass is not None:
        said.append(f"attention mass {attention_mass:.1%}")
    if recall is not None:
        said.append(f"recall {recall:.1%}")
    return said


def as_bytes(number: float) -> str:
    """``512 B``, ``1.5 KiB``, ``23.4 MiB``."""
    unit, *larger = ("B", "KiB", "MiB", "GiB")
    # From here on it would be shown as 1024.
    while larger and number >= 1023.5:
        number /= 1024
        unit = larger.pop(0)
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"


def as_ranges(places: Sequence[int]) -> list[str]:
    """``["0", "3", "7-9"]`` of the ascending places 0, 3, 7, 8, 9."""
    spans: list[list[int]] = []
    for place in places:
        if spans and place == spans[-1][1] + 1:
            spans[-1][1] = place
        else:
            spans.append([place, place])
    return [f"{first}" if first == last else f"{first}-{last}" for first, last in spans]
