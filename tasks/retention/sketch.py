"""What a task kind says of one document, before its filler is chosen and its length is met."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvacc.tasks.retention.draws import Draws
    from kvacc.tasks.retention.filler import Units

WRONG_OPTIONS = 3
CHANCE = 1 / (1 + WRONG_OPTIONS)


@dataclass(frozen=True)
class Fact:
    """A text that goes into the haystack at ``place``, 0 (start) to 1 (end)."""

    place: float
    text: str


@dataclass(frozen=True)
class Sketch:
    """One document without its filler.

    ``facts`` come in the order in which they shall stand where places are equal.
    """

    introduction: str
    facts: tuple[Fact, ...]
    question: str
    """Ends where the answer continues, after a blank."""
    answer: str
    """The right option, and what has to be generated."""
    wrong: tuple[str, ...]
    """Three options of the same form."""
    answers: tuple[str, ...] = ()
    """The parts of the answer that are scored one by one; by default the answer itself."""
    forbidden: frozenset[str] = frozenset()
    """Words, phrases and numbers that filler must not contain; answer and options always are."""
    separator: str = " "
    """Between the sentences or lines of the haystack."""
    decorate: Callable[[int, str], str] | None = None
    """What makes a line of the haystack from the number and text of a filler sentence."""
    units: Units | None = None
    """A filler of the document's own, in place of prose."""


@dataclass(frozen=True)
class FactRange:
    """How many facts a task kind can have, and what they are."""

    what: str
    default: int
    least: int
    most: int
    step: int = 1

    def allows(self, count: int) -> bool:
        """True for a count that can be made."""
        return self.least <= count <= self.most and (count - self.least) % self.step == 0

    def smaller(self) -> list[int]:
        """The default and what to try where the length has no room for it, falling."""
        counts = [self.default]
        while counts[-1] > self.least:
            half = self.least + (counts[-1] // 2 - self.least) // self.step * self.step
            counts.append(max(self.least, half))
        return counts

    def __str__(self) -> str:
        by = f" in steps of {self.step}" if self.step > 1 else ""
        return f"{self.least} to {self.most} {self.what}{by}"


@dataclass(frozen=True)
class Kind:
    """A retention task: how to draw its documents, and how its answers are scored."""

    name: str
    asks: str
    """One line: what is told, and what is asked."""
    sketch: Callable[[int, float | None, Draws], Sketch]
    """From the number of facts, the depth and the draws."""
    form: str
    """How a generated answer is scored: a key of ``scoring.GENERATED``."""
    facts: FactRange | None = None
    depth: str = "grid"
    """``grid``: the option ``depths`` says; ``start``: always 0; ``none``: the answer is everywhere."""
    takes_filler: bool = True
    refused: dict[str, str] = field(default_factory=dict, compare=False)
    """Why an option is not among :attr:`options`."""

    def __post_init__(self) -> None:
        reasons = {
            "facts": None if self.facts else "there is one fact",
            "depths": {
                "grid": None,
                "start": "what it asks for stands at the start",
                "none": "what it asks for is spread over the whole text",
            }[self.depth],
            "filler": None if self.takes_filler else "its text is the thing that is asked about",
        }
        self.refused.update({name: why for name, why in reasons.items() if why})

    @property
    def options(self) -> tuple[str, ...]:
        """The options that it takes, in the order of :class:`Settings`."""
        from kvacc.tasks.retention.settings import OPTIONS

        return tuple(name for name in OPTIONS if name not in self.refused)


def spread(count: int, draws: Draws) -> list[float]:
    """``count`` places over the whole haystack, one at random in each of ``count`` equal parts."""
    return [(index + draws.below(1000) / 1000) / count for index in range(count)]


def others(draws: Draws, values: Sequence[str], right: str, count: int = WRONG_OPTIONS) -> tuple[str, ...]:
    """``count`` of ``values``, the right one left out, in random order."""
    return tuple(draws.sample([value for value in values if value != right], count))


def swapped(values: Sequence[str], one: int, other: int) -> list[str]:
    """``values`` with two of them in each other's place."""
    changed = list(values)
    changed[one], changed[other] = changed[other], changed[one]
    return changed
