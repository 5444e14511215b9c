"""A strategy of one's own: accumulated attention that fades.

H2O adds up the attention that an entry receives, so an entry that mattered early is kept
long after. Here a score halves every ``half_life`` queries, so what mattered lately stays.
See docs/write-a-strategy.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvacc.errors import KvaccError
from kvacc.strategy import EvictStrategy


@dataclass(frozen=True)
class DecayedAttention(EvictStrategy):
    """Evict the entry with the lowest faded attention outside the recent window.

    Args:
        half_life: queries after which a score counts half.
        recent: newest tokens that always stay (at most half of the budget).
    """

    name: ClassVar[str] = "decayed_attention"
    summary: ClassVar[str] = "heavy hitters by attention that fades, and recent tokens"
    source: ClassVar[str] = "docs/write-a-strategy.md"

    half_life: float = 32.0
    recent: int = 8

    def validate(self) -> None:
        if self.half_life <= 0:
            raise KvaccError(f"decayed_attention: half_life {self.half_life} is not above 0")
        if self.recent < 0:
            raise KvaccError(f"decayed_attention: recent {self.recent} is below 0")

    def recent_count(self, budget: int) -> int:
        return min(self.recent, budget // 2)

    def observe(self, scores, attention):
        # scores [B, H, S]; attention [B, H, G, S] of the G query heads of each KV head.
        return scores * 0.5 ** (1 / self.half_life) + attention.mean(2)
