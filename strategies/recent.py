"""Recent tokens only (a sliding window): the control without sinks or scores.

"Local" in the tables of the H2O paper (arXiv:2306.14048), window attention in
StreamingLLM (arXiv:2309.17453, Figure 1b). A strategy that cannot beat it has
learned nothing about which older tokens matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvacc.strategy import EvictStrategy


@dataclass(frozen=True)
class Recent(EvictStrategy):
    """Keep the newest tokens."""

    name: ClassVar[str] = "recent"
    summary: ClassVar[str] = "control: the newest tokens only"
    source: ClassVar[str] = "window attention, arXiv:2309.17453, Figure 1b"
    is_control: ClassVar[bool] = True
    compiled: ClassVar[str] = "static"
    needs_attention: ClassVar[bool] = False

    def recent_count(self, budget: int) -> int:
        return budget
