"""The full cache: every entry is kept. The baseline of every comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvacc.strategy import Strategy


@dataclass(frozen=True)
class FullCache(Strategy):
    """Keep every entry."""

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "keeps every entry; the baseline"
    source: ClassVar[str] = "none"
    has_budget: ClassVar[bool] = False
