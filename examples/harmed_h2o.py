"""H2O with its ranking turned round: it evicts the heavy hitters first.

Not a strategy to use, but a regression to catch: what H2O keeps, attention sinks and the
facts that queries come back to, is what this one throws away. `docs/ci.md` shows how
`kvacc check` finds it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvacc.strategy import EvictStrategy


@dataclass(frozen=True)
class HarmedH2O(EvictStrategy):
    """Evict the entry with the *highest* accumulated attention outside the recent half."""

    name: ClassVar[str] = "harmed_h2o"
    summary: ClassVar[str] = "H2O that evicts heavy hitters first: a regression for the gate to catch"
    source: ClassVar[str] = "docs/ci.md"

    def recent_count(self, budget: int) -> int:
        return (budget + 1) // 2

    def observe(self, scores, attention):
        # H2O adds what an entry received; the lowest scores are evicted.
        return scores - attention.mean(2)
