"""StreamingLLM: keep the first tokens (attention sinks) and the newest ones.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024,
arXiv:2309.17453, section 3.2. No scores. Positions are places in the cache, not in
the text: keys are rotated at reading to 0..n-1, and the query to n-1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvacc.errors import KvaccError, unknown
from kvacc.strategy import EvictStrategy

POSITIONS = ("cache", "original")


@dataclass(frozen=True)
class StreamingLLM(EvictStrategy):
    """Keep ``sinks`` first tokens and fill the budget with the newest.

    Args:
        sinks: first tokens that always stay (the paper's 4). A budget given as a
            fraction of a short prompt can be smaller: then one place goes to the
            newest token and the rest to sinks.
        positions: ``cache`` as in the paper, or ``original`` to keep each key's place
            in the text (the only choice for models without rotary embeddings).
    """

    name: ClassVar[str] = "streaming_llm"
    summary: ClassVar[str] = "attention sinks and recent tokens, rotated to cache positions"
    source: ClassVar[str] = "arXiv:2309.17453, section 3.2"
    compiled: ClassVar[str] = "static"
    needs_attention: ClassVar[bool] = False

    sinks: int = 4
    positions: str = "cache"

    def validate(self) -> None:
        if not isinstance(self.sinks, int) or isinstance(self.sinks, bool) or self.sinks < 0:
            raise KvaccError(f"streaming_llm: sinks {self.sinks!r} is not a whole number of at least 0")
        if self.positions not in POSITIONS:
            raise unknown("streaming_llm positions", self.positions, POSITIONS)
        if self.budget.is_fraction and self.budget.of == "seen":
            raise KvaccError(
                "streaming_llm: budget_of=seen would evict the sinks while the budget is still smaller than "
                "they are; use budget_of=prompt or a count of entries"
            )
        if not self.budget.is_fraction and self.budget.amount < self.sinks + 1:
            raise KvaccError(
                f"streaming_llm: budget {self.budget} is fewer than {self.sinks} sinks + 1 recent token; "
                f"give at least {self.sinks + 1} or fewer sinks"
            )

    @property
    def rotates_to_cache_positions(self) -> bool:
        return self.positions == "cache"

    def sink_count(self, budget: int) -> int:
        return min(self.sinks, budget - 1)

    def recent_count(self, budget: int) -> int:
        return budget - self.sink_count(budget)
