"""What a recommendation has to satisfy, and how people write it: ``1pt``, ``24GB``, ``40ms``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvacc.errors import KvaccError, unknown

AVERAGE = "average"
"""The name of the tasks' average, as of a task."""
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_AMOUNT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True)
class Limits:
    """What a strategy must satisfy. Drops are shares (0.01 is a point), sizes bytes, times seconds."""

    max_drop: float | None = None
    """Largest drop of every task and of their average; None: only those of ``max_drop_of``."""
    max_drop_of: Mapping[str, float] = field(default_factory=dict)
    """Largest drop by task (or ``average``), instead of ``max_drop``."""
    memory: int | None = None
    """Most bytes live on the device, weights included, while reading the prompt and while decoding."""
    kv_memory: int | None = None
    """Most bytes of keys, values, what they are chosen by, and recurrent state on the device."""
    latency: float | None = None
    """Longest median time for each output token."""
    time_to_first_token: float | None = None
    """Longest median time to the first token."""
    confidence: float = 0.95
    """Of each one-sided bound of a drop."""
    certain: bool = True
    """Accept only what holds with that confidence; False: what the point estimates say."""

    @property
    def needs_probes(self) -> bool:
        """True when a time is limited, which nothing but a measurement can tell."""
        return self.latency is not None or self.time_to_first_token is not None

    @property
    def of_resources(self) -> bool:
        """True when memory or a time is limited."""
        return self.needs_probes or self.memory is not None or self.kv_memory is not None

    def drop_of(self, *names: str) -> float | None:
        """The largest drop allowed of a task that goes by any of ``names``; None: any drop."""
        return next((self.max_drop_of[name] for name in names if name in self.max_drop_of), self.max_drop)


def require(limits: Limits) -> None:
    """Raise KvaccError for a limit that is missing or out of range."""
    drops = dict(limits.max_drop_of) | ({} if limits.max_drop is None else {"every task": limits.max_drop})
    if not drops:
        raise KvaccError("no drop is limited; say what may be lost, such as --max-drop 1pt")
    for name, drop in drops.items():
        if not 0 < drop < 1:
            raise KvaccError(f"max_drop {drop:g} of {name} is out of range; give a share above 0 and below 1")
    if not 0.5 < limits.confidence < 1:
        raise KvaccError(
            f"confidence {limits.confidence:g} is out of range; give one above 0.5 and below 1, such as 0.95"
        )
    for name in ("memory", "kv_memory", "latency", "time_to_first_token"):
        value = getattr(limits, name)
        if value is not None and not 0 < value < math.inf:
            raise KvaccError(f"{name} {value:g} is out of range; give one above 0")


def parse_drops(words: Iterable[str]) -> tuple[float | None, dict[str, float]]:
    """``["1pt", "piqa=2pt"]`` as 0.01 and ``{"piqa": 0.02}``.

    Raises:
        KvaccError: no points, or one name twice.
    """
    default, by_name = None, {}
    for word in words:
        name, equals, text = word.rpartition("=")
        drop = _points(text if equals else word, word)
        if not equals:
            if default is not None:
                raise KvaccError(f"--max-drop {word!r}: there is one for every task already; keep one")
            default = drop
        elif not name or name in by_name:
            why = f"{name} has one already; keep one" if name else "write TASK=POINTS, such as piqa=2pt"
            raise KvaccError(f"--max-drop {word!r}: {why}")
        else:
            by_name[name] = drop
    return default, by_name


def parse_seconds(text: str, option: str) -> float:
    """``40ms`` or ``2s`` in seconds.

    Raises:
        KvaccError: not such a time.
    """
    found = _AMOUNT.fullmatch(text)
    if not found or not found[2]:
        raise KvaccError(f"{option} {text!r}: give a number and its unit, such as 40ms or 2s")
    if found[2] not in _SECONDS:
        raise unknown(f"unit of {option} {text!r}", found[2], _SECONDS)
    seconds = float(found[1]) * _SECONDS[found[2]]
    if not 0 < seconds < math.inf:
        raise KvaccError(f"{option} {text!r} is out of range; give a time above 0, such as 40ms or 2s")
    return seconds


def _points(text: str, word: str) -> float:
    found = _AMOUNT.fullmatch(text)
    value = float(found[1]) if found and found[2] in ("", "pt", "point", "points") else math.nan
    if not 0 < value < 100:
        raise KvaccError(f"--max-drop {word!r}: give points above 0 and below 100, such as 1pt or piqa=2pt")
    return value / 100
