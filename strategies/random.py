"""A random subset of the tokens: the control that shows what any choice is worth.

Each entry draws a fixed number from (seed, layer, KV head, position) and the
highest stay, so at every step the kept set is a uniform random subset of what was
seen, without a random-number generator whose state could leak between requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvacc.errors import KvaccError
from kvacc.strategy import EvictStrategy

_PRIME = 2_147_483_647


@dataclass(frozen=True)
class Random(EvictStrategy):
    """Keep entries at random.

    Args:
        seed: another seed, another subset.
    """

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "control: a random subset of the tokens"
    source: ClassVar[str] = "none"
    is_control: ClassVar[bool] = True
    compiled: ClassVar[str] = "static"
    needs_attention: ClassVar[bool] = False

    seed: int = 0

    def validate(self) -> None:
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            raise KvaccError(f"random: seed {self.seed!r} is not a whole number of at least 0")

    def initial_score(self, position, layer, heads):
        head = position.new_tensor(range(heads))
        # Integer arithmetic below 2**62, so every device draws the same numbers.
        draw = position[..., None] * 1_000_003 + head * 7_919 + layer * 104_729
        draw = draw + self.seed % _PRIME * 15_485_863 + 12_345
        for multiplier in (48_271, 69_621, 16_807):
            draw = (draw % _PRIME) * multiplier % _PRIME
            draw = draw ^ (draw >> 13)
        # 24 bits fit a float32 exactly, so no two devices round them differently.
        return (draw % (1 << 24)).float()
