"""What one batch of the parallel path computes: trees of tokens, and when to compress.

The requests of a document share most of their tokens: the context before its
answer options. They are laid out as one row, a tree flattened depth first::

    tokens    The sky is | blue | green and red | wet
    segment   0   0   0  | 1    | 2     2   2   | 3        parent 0 of 1, 2 and 3
    position  0   1   2  | 3    | 3     4   5   | 3        place in the text

A query reads its ancestors and itself only, and a strategy's state is copied from
the end of the parent segment to the start of each child. So every shared token is
computed once, and no option can touch another's state.

A *dense* segment is read with the full cache; ``compress`` evicts down to the budget
at its end. In the other segments the strategy acts after every token:

========  ===========================================================
stream    no dense segment
context   dense up to the end of the context segment, then compress
serve     dense up to the end of the prompt, then compress
========  ===========================================================

Documents that begin alike (fixed few-shot examples, several questions on one haystack)
share a *prefix*: it is read once, and their trees start where it ends
(:mod:`kvacc.engine.prefix`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch

from kvacc.budget import EVERYTHING as NO_LIMIT
from kvacc.strategy import EvictStrategy, Strategy


@dataclass(frozen=True)
class Request:
    """Tokens to score.

    Args:
        tokens: prompt and continuation without the continuation's last token.
        targets: the continuation; target i is predicted at ``tokens[-len(targets) + i]``.
        dense: how many tokens are read with the full cache before the strategy acts:
            0 in ``stream``, the context segment in ``context``, the prompt in ``serve``.
        compressed: length that a fractional budget refers to. Equal for all options
            of a document.
    """

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    dense: int
    compressed: int

    @property
    def first_scored(self) -> int:
        """Index in ``tokens`` of the query that predicts the first target."""
        return len(self.tokens) - len(self.targets)

    def how(self, i: int) -> tuple[int, bool, bool]:
        """Token ``i`` and how it is read: densely, and as the last before compression?"""
        return self.tokens[i], i < self.dense, i == self.dense - 1


@dataclass
class Segment:
    """Tokens ``start`` to ``stop`` (not included) of a row, read alike; ``parent`` is the segment
    before it, -1 at a root."""

    start: int
    parent: int
    dense: bool
    stop: int = 0
    compress: bool = False


@dataclass
class Row:
    """One tree: tokens depth first, and where each request's scored queries lie."""

    tokens: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    segment: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    queries: dict[int, list[int]] = field(default_factory=dict)
    """request number -> index in ``tokens`` of each of its scored queries"""
    compressed: int = 0
    streams: bool = True
    """No token of the text is read densely, those of a shared prefix included."""


class _Node:
    __slots__ = ("children", "requests")

    def __init__(self) -> None:
        self.children: dict[tuple[int, bool, bool], _Node] = {}
        self.requests: list[int] = []  # requests with a scored query here


def build_rows(requests: Sequence[tuple[int, Request]], share: bool = True, after: int = 0) -> list[Row]:
    """Lay out the requests of one document as trees.

    Args:
        requests: (number, request); all with one ``compressed`` length.
        share: False gives each request a row of its own, for models whose other
            layers cannot read a tree (recurrent state) or strategies that read the
            whole row.
        after: leading tokens left out, because a shared prefix has them.
    """
    if not share:
        return [row for item in requests for row in _trees([item], after)]
    return _trees(requests, after)


def _trees(requests: Sequence[tuple[int, Request]], after: int) -> list[Row]:
    roots = _Node()
    for number, request in requests:
        node = roots
        for i in range(after, len(request.tokens)):
            # Tokens are shared only where they are read in the same way.
            node = node.children.setdefault(request.how(i), _Node())
            if i >= request.first_scored:
                node.requests.append(number)
    rows = []
    for how, child in roots.children.items():
        first = requests[0][1]
        row = Row(compressed=first.compressed, streams=first.dense == 0)
        _flatten(row, how, child, after)
        rows.append(row)
    return rows


def _flatten(row: Row, how: tuple[int, bool, bool], node: _Node, position: int) -> None:
    # An explicit stack: a document can be longer than Python's recursion limit.
    stack = [(how, node, -1, position, False)]
    while stack:
        (token, dense, last_dense), node, parent, depth, extends = stack.pop()
        index = len(row.tokens)
        if not extends:
            row.segments.append(Segment(start=index, parent=parent, dense=dense))
            parent = len(row.segments) - 1
        row.segments[parent].stop = index + 1
        row.segments[parent].compress = last_dense
        row.tokens.append(token)
        row.position.append(depth)
        row.segment.append(parent)
        for request in node.requests:
            row.queries.setdefault(request, []).append(index)
        # An only child read in the same way continues its parent's segment.
        only = len(node.children) == 1 and not last_dense
        for next_how, child in reversed(node.children.items()):  # the first child is laid out first
            stack.append((next_how, child, parent, depth + 1, only and next_how[1] == dense))


@dataclass
class Plan:
    """Rows as tensors. B rows, T tokens (right-padded), S segments at most.

    Attributes:
        tokens, position: long [B, T]. Padding has token 0, position 0.
        segment: int32 [B, T], -1 at padding.
        start, stop, parent: int32 [B, S]; parent -1 reads the initial state.
        dense, compress: bool [B, S].
        budget, recent, sinks: int32 [B, T], limits that hold after each token.
        counted: bool [B, T], the scored queries.
        compressed: long [B], the length that a fractional budget refers to.
    """

    tokens: torch.Tensor
    position: torch.Tensor
    segment: torch.Tensor
    start: torch.Tensor
    stop: torch.Tensor
    parent: torch.Tensor
    dense: torch.Tensor
    compress: torch.Tensor
    budget: torch.Tensor
    recent: torch.Tensor
    sinks: torch.Tensor
    counted: torch.Tensor
    compressed: torch.Tensor

    def to(self, device: torch.device | str) -> Plan:
        """The same plan on another device."""
        return Plan(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    @functools.cached_property
    def previous(self) -> torch.Tensor:
        """long [B, T]: index of the token before each one on its path; -1 at the first of a
        row and at padding."""
        own = self.segment.long().clamp(min=0)
        column = torch.arange(own.shape[1], device=own.device).expand_as(own)
        up = self.parent.long().gather(1, own)
        end = self.stop.long().gather(1, up.clamp(min=0)) - 1
        starts = self.start.long().gather(1, own) == column
        before = torch.where(starts, torch.where(up >= 0, end, -1), column - 1)
        return torch.where(self.segment >= 0, before, -1)

    @functools.cached_property
    def acts(self) -> torch.Tensor:
        """bool [B, T]: the strategy acts on the token; False in a dense segment."""
        return ~self.dense.gather(1, self.segment.long().clamp(min=0)) & (self.segment >= 0)

    @functools.cached_property
    def compresses(self) -> torch.Tensor:
        """bool [B, T]: the token ends a dense segment."""
        own = self.segment.long().clamp(min=0)
        column = torch.arange(own.shape[1], device=own.device)
        ends = (self.stop.gather(1, own) == column + 1) & self.compress.gather(1, own)
        return ends & (self.segment >= 0)

    @functools.cached_property
    def ancestors(self) -> torch.Tensor:
        """bool [B, T, T]: entry j is query i's ancestor or itself. A padding query
        reads itself, so that no softmax row is empty."""
        return self.ancestors_of(0, self.segment.shape[1], self.segment.shape[1])

    def ancestors_of(self, first: int, count: int, columns: int) -> torch.Tensor:
        """bool [B, count, columns]: the part of :attr:`ancestors` for ``count`` queries from
        ``first`` on; of a long text, the whole would not fit in memory."""
        device, here = self.segment.device, slice(first, first + count)
        real = self.segment >= 0
        within = self._above.gather(1, self._own[:, here, None].expand(-1, -1, self._above.shape[2]))
        pairs = within.gather(2, self._own[:, None, :columns].expand(-1, count, -1))
        query = torch.arange(first, first + count, device=device)[:, None]
        entry = torch.arange(columns, device=device)
        pairs &= (entry <= query) & real[:, here, None] & real[:, None, :columns]
        return pairs | ((entry == query) & ~real[:, here, None])

    @functools.cached_property
    def _own(self) -> torch.Tensor:
        """long [B, T]: each token's segment, 0 at padding."""
        return self.segment.long().clamp(min=0)

    @functools.cached_property
    def _above(self) -> torch.Tensor:
        """bool [B, S, S]: segment j is segment i's ancestor or itself."""
        rows, count = self.parent.shape
        above = torch.eye(count, dtype=torch.bool, device=self.parent.device).repeat(rows, 1, 1)
        up = self.parent.long()
        for _ in range(count):  # as deep as the deepest tree
            has = up >= 0
            if not has.any():
                break
            above |= torch.nn.functional.one_hot(up.clamp(min=0), count).bool() & has[..., None]
            up = torch.where(has, self.parent.long().gather(1, up.clamp(min=0)), up)
        return above

    @functools.cached_property
    def is_causal(self) -> bool:
        """Every query reads all tokens before it: no row branches. Padding comes last, so what it
        would read does not matter."""
        column = torch.arange(self.segment.shape[1], device=self.segment.device)
        return bool(((self.previous == column - 1) | (self.segment < 0)).all())


def make_plan(rows: Sequence[Row], strategy: Strategy) -> Plan:
    """Tensors for a batch of rows under ``strategy``'s limits."""
    width = max(len(row.tokens) for row in rows)
    most = max(len(row.segments) for row in rows)

    def grid(values: Sequence[Sequence[int]], size: int, fill: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([[*v, *[fill] * (size - len(v))] for v in values], dtype=dtype)

    limits = [limits_for(strategy, row.compressed, row.position) for row in rows]
    counted = torch.zeros(len(rows), width, dtype=torch.bool)
    for b, row in enumerate(rows):
        for queries in row.queries.values():
            counted[b, queries] = True
    acts = [_acts(strategy, row) for row in rows]
    return Plan(
        tokens=grid([r.tokens for r in rows], width, 0, torch.long),
        position=grid([r.position for r in rows], width, 0, torch.long),
        segment=grid([r.segment for r in rows], width, -1, torch.int32),
        start=grid([[s.start for s in r.segments] for r in rows], most, 0, torch.int32),
        stop=grid([[s.stop for s in r.segments] for r in rows], most, 0, torch.int32),
        parent=grid([[s.parent for s in r.segments] for r in rows], most, -1, torch.int32),
        dense=grid([[not a for a in row_acts] for row_acts in acts], most, 1, torch.bool),
        compress=grid([[s.compress for s in r.segments] for r in rows], most, 0, torch.bool),
        budget=grid([x[0] for x in limits], width, NO_LIMIT, torch.int32),
        recent=grid([x[1] for x in limits], width, 0, torch.int32),
        sinks=grid([x[2] for x in limits], width, 0, torch.int32),
        counted=counted,
        compressed=torch.tensor([row.compressed for row in rows], dtype=torch.long),
    )


def _acts(strategy: Strategy, row: Row) -> list[bool]:
    """For each segment: does the strategy evict after every token there?"""
    # A strategy that acts at prefill only lets the tokens after its compression join.
    return [not s.dense and (row.streams or strategy.acts_while_decoding) for s in row.segments]


def limits_for(
    strategy: Strategy, compressed: int, position: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Budget, recent count and sink count after the token at each ``position``."""
    if not isinstance(strategy, EvictStrategy):
        if not strategy.has_budget:
            return [NO_LIMIT] * len(position), [0] * len(position), [0] * len(position)
        budgets = [strategy.budget.entries(compressed, place + 1) for place in position]
        return budgets, [0] * len(position), [0] * len(position)
    known: dict[int, tuple[int, int, int]] = {}
    out: list[tuple[int, int, int]] = []
    for place in position:
        budget = strategy.budget.entries(compressed, place + 1)
        if budget not in known:
            known[budget] = (budget, strategy.recent_count(budget), strategy.sink_count(budget))
        out.append(known[budget])
    budgets, recents, sinks = zip(*out, strict=True)
    return list(budgets), list(recents), list(sinks)
