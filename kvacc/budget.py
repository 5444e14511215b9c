"""Budgets: how many KV entries a strategy may keep per KV head.

A budget always says what is *kept*. A count (``256``) is that many entries; a
fraction (``0.2``, ``"20%"``, ``"1/5"``) is that share of the length of what gets
compressed, rounded up in exact arithmetic: 0.9 of 1,000 tokens is 900, although
the float 0.9 * 1000 rounds to 900.0000000000001 on some paths. The integer ``1``
is one entry; ``1.0`` is everything.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real

from kvacc.errors import KvaccError, unknown

REFERENCES = ("prompt", "seen")
EVERYTHING = 2**31 - 1
"""Entries that the fraction 1.0 allows: an answer longer than its prompt evicts nothing either."""
_HOW = "give a count of entries (256) or a fraction in (0, 1] (0.2, '20%')"


@dataclass(frozen=True, eq=False)
class Budget:
    """Entries kept per KV head, as a count or a fraction.

    Args:
        amount: an int (entries) or a Fraction in (0, 1].
        of: what a fraction refers to. ``prompt``: the length of what gets
            compressed, fixed when the request starts, so that answer options
            never change it. ``seen``: the tokens seen so far, so the cache grows.

    Example:
        >>> Budget.parse("20%").entries(prompt=1000)
        200
        >>> Budget.parse(1).entries(prompt=1000), Budget.parse(1.0).entries(prompt=1000) == EVERYTHING
        (1, True)
    """

    amount: int | Fraction
    of: str = "prompt"

    @classmethod
    def parse(cls, value: Budget | Real | str, of: str = "prompt") -> Budget:
        """Read a budget as a person writes it.

        Raises:
            KvaccError: for zero, negative, a fraction above 1, or not a number.
        """
        if isinstance(value, Budget):
            return value
        if of not in REFERENCES:
            raise unknown("budget_of", of, REFERENCES)
        return cls(_amount(value), of)

    def __post_init__(self) -> None:
        if not isinstance(self.amount, (int, Fraction)) or isinstance(self.amount, bool):
            raise KvaccError(f"budget {self.amount!r} is neither a count nor a Fraction; use Budget.parse")
        _check(self.amount, self.amount)

    # One entry and everything are different budgets, although 1 == 1.0 in Python.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Budget) and (str(self), self.of) == (str(other), other.of)

    def __hash__(self) -> int:
        return hash((str(self), self.of))

    @property
    def is_fraction(self) -> bool:
        return isinstance(self.amount, Fraction)

    def entries(self, prompt: int, seen: int | None = None) -> int:
        """Entries allowed per KV head, at least 1.

        Args:
            prompt: tokens in what gets compressed.
            seen: tokens seen so far; used when ``of == "seen"``.
        """
        if not self.is_fraction:
            return int(self.amount)
        if self.amount == 1:
            return EVERYTHING
        length = prompt if self.of == "prompt" or seen is None else seen
        return max(1, math.ceil(self.amount * length))

    def __str__(self) -> str:
        """Canonical text: a count as ``256``, a fraction as ``0.2`` (or ``1/3``)."""
        if not self.is_fraction:
            return str(self.amount)
        decimal = float(self.amount)
        text = repr(decimal)
        return text if Fraction(text) == self.amount else f"{self.amount}"

    def __repr__(self) -> str:
        return f"Budget({str(self)!r}{'' if self.of == 'prompt' else f', of={self.of!r}'})"


def _amount(value: Real | str) -> int | Fraction:
    shown = value
    if isinstance(value, str):
        value = _from_text(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise KvaccError(f"budget {shown!r} is not a number; {_HOW}")
    if isinstance(value, Integral):
        value = int(value)
    elif not isinstance(value, Fraction):
        value = float(value)
        if not math.isfinite(value):
            raise KvaccError(f"budget {shown} is not a finite number; {_HOW}")
        # The shortest decimal that prints as this float is what the user wrote.
        value = Fraction(repr(value))
    _check(value, shown)
    return value


def _check(amount: int | Fraction, shown: object) -> None:
    shown = shown if isinstance(shown, str) else f"{float(shown):g}"
    if amount <= 0:
        raise KvaccError(f"budget {shown} keeps nothing; {_HOW}")
    if isinstance(amount, Fraction) and amount > 1:
        count = f"; for {int(amount)} entries write {int(amount)}" if amount.denominator == 1 else ""
        raise KvaccError(f"budget {shown} as a fraction is above 1; {_HOW}{count}")


def _from_text(text: str) -> int | float | Fraction:
    bare = text.strip().replace("_", "")
    try:
        if bare.endswith("%"):
            return Fraction(bare[:-1].strip()) / 100
        if re.fullmatch(r"[+-]?\d+", bare):
            return int(bare)
        if re.fullmatch(r"\d+/\d+", bare):
            return Fraction(bare)
        return float(bare)
    except (ValueError, ZeroDivisionError):
        raise KvaccError(f"budget {text!r} is not a number; {_HOW}") from None
