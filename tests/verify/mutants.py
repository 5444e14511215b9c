"""Strategies and engines that are wrong in one way each; ``verify`` has to say in which.

What a strategy can do wrong by itself is an ordinary strategy, as a user could write it.
What the contract keeps out of its hands is a change of the engine, made by the test.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvacc.engine import parallel, scoring, stepping
from kvacc.strategy import EvictStrategy, top
from kvacc.verify import runs


@dataclass(frozen=True)
class Accumulated(EvictStrategy):
    """What the mutants below are, without their mistakes: the lowest accumulated attention goes."""

    name: ClassVar[str] = "accumulated"
    summary: ClassVar[str] = "accumulated attention and recent tokens"
    source: ClassVar[str] = "tests"

    def recent_count(self, budget):
        return (budget + 1) // 2

    def observe(self, scores, attention):
        return scores + attention.mean(2)


@dataclass(frozen=True)
class ReadsTheLength(Accumulated):
    """Prefers the middle of a text whose end it cannot know yet."""

    name: ClassVar[str] = "reads_the_length"

    def initial_score(self, position, layer, heads):
        middle = position.amax() / 2
        return -(position - middle).abs().float()[..., None].expand(*position.shape, heads)


@dataclass(frozen=True)
class EvictsSinks(Accumulated):
    """Promises the first two tokens, and lets them go."""

    name: ClassVar[str] = "evicts_sinks"

    def sink_count(self, budget):
        return min(2, budget // 2)

    def recent_count(self, budget):
        return budget // 2

    def keep(self, scores, position, alive, seen, budget, recent, sinks):
        return super().keep(scores, position, alive, seen, budget, recent, torch.zeros_like(sinks))


@dataclass(frozen=True)
class OneTooMany(Accumulated):
    """Keeps one entry more than its budget."""

    name: ClassVar[str] = "one_too_many"

    def keep(self, scores, position, alive, seen, budget, recent, sinks):
        return super().keep(scores, position, alive, seen, budget + 1, recent, sinks)


@dataclass(frozen=True)
class KeepsState(Accumulated):
    """Learns from one request what it prefers in the next."""

    name: ClassVar[str] = "keeps_state"
    learned: ClassVar[dict[int, torch.Tensor]] = {}

    def observe(self, scores, attention):
        received = attention.mean(2)
        size = received.shape[-1]
        before = self.learned.get(size, torch.zeros(size))
        self.learned[size] = before + received.sum((0, 1)).roll(1)
        return scores + received + before


@dataclass(frozen=True)
class HalfPrecisionScores(Accumulated):
    """Accumulates in the type that looked large enough."""

    name: ClassVar[str] = "half_precision_scores"

    def observe(self, scores, attention):
        return scores.bfloat16() + attention.mean(2).bfloat16()


@dataclass(frozen=True)
class KeepsTheLater(Accumulated):
    """Breaks ties by the higher position."""

    name: ClassVar[str] = "keeps_the_later"

    def keep(self, scores, position, alive, seen, budget, recent, sinks):
        recent_ones = position >= (seen - recent).view(-1, 1, 1)
        return top(scores, -position, alive, recent_ones, budget.view(-1, 1, 1)), scores


@dataclass(frozen=True)
class ForgetsTheFirst(Accumulated):
    """Never keeps the first token, whatever the budget."""

    name: ClassVar[str] = "forgets_the_first"

    def keep(self, scores, position, alive, seen, budget, recent, sinks):
        return super().keep(scores, position, alive & (position > 0), seen, budget, recent, sinks)


@dataclass(frozen=True)
class Raises(Accumulated):
    """Cannot run at all."""

    name: ClassVar[str] = "raises"

    def observe(self, scores, attention):
        return scores + attention


def reads_future_queries(monkeypatch) -> None:
    """A decision follows from the attention of a query two tokens later: the next one reads
    its outcome, and comes before."""
    original = parallel.scan_block

    def scan_block(scan, logits, first, count, aux):
        return original(scan, logits if logits is None else logits.roll(-2, 3), first, count, aux)

    monkeypatch.setattr(parallel, "scan_block", scan_block)


def off_by_one_position(monkeypatch) -> None:
    """Once entries were evicted, a token is said to be one place further on."""
    original = scoring.step_forward

    class Shifted:
        def __init__(self, wrapped, session):
            self.wrapped, self.session = wrapped, session
            self.takes_positions = wrapped.takes_positions

        def model(self, **arguments):
            layers = [layer for layer in self.session.cache.layers if isinstance(layer, stepping.KeptLayer)]
            stored = [layer.keys.shape[-2] if layer.is_initialized else 0 for layer in layers]
            if min(stored) < layers[0].seen:
                arguments["position_ids"] = arguments["position_ids"] + 1
            return self.wrapped.model(**arguments)

    def step_forward(wrapped, session, tokens, first):
        return original(Shifted(wrapped, session), session, tokens, first)

    monkeypatch.setattr(runs, "step_forward", step_forward)
    monkeypatch.setattr(scoring, "step_forward", step_forward)


def cache_counts_entries(monkeypatch) -> None:
    """The cache's length, from which ``generate`` derives positions, is that of what is left."""

    def get_seq_length(layer):
        return layer.keys.shape[-2] if layer.is_initialized else 0

    monkeypatch.setattr(stepping.KeptLayer, "get_seq_length", get_seq_length)


def padding_counts_as_tokens(monkeypatch) -> None:
    """Padding columns have positions, are read and are kept."""
    original = stepping.StepSession.__init__

    def __init__(session, config, strategy, kinds, rows, *rest, **options):
        original(
            session, config, strategy, kinds, [replace(row, padding=0) for row in rows], *rest, **options
        )

    monkeypatch.setattr(stepping.StepSession, "__init__", __init__)


def stores_per_query_head(monkeypatch) -> None:
    """Keys and values are repeated for every query head before they are stored."""
    original = stepping.KeptLayer.update

    def update(layer, key_states, value_states, *rest, **options):
        repeated = (x.repeat_interleave(2, 1) for x in (key_states, value_states))
        return original(layer, *repeated, *rest, **options)

    monkeypatch.setattr(stepping.KeptLayer, "update", update)


def reports_nothing_hidden(monkeypatch) -> None:
    """What queries read is not counted."""
    original = parallel.ParallelSession._count

    def count(session, seen_by):
        original(session, (session.plan.position[:, None] + 1).expand_as(seen_by).int())

    monkeypatch.setattr(parallel.ParallelSession, "_count", count)


def leaves_a_hook(monkeypatch) -> None:
    """Every run leaves a hook on the model."""
    original = parallel.ParallelSession._replay

    def _replay(session, call):
        call.module.register_forward_hook(lambda *arguments: None)
        return original(session, call)

    monkeypatch.setattr(parallel.ParallelSession, "_replay", _replay)


def frees_nothing(monkeypatch) -> None:
    """Evicted entries are only marked, and go on holding memory."""
    original = stepping.KeptLayer.retain

    def retain(layer, entries, physical):
        original(layer, entries, physical=False)

    monkeypatch.setattr(stepping.KeptLayer, "retain", retain)
