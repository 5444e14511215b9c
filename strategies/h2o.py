"""H2O: keep the heavy hitters and the recent tokens.

Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
Language Models", NeurIPS 2023, arXiv:2306.14048, Algorithm 1: the attention of the
current query is renormalised over the kept set, every kept entry's score grows by
what it received, and when the set exceeds its size the entry with the lowest
accumulated score goes. The budget is split between heavy and recent entries. The
sum is the paper's choice: dividing it by the number of queries hurts (App. B.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import ClassVar

from kvacc.errors import KvaccError, unknown
from kvacc.strategy import EvictStrategy, top

SCORES = ("renormalised", "averaged", "full_row", "global")
AGGREGATES = ("mean", "max")


@dataclass(frozen=True)
class H2O(EvictStrategy):
    """Evict the entry with the lowest accumulated attention outside the recent window.

    Args:
        recent_fraction: share of the budget held by the newest tokens, rounded up;
            the rest are heavy hitters. With 0 the newest entry itself can go.
        scores: ``renormalised`` is the paper's algorithm. ``full_row`` is the
            authors' OPT simulation (FMInference/H2O, utils_lm_eval/modify_opt.py):
            scores come from attention over all earlier tokens, evicted ones too,
            and a token has to earn its heavy place the step after it arrives, so
            heavy and recent entries overlap: even at budget 1.0 it hides entries.
            ``averaged`` divides a score by the queries that could see the entry, which
            removes the sum's bias towards early tokens; the paper found it worse
            (App. B.2). ``global`` is their LLaMA simulation
            (modify_llama.py): one heavy set from the column sums over *all* queries,
            the answer's included. It reads the future, so its results are marked
            non-causal and it cannot decode. Both simulations fix the budget from the
            prompt, where the authors use prompt plus answer, which differs by option.
        aggregate: how the query heads of one KV head share a score, ``mean`` (ranks
            as the sum does) or ``max``. The paper has one query head per KV head.
    """

    name: ClassVar[str] = "h2o"
    summary: ClassVar[str] = "heavy hitters by accumulated attention, and recent tokens"
    source: ClassVar[str] = "arXiv:2306.14048, Algorithm 1"

    recent_fraction: float = 0.5
    scores: str = "renormalised"
    aggregate: str = "mean"

    def validate(self) -> None:
        is_number = isinstance(self.recent_fraction, Real) and not isinstance(self.recent_fraction, bool)
        if not is_number or not 0 <= self.recent_fraction <= 1:
            raise KvaccError(f"h2o: recent_fraction {self.recent_fraction!r} is not between 0 and 1")
        if self.scores not in SCORES:
            raise unknown("h2o scores", self.scores, SCORES)
        if self.aggregate not in AGGREGATES:
            raise unknown("h2o aggregate", self.aggregate, AGGREGATES)
        if self.scores == "global" and self.budget.of == "seen":
            raise KvaccError(
                "h2o: scores=global has one kept set for all queries; use budget_of=prompt with it"
            )

    @property
    def causal(self) -> bool:
        return self.scores != "global"

    def supported_protocols(self) -> tuple[str, ...]:
        return ("stream",) if self.reads_full_rows else self.protocols

    @property
    def compiled(self) -> str | None:  # type: ignore[override]
        return "attention_sum" if self.scores == "renormalised" else None

    @property
    def reads_full_rows(self) -> bool:
        return self.scores in ("full_row", "global")

    def recent_count(self, budget: int) -> int:
        return math.ceil(Fraction(repr(float(self.recent_fraction))) * budget)

    def observe(self, scores, attention):
        received = attention.amax(2) if self.aggregate == "max" else attention.mean(2)
        if self.scores == "full_row":
            # A score below zero marks an entry that has lost its heavy place for good.
            return (scores + received).where(scores >= 0, scores)
        return scores + received

    def keep(self, scores, position, alive, seen, budget, recent, sinks):
        if self.scores == "averaged":
            exposure = (seen.view(-1, 1, 1) - position).clamp(min=1)
            return super().keep(scores / exposure, position, alive, seen, budget, recent, sinks)[0], scores
        if self.scores != "full_row":
            return super().keep(scores, position, alive, seen, budget, recent, sinks)
        # The arriving token takes one heavy place, so one fewer of the others stays.
        places = (budget - recent - 1).clamp(min=0).view(-1, 1, 1)
        heavy = alive & (scores >= 0)
        heavy = top(scores, position, heavy, heavy.new_zeros(heavy.shape), places)
        in_band = position >= (seen - recent).view(-1, 1, 1)
        return alive & (heavy | in_band), scores.where(heavy, scores.new_tensor(-1.0))

    def visible_from_all_queries(self, attention, position, causal, budget):
        """``scores=global``: one kept set for all queries (oracle; reads the future).

        Args:
            attention: float32 [B, H, G, T, T], causal softmax rows, padding rows 0.
            position: long [B, T]. causal: bool [B, T, T]. budget: long [B].

        Returns:
            bool [B, H, T, T]: what each query reads.
        """
        received = attention.amax(2) if self.aggregate == "max" else attention.mean(2)
        total = received.sum(-2)  # [B, H, T], over every query
        recent = budget.new_tensor([self.recent_count(int(b)) for b in budget])
        real = causal.any(1)[:, None].expand_as(total)
        place = position[:, None].expand_as(total)
        heavy = top(total, place, real, real.new_zeros(real.shape), (budget - recent).view(-1, 1, 1))
        distance = position[:, :, None] - position[:, None, :]
        band = distance <= recent.view(-1, 1, 1)  # the authors' band holds recent + 1 keys
        return causal[:, None] & (heavy[:, :, None, :] | band[:, None])
