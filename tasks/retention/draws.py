"""Reproducible random draws.

Python promises the same numbers across versions only for ``random.random``; its
``sample`` and ``shuffle`` have changed before. These draws come from SHA-256 in
counter mode and are the same everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """A stream of random draws that depends on ``parts`` alone.

    Example:
        >>> Draws("passkey", 1).below(10) == Draws("passkey", 1).below(10)
        True
    """

    def __init__(self, *parts: object) -> None:
        self._key = "\x1f".join(str(part) for part in parts).encode()
        self._count = 0

    def below(self, limit: int) -> int:
        """A whole number from 0 to ``limit`` - 1, all equally likely."""
        # 128 bits: the remainder's bias is below 2**-96 for any limit used here.
        digest = hashlib.sha256(self._key + b"\x1f" + str(self._count).encode()).digest()
        self._count += 1
        return int.from_bytes(digest[:16], "big") % limit

    def choice(self, values: Sequence[T]) -> T:
        """One of ``values``."""
        return values[self.below(len(values))]

    def shuffled(self, values: Sequence[T]) -> list[T]:
        """``values`` in random order (Fisher-Yates)."""
        order = list(values)
        for last in range(len(order) - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order

    def sample(self, values: Sequence[T], count: int) -> list[T]:
        """``count`` different places of ``values``, in random order."""
        return self.shuffled(values)[:count]

    def numbers(self, count: int, digits: int) -> list[str]:
        """``count`` different numbers of ``digits`` digits, without leading zeros."""
        found: list[str] = []
        while len(found) < count:
            number = str(10 ** (digits - 1) + self.below(9 * 10 ** (digits - 1)))
            if number not in found:
                found.append(number)
        return found
