"""Invariant 9: scores are accumulated in float32, and ties break by the lower position."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from kvacc.strategy import Strategy
from kvacc.verify.bench import Bench, Case, is_evict, is_select
from kvacc.verify.results import Failure, Result, Tally
from kvacc.verify.runs import Difference, parallel_runs, reads_difference, step_runs
from kvacc.verify.subjects import flat_subject, layers_for

_SPARE = 5
"""Entries beyond the budget in the constructed tie."""
_NUDGE = 1 + 1e-6


def check_scores(bench: Bench) -> Result:
    """9. In a bfloat16 model the strategy is given, and gives back, float32 scores; of equal
    scores the lower position stays, wherever the entries lie; and both paths break the exact
    ties of uniform attention alike."""
    tally = Tally(9, bench.subject.label)
    if not is_evict(bench.strategy) and not is_select(bench.strategy):
        tally.reasons.append("it has no scores")
        return tally.result()
    case = bench.main_case
    failure = None
    if is_evict(bench.strategy) and bench.is_causal:
        failure = _half_precision(bench, tally, case) or _tied(bench, tally, case)
    elif not bench.is_causal:
        tally.reasons.append("it is given no scores one query at a time")
    else:
        tally.reasons.append("how a selection is scored is its own; it is checked where all entries tie")
    if failure is None and bench.is_causal:
        failure = _uniform(bench, tally, case)
    return tally.result(failure)


def _half_precision(bench: Bench, tally: Tally, case: Case) -> Failure | None:
    subject = bench.subject.half_precision()
    seen: list[tuple[str, torch.dtype]] = []
    spied = _spied(case.strategy, lambda name, value: seen.append((name, value.dtype)))
    step_runs(subject, spied, [case.text])
    parallel_runs(subject, spied, [case.text])
    tally.cases += 1
    for name, dtype in seen:
        if dtype != torch.float32:
            difference = Difference(name, None, "torch.float32", str(dtype))
            return dataclasses.replace(
                bench.failure(case, difference, "scores rank entries by differences that other types lose"),
                model=subject.label,
            )
    return None


def _spied(strategy: Strategy, note: Callable[[str, torch.Tensor], None]) -> Strategy:
    """The same strategy, whose scores are looked at as they pass."""
    base = type(strategy)

    class Spy(base):  # type: ignore[misc, valid-type]
        def initial_score(self, position, layer, heads):
            score = super().initial_score(position, layer, heads)
            note("initial scores", score)
            return score

        def observe(self, scores, attention):
            note("scores given to observe", scores)
            note("attention given to observe", attention)
            score = super().observe(scores, attention)
            note("scores from observe", score)
            return score

        def keep(self, scores, position, alive, *limits):
            note("scores given to keep", scores)
            kept, score = super().keep(scores, position, alive, *limits)
            note("scores from keep", score)
            return kept, score

    values = {f.name: getattr(strategy, f.name) for f in dataclasses.fields(strategy) if f.init}
    return Spy(**values)


def _tied(bench: Bench, tally: Tally, case: Case) -> Failure | None:
    """Ask the strategy itself which of equally scored entries stay."""
    tally.cases += 1
    budget = case.limit
    tie = _Tie(case.strategy, budget, budget + _SPARE)
    in_order = tie.kept(list(range(tie.count)))
    turned = tie.kept(list(range(tie.count))[::-1])
    if in_order != turned:
        difference = Difference("entries kept of equal ones", None, _listed(in_order), _listed(turned))
        return bench.failure(case, difference, "the same entries, stored in the opposite order")
    gone = [place for place in range(tie.count) if place not in in_order]
    for low in gone:
        for high in (place for place in in_order if place > low):
            # Where the rule ranks by age too, equal scores are no tie: a nudge changes nothing.
            nudged = tie.kept(list(range(tie.count)), raised=low)
            if low in nudged and high not in nudged:
                difference = Difference("entry kept of two equal ones", None, f"{low}", f"{high}")
                return bench.failure(case, difference, "of equal scores the lower position stays")
    return None


class _Tie:
    """One call of ``keep`` with equal scores for ``count`` entries."""

    def __init__(self, strategy: Any, budget: int, count: int) -> None:
        self.strategy, self.budget, self.count = strategy, budget, count

    def kept(self, places: list[int], raised: int | None = None) -> list[int]:
        """Positions that stay when the slots hold the positions ``places``."""
        position = torch.tensor([[places]])
        scores = torch.ones(1, 1, self.count)
        if raised is not None:
            scores[position == raised] *= _NUDGE
        limits = (self.count, self.budget, self.strategy.recent_count(self.budget))
        limits = (*limits, self.strategy.sink_count(self.budget))
        alive = torch.ones_like(position, dtype=torch.bool)
        kept, _ = self.strategy.keep(scores, position, alive, *(torch.tensor([n]) for n in limits))
        return sorted(position[kept].tolist())


def _uniform(bench: Bench, tally: Tally, case: Case) -> Failure | None:
    """Every query attends equally to all it reads, so that scores tie exactly."""
    subject = flat_subject(layers_for(case.strategy))
    text = dataclasses.replace(case.text, tokens=subject.draw_tokens(len(case.text), seed=1))
    runs = parallel_runs(subject, case.strategy, [text]) + step_runs(subject, case.strategy, [text])
    tally.cases += 1
    difference = reads_difference(runs[1], runs[0])
    if difference is None or not bench.repeats(case):
        return None
    why = "all entries tie: expected is the step path, found the parallel path"
    return dataclasses.replace(bench.failure(case, difference, why), model=subject.label)


def _listed(places: list[int]) -> str:
    return " ".join(map(str, places))
