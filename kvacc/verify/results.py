"""What a check says: what holds, what fails and where, what does not apply and why."""

from __future__ import annotations

from dataclasses import dataclass, field

HOLDS, FAILS, NOT_APPLICABLE = "holds", "fails", "not applicable"

INVARIANTS = {
    1: "a budget of everything equals the full cache",
    2: "later tokens change nothing earlier",
    3: "parallel path equals step path",
    4: "the budget holds, promised entries stay, bytes are measured",
    5: "neighbours and padding change nothing",
    6: "no state leaks between requests",
    7: "positions count tokens seen, not entries kept",
    8: "entries are kept and stored once per KV head",
    9: "scores are float32, ties go to the lower position",
    10: "a strategy that hid nothing says so",
}
"""DESIGN's ten invariants, by number."""

DIAGNOSIS = (8, 7, 2, 6, 5, 4, 9, 10, 1, 3)
"""From the most telling invariant to the least. One mistake can break several: entries
stored per query head also make the paths differ, while paths that differ say little."""


@dataclass(frozen=True)
class Failure:
    """The smallest case in which an invariant does not hold.

    Attributes:
        what: what was compared: ``logit``, ``entries read``, ``bytes``, ...
        model, protocol, budget: of the case.
        tokens: length of its text.
        expected, found: the two values.
        why: what the values are, in words.
        layer, head (KV head), position (place in the text): None where there is none.
    """

    what: str
    model: str
    protocol: str
    budget: str
    tokens: int
    expected: str
    found: str
    why: str
    layer: int | None = None
    head: int | None = None
    position: int | None = None

    def __str__(self) -> str:
        places = {"layer": self.layer, "KV head": self.head, "position": self.position}
        where = ", ".join(f"{name} {value}" for name, value in places.items() if value is not None)
        case = f"{self.model}, {self.protocol}, budget {self.budget}, {self.tokens} tokens"
        place = f"{case}, {where}" if where else case
        return f"{place}: {self.what}: expected {self.expected}, found {self.found}; {self.why}"


@dataclass(frozen=True)
class Result:
    """One invariant's result.

    Attributes:
        invariant: its number.
        status: ``holds``, ``fails`` or ``not applicable``.
        models: those on which it was checked.
        cases: comparisons made.
        undecided: cases left out because rounding alone decides them.
        reasons: why it does not apply, or not to some of the models.
        failure: the smallest failing case.
        failing_models: those on which it fails.
    """

    invariant: int
    status: str
    models: tuple[str, ...] = ()
    cases: int = 0
    undecided: int = 0
    reasons: tuple[str, ...] = ()
    failure: Failure | None = None
    failing_models: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return INVARIANTS[self.invariant]


@dataclass
class Tally:
    """Counts cases while a check of one invariant goes on with one model."""

    invariant: int
    model: str
    cases: int = 0
    undecided: int = 0
    reasons: list[str] = field(default_factory=list)

    def result(self, failure: Failure | None = None) -> Result:
        """What came out; without a single case the invariant does not apply."""
        status = FAILS if failure else HOLDS if self.cases else NOT_APPLICABLE
        return Result(
            self.invariant,
            status,
            (self.model,) if self.cases or failure else (),
            self.cases,
            self.undecided,
            tuple(self.reasons),
            failure,
            (self.model,) if failure else (),
        )


def merged(results: list[Result]) -> Result:
    """One invariant's results on several models as one; the first failing model's case."""
    failing = [r for r in results if r.status == FAILS]
    holding = [r for r in results if r.status == HOLDS]
    return Result(
        results[0].invariant,
        FAILS if failing else HOLDS if holding else NOT_APPLICABLE,
        tuple(model for r in results for model in r.models),
        sum(r.cases for r in results),
        sum(r.undecided for r in results),
        tuple(dict.fromkeys(reason for r in results for reason in r.reasons)),
        failing[0].failure if failing else None,
        tuple(model for r in failing for model in r.failing_models),
    )


@dataclass(frozen=True)
class Report:
    """All ten invariants for one strategy.

    Attributes:
        strategy: its name and options.
        results: one per invariant, in order.
        models: those that it was run on.
        refused: models on which it cannot run, each with the reason.
        acted: it hid an entry somewhere; else the checks show little.
        seconds: wall time.
    """

    strategy: str
    results: tuple[Result, ...]
    models: tuple[str, ...]
    refused: tuple[str, ...]
    acted: bool
    seconds: float

    @property
    def failures(self) -> list[Result]:
        """The failing invariants, the most telling one first."""
        failing = [result for result in self.results if result.status == FAILS]
        return sorted(failing, key=lambda result: DIAGNOSIS.index(result.invariant))

    @property
    def failing(self) -> tuple[int, ...]:
        """Numbers of the failing invariants, the most telling one first."""
        return tuple(result.invariant for result in self.failures)
