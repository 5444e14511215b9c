"""Which candidates satisfy the limits, which of those nothing else beats, and the pick.

Three answers are possible to each question: *yes* (with the asked-for confidence), *likely* (the
point estimate says so, the evidence is too thin to be sure) and *no*.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvacc.advice.accuracy import Candidate, Evidence
from kvacc.advice.cost import Cost, Setting
from kvacc.advice.limits import AVERAGE, Limits
from kvacc.non_inferiority import DropTest
from kvacc.plots.pareto import front
from kvacc.probes.records import Distribution
from kvacc.statistics import holm

PREFERENCES = ("memory", "latency", "accuracy")
_ALIKE = 0.01
"""Costs that differ by less do not decide between two candidates."""


class Verdict(enum.StrEnum):
    """Is a limit kept?"""

    YES = "yes"
    LIKELY = "likely"
    NO = "no"


_GRAVITY = (Verdict.NO, Verdict.LIKELY, Verdict.YES)


@dataclass(frozen=True)
class Check:
    """One limit, and how a candidate stands to it, in one unit."""

    what: str
    """``drop of piqa``, ``drop of the average``, ``memory`` and so on."""
    unit: str
    """``points``, ``bytes`` or ``seconds``."""
    value: float | None
    """Best estimate; None where it could not run or is not known."""
    bound: float | None
    """What it is at most, with the asked-for confidence."""
    limit: float
    verdict: Verdict
    why: str = ""
    """Why it is no more than likely, or no, where the numbers do not say so."""
    items: int | None = None
    needed: int | None = None
    """Items that would show the drop to be within the limit if in truth nothing is lost."""
    needed_as_seen: int | None = None
    """The same if the drop seen is the true one; None where no number would do."""

    @property
    def excess(self) -> float:
        """How far beyond the limit, as a share of it: the bound where that is all that fails."""
        beyond = self.value if self.verdict is Verdict.NO else self.bound
        return math.inf if beyond is None else max(0.0, beyond / self.limit - 1)


@dataclass(frozen=True)
class Judged:
    """A candidate and what was found."""

    candidate: Candidate
    cost: Cost
    checks: tuple[Check, ...]
    p_value: float
    """Chance of drops as small if one of the true drops were at its limit."""
    adjusted_p: float = 1.0
    """The same after Holm's correction for the number of candidates."""
    qualifies: bool = False
    on_front: bool = False
    beaten_by: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The gravest of its checks'."""
        found = {check.verdict for check in self.checks}
        return next((verdict for verdict in _GRAVITY if verdict in found), Verdict.YES)

    @property
    def failing(self) -> tuple[Check, ...]:
        """The checks that are not kept for certain, the gravest first."""
        found = [check for check in self.checks if check.verdict is not Verdict.YES]
        return tuple(sorted(found, key=lambda check: (_GRAVITY.index(check.verdict), -check.excess)))

    @property
    def excess(self) -> float:
        """How far its worst check is beyond the limit."""
        return max((check.excess for check in self.failing), default=0.0)


@dataclass(frozen=True)
class Advice:
    """A recommendation with everything that it rests on."""

    evidence: Evidence
    limits: Limits
    setting: Setting | None
    """Where costs were measured; None without probes."""
    prefer: str
    pick: Judged | None
    """None: nothing satisfies the limits."""
    judged: tuple[Judged, ...]
    """Every candidate: those that satisfy from the best on, then the nearest misses first."""
    full: Judged
    axes: tuple[str, ...]
    """What the front is of: ``difference`` and the costs that are known."""
    excluded: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 with a pick, 1 when nothing satisfies the limits."""
        return 0 if self.pick is not None else 1

    @property
    def qualified(self) -> tuple[Judged, ...]:
        """Those that satisfy every limit, controls among them."""
        return tuple(one for one in self.judged if one.qualifies)


def choose(
    evidence: Evidence,
    limits: Limits,
    setting: Setting | None,
    costs: Mapping[str, Cost],
    prefer: str,
    excluded: Sequence[tuple[str, str]] = (),
    notes: Sequence[str] = (),
) -> Advice:
    """Judge every candidate of the evidence that has a cost, and pick one.

    Args:
        costs: by name of the candidate; ``full`` may be missing.
    """
    candidates = [one for one in evidence.candidates if one.name in costs]
    judged = [_judge(one, costs[one.name], limits, setting) for one in candidates]
    adjusted = holm([one.p_value for one in judged])
    enough = (Verdict.YES,) if limits.certain else (Verdict.YES, Verdict.LIKELY)
    judged = [
        _with(one, adjusted_p=p, qualifies=one.verdict in enough)
        for one, p in zip(judged, adjusted, strict=True)
    ]
    full = _judge(evidence.full, costs.get(evidence.full.name, Cost()), limits, setting)
    # Without a limit of resources full satisfies everything, and there would be nothing to ask.
    full = _with(full, qualifies=limits.of_resources and full.verdict in enough)
    compared = [one for one in judged if one.qualifies and not one.candidate.is_control]
    axes = _axes(compared or [full])
    # Where full was not probed it has no place beside the others.
    has_place = all(_AXES[name](full) is not None for name in axes)
    placed = _placed([*compared, full] if has_place else compared, axes)
    by_name = {one.candidate.name: one for one in placed}
    full = by_name.get(full.candidate.name, full)
    judged = [by_name.get(one.candidate.name, one) for one in judged]
    best = _ordered([one for one in placed if one.qualifies and one.on_front], prefer, axes)
    return Advice(
        evidence=evidence,
        limits=limits,
        setting=setting,
        prefer=prefer,
        pick=best[0] if best else None,
        judged=tuple(sorted(judged, key=lambda one: _place(one, best))),
        full=full,
        axes=axes,
        excluded=tuple(excluded),
        notes=tuple(notes),
    )


def _judge(candidate: Candidate, cost: Cost, limits: Limits, setting: Setting | None) -> Judged:
    checks = [_drop_check(f"drop of {one.task}", one.test, one.margin, limits) for one in candidate.tasks]
    p_values = [one.test.p_within for one in candidate.tasks if one.margin is not None]
    if candidate.average is not None:
        checks.append(
            _drop_check(f"drop of the {AVERAGE}", candidate.average, candidate.average_margin, limits)
        )
        p_values += [candidate.average.p_within] if candidate.average_margin is not None else []
    checks += _cost_checks(cost, limits, setting)
    # All must hold, so the largest p-value is that of the whole (intersection-union test).
    p_value = max(p_values, default=0.0)
    return Judged(candidate, cost, tuple(check for check in checks if check is not None), p_value)


def _drop_check(what: str, test: DropTest, margin: float | None, limits: Limits) -> Check | None:
    if margin is None:
        return None
    # Rounding of 1 - 0.95 must not decide.
    if test.p_within <= 1 - limits.confidence + 1e-12:
        verdict = Verdict.YES
    else:
        verdict = Verdict.LIKELY if test.drop <= margin + 1e-12 else Verdict.NO
    as_seen = None
    if test.needed is not None and test.drop < margin:
        as_seen = math.ceil(test.needed * (margin / (margin - max(test.drop, 0.0))) ** 2)
    return Check(
        what=what,
        unit="points",
        value=100 * test.drop,
        bound=None if test.high is None else 100 * test.high,
        limit=100 * margin,
        verdict=verdict,
        why="" if test.high is not None else "too few independent items for any bound",
        items=test.items,
        needed=test.needed,
        needed_as_seen=as_seen,
    )


def _cost_checks(cost: Cost, limits: Limits, setting: Setting | None) -> list[Check]:
    found = []
    if cost.failure is not None:
        found.append(Check("run", "", None, None, 0.0, Verdict.NO, why=cost.failure))
    for what, unit, limit, value in (
        ("memory", "bytes", limits.memory, cost.memory),
        ("KV memory", "bytes", limits.kv_memory, cost.kv_memory),
        ("time per output token", "seconds", limits.latency, cost.latency),
        ("time to first token", "seconds", limits.time_to_first_token, cost.time_to_first_token),
    ):
        if limit is not None and cost.failure is None:
            found.append(_cost_check(what, unit, limit, value, cost, setting))
    return found


def _cost_check(
    what: str,
    unit: str,
    limit: float,
    measured: float | Distribution | None,
    cost: Cost,
    setting: Setting | None,
) -> Check:
    if measured is None:
        return Check(what, unit, None, None, limit, Verdict.NO, why="not measured")
    if isinstance(measured, Distribution):
        value, bound = measured.median, measured.high
    else:
        value = bound = float(measured)
    verdict, why = Verdict.YES if bound <= limit else Verdict.LIKELY if value <= limit else Verdict.NO, ""
    if verdict is Verdict.YES and setting is not None and setting.smaller_than_asked:
        verdict, why = Verdict.LIKELY, "measured at a smaller prompt or batch than asked for"
    if verdict is Verdict.YES and setting is not None and setting.computed and what == "memory":
        verdict, why = Verdict.LIKELY, "computed, not measured"
    return Check(what, unit, value, bound, limit, verdict, why=why)


_AXES: dict[str, Callable[[Judged], float | None]] = {
    "difference": lambda one: -one.candidate.difference,
    "memory": lambda one: one.cost.memory,
    "KV memory": lambda one: one.cost.kv_memory,
    "host memory": lambda one: one.cost.kv_host,
    "latency": lambda one: None if one.cost.latency is None else one.cost.latency.median,
    "kept": lambda one: one.candidate.kept_fraction,
}
"""What candidates are compared in, the less the better."""


def _axes(compared: Sequence[Judged]) -> tuple[str, ...]:
    """The axes that every one of them is known on; what is kept stands in for memory without that."""
    known = [name for name, axis in _AXES.items() if all(axis(one) is not None for one in compared)]
    if "KV memory" in known:
        known.remove("kept")
    return tuple(known)


def _placed(members: Sequence[Judged], axes: Sequence[str]) -> list[Judged]:
    """Each with whether it is on the front, and else by which members of the front it is beaten."""
    points = [tuple(round(_AXES[name](one), 9) for name in axes) for one in members]
    best = set(front(points))
    placed = []
    for place, one in enumerate(members):
        beaten_by = tuple(
            members[other].candidate.name for other in sorted(best)
            if place not in best and all(a <= b for a, b in zip(points[other], points[place], strict=True))
        )  # fmt: skip
        placed.append(_with(one, on_front=place in best, beaten_by=beaten_by))
    return placed


def _ordered(members: Sequence[Judged], prefer: str, axes: Sequence[str]) -> list[Judged]:
    """From the best on: first by what is preferred, then by the rest."""
    first = {"memory": ("memory", "KV memory", "kept"), "latency": ("latency",), "accuracy": ("difference",)}
    names = [name for name in first[prefer] if name in axes]
    names += [name for name in (*first["memory"], "latency", "host memory", "difference") if name in axes]
    remaining, ordered = list(members), []
    while remaining:
        alike = remaining
        for name in dict.fromkeys(names):
            axis = _AXES[name]
            least = min(axis(one) for one in alike)
            # A negated difference has no meaningful ratio.
            slack = 0.0 if name == "difference" else _ALIKE * abs(least)
            alike = [one for one in alike if axis(one) <= least + slack]
        chosen = min(alike, key=lambda one: one.candidate.name)
        ordered.append(chosen)
        remaining.remove(chosen)
    return ordered


def _place(one: Judged, best: Sequence[Judged]) -> tuple:
    """In the order of a report: the front, what else satisfies, then the nearest misses."""
    names = [other.candidate.name for other in best]
    name = one.candidate.name
    if name in names:
        return 0, names.index(name), 0.0, name
    if one.qualifies:
        return 1, int(one.candidate.is_control), -one.candidate.difference, name
    likely = one.verdict is Verdict.LIKELY
    return (2 if likely else 3), int(one.candidate.is_control), one.excess, name


def _with(one: Judged, **changes: object) -> Judged:
    return replace(one, **changes)
