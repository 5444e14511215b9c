"""Documents that begin alike: which share a prefix, and the state at its end.

Fixed few-shot examples stand before every document, and several questions may be asked
about one haystack. Such a prefix is read once; each document's tree then starts from
copies of the state at its end, so nothing of one document reaches another.

A strategy's decisions inside the prefix must be the same for all documents that share
it: their budgets, a fraction of each prompt, must come to the same number of entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvacc.engine.plan import Request
from kvacc.engine.scan import Entries
from kvacc.strategy import Strategy

LEAST_SAVED = 64
"""Tokens that a prefix must save: below, the extra forward pass costs more than it spares."""
_DEEPEST = 50
"""Prefixes of prefixes of prefixes ...: what is nested deeper is not looked at."""


@dataclass(frozen=True)
class Group:
    """Documents whose requests all begin with the same ``tokens`` tokens, read alike."""

    tokens: int
    documents: list[int]


@dataclass
class StoredLayer:
    """A layer at the end of a prefix of P tokens.

    Attributes:
        key: [1, K, P, D]. value: [1, K, P, V].
        entries: the decision state, [1, H, P], of a strategy that evicts.
    """

    key: torch.Tensor
    value: torch.Tensor
    entries: Entries | None = None


@dataclass
class Prefix:
    """The state at the end of a shared prefix: layer -> what later tokens read of it."""

    tokens: int
    layers: dict[int, StoredLayer]


def group_by_prefix(documents: Sequence[Sequence[Request]], strategy: Strategy) -> list[Group]:
    """Put documents together so that shared prefixes save the most tokens.

    Every document that has a request is in one group; the first group are those that share
    nothing. A prefix ends before the first scored query of all its requests, so that each
    request keeps at least one token of its own.
    """
    alike: dict[tuple, list[int]] = {}
    for index, document in enumerate(documents):
        if document:
            alike.setdefault(_limits(document, strategy), []).append(index)
    alone, groups = Group(0, []), []
    for members in alike.values():
        # In the order of their tokens, documents that share most are neighbours.
        order = sorted(members, key=lambda index: documents[index][0].tokens)
        own = [_common(documents[index]) for index in order]
        gaps = [
            min(own[n], own[n + 1], _common([documents[order[n]][0], documents[order[n + 1]][0]]))
            for n in range(len(order) - 1)
        ]
        for tokens, run in _runs(gaps, range(len(order))):
            found = [order[n] for n in run]
            if tokens:
                groups.append(Group(tokens, found))
            else:
                alone.documents.extend(found)
    return [alone, *groups] if alone.documents else groups


def _limits(document: Sequence[Request], strategy: Strategy) -> tuple:
    """What must be equal, apart from the tokens, for two documents to be read alike."""
    first = document[0]
    if first.dense:
        # Nothing acts before the last dense token, and requests that share that one have one
        # budget, a fraction of the dense tokens.
        return ("dense",)
    if not strategy.has_budget or strategy.budget.of == "seen":
        return ()
    return (strategy.budget.entries(first.compressed),)


def _common(requests: Sequence[Request]) -> int:
    """Tokens that all of ``requests`` begin with, read alike and not scored."""
    first = requests[0]
    length = min(request.first_scored for request in requests)
    for request in requests[1:]:
        length = next((i for i in range(length) if request.how(i) != first.how(i)), length)
    return length


def _runs(gaps: Sequence[int], run: range, depth: int = 0) -> list[tuple[int, range]]:
    """Cut a run of neighbours into (shared tokens, part) that save the most.

    Args:
        gaps: tokens that neighbours n and n + 1 share.
    """
    if len(run) == 1:
        return [(0, run)]
    inner = gaps[run.start : run.stop - 1]
    shared = min(inner)
    whole = [(shared, run)]
    if shared == max(inner) or depth == _DEEPEST:
        return whole if _saved(whole) else [(0, run)]
    cuts = [run.start, *(run.start + n + 1 for n, gap in enumerate(inner) if gap == shared), run.stop]
    parts = [
        part
        for start, stop in zip(cuts, cuts[1:], strict=False)
        for part in _runs(gaps, range(start, stop), depth + 1)
    ]
    best = max(whole, parts, key=_saved)
    return best if _saved(best) else [(0, run)]


def _saved(parts: Sequence[tuple[int, range]]) -> int:
    """Tokens that need not be read, prefixes that save too little left out."""
    saved = [shared * (len(run) - 1) for shared, run in parts]
    return sum(tokens for tokens in saved if tokens >= LEAST_SAVED)
