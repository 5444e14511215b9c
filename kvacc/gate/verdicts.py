"""The verdicts: beyond the margin, within it, or too few items to tell.

The rule (docs/ci.md has how it behaves, simulated). With alpha = 1 - confidence:

* a cell **fails** when its drop is beyond the margin with that confidence, by a one-sided
  test whose p-value is adjusted for the number of checks (Holm; checks of which too few items
  changed to fail whatever way they went do not count). Where nothing changed in truth, the
  *whole gate* fails at most alpha of the time;
* it **passes** when its drop is within the margin with that confidence. No adjustment is
  needed for the whole gate to pass: it does so only when every check does;
* otherwise there are **too few items**, and the number that would do is told.

Items that came out the same to the last digit (log-likelihoods within float noise, the same
generated answers) are no sample of anything: such a cell is *unchanged* and passes.

The retention score is the average over the retention tasks, each counting once, of one model,
strategy, budget and protocol; it is a check of its own beside the tasks'.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy

from kvacc.errors import KvaccError
from kvacc.gate.matching import Pair
from kvacc.gate.snapshot import Snapshot
from kvacc.non_inferiority import DropTest, combine, drop_test, mean_test, unchanged_test
from kvacc.pairing import FLOAT_NOISE
from kvacc.shots import DEFAULT_SAMPLER
from kvacc.statistics import holm_of_discrete, is_at_chance, items_stderr

SCORE, RETENTION = "score", "retention score"
KL, AGREEMENT = "kl", "agreement"


class Verdict(enum.StrEnum):
    """What a check, or the whole gate, says."""

    PASS = "pass"
    FAIL = "fail"
    TOO_FEW = "too few items"


_GRAVITY = (Verdict.FAIL, Verdict.TOO_FEW, Verdict.PASS)
EXIT_CODES = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.TOO_FEW: 3}


@dataclass(frozen=True)
class Limits:
    """What a gate allows. Shares are in [0, 1]: 0.01 is a point."""

    margin: float = 0.01
    """Largest drop of a score that is accepted."""
    confidence: float = 0.95
    max_kl: float | None = None
    """Largest mean divergence from full, in nats per token."""
    min_agreement: float | None = None
    """Smallest share of tokens on which the strategy has full's first choice."""
    kl_margin: float | None = None
    """Largest rise of the divergence over the baseline's, in nats per token."""
    agreement_margin: float | None = None
    """Largest drop of the agreement below the baseline's."""
    noise: float = FLOAT_NOISE
    """Log-likelihoods that differ by no more count as the same, in nats."""


@dataclass(frozen=True)
class Check:
    """One question of the gate, and its answer."""

    label: str
    """The cell, or the setting whose retention score this is."""
    task: str
    setting: str
    what: str
    """``score``, ``retention score``, ``kl`` or ``agreement``, perhaps with ``below/above ...``."""
    metric: str
    unit: str
    """``points`` or ``nats``; limits and drops below are in it divided by ``scale``."""
    scale: float
    before: float | None
    now: float
    limit: float
    test: DropTest
    lost: int | None = None
    gained: int | None = None
    worst: str | None = None
    """Where most was lost: a depth, or a task and depth."""
    adjusted_p: float = 1.0
    verdict: Verdict = Verdict.TOO_FEW
    shots: int | None = None
    fewshot_sampler: str = DEFAULT_SAMPLER
    cells: tuple[str, ...] = field(default=())
    """Cells of the results that it rests on."""

    @property
    def unchanged(self) -> bool:
        """Everything came out as in the baseline."""
        return self.test.method == "unchanged"


@dataclass(frozen=True)
class Report:
    """Every check of a gate."""

    checks: list[Check]
    limits: Limits
    new: list[str]
    notes: list[str]

    @property
    def verdict(self) -> Verdict:
        """The gravest of the checks'."""
        found = {check.verdict for check in self.checks}
        return next(verdict for verdict in _GRAVITY if verdict in found)

    @property
    def exit_code(self) -> int:
        """0 passed, 1 failed, 3 too few items to tell."""
        return EXIT_CODES[self.verdict]


def judge(
    pairs: Sequence[Pair], limits: Limits, *, new: Sequence[str] = (), notes: Sequence[str] = ()
) -> Report:
    """Every check of the paired cells, the gravest first.

    Raises:
        KvaccError: nothing to compare, a limit out of range, or a fidelity limit for cells
            without that measurement.
    """
    require(limits)
    if not pairs:
        raise KvaccError("there is no cell to compare; name results that the baseline knows")
    checks = [_score_check(pair, limits) for pair in pairs]
    checks += _retention_checks(pairs, checks, limits)
    checks += [check for pair in pairs for check in _fidelity_checks(pair, limits)]
    alpha = 1 - limits.confidence
    tests = [check.test for check in checks]
    adjusted = holm_of_discrete([t.p_beyond for t in tests], [t.smallest_p for t in tests], alpha)
    judged = [
        replace(check, adjusted_p=p, verdict=_verdict(check, p, alpha))
        for check, p in zip(checks, adjusted, strict=True)
    ]
    gravest_first = sorted(judged, key=lambda check: _GRAVITY.index(check.verdict))
    return Report(gravest_first, limits, list(new), [*notes, *_chance_notes(pairs)])


def is_unchanged(pair: Pair, noise: float = FLOAT_NOISE) -> bool:
    """True when every value, log-likelihood and generated answer is as in the baseline."""
    before, now = pair.before, pair.now
    if (before.values.numbers() != now.values.numbers()).any():
        return False
    if before.responses_sha256 != now.responses_sha256:
        return False
    if before.loglikelihoods is None or now.loglikelihoods is None:
        return before.loglikelihoods is now.loglikelihoods and before.responses_sha256 is not None
    ours, theirs = now.loglikelihoods.numbers(), before.loglikelihoods.numbers()
    if len(ours) != len(theirs):
        return False
    # They are kept in float32: of thousands of nats its rounding alone is above the noise. Equality
    # first: two answers of probability 0 are both -inf, whose difference is NaN.
    with numpy.errstate(invalid="ignore"):
        near = numpy.abs(ours - theirs) <= noise + 1e-6 * numpy.abs(theirs)
    return bool(((ours == theirs) | near).all())


def _chance_notes(pairs: Sequence[Pair]) -> list[str]:
    """Cells of the baseline that cannot be told from guessing, and so can lose nothing."""
    found = []
    for pair in pairs:
        before, chance = pair.before.values.numbers(), pair.before.task.get("chance")
        labels = pair.before.cluster_labels()
        stderr = items_stderr(before, range(len(before)) if labels is None else labels)
        if is_at_chance(float(before.mean()), stderr, chance):
            found.append(
                f"{pair.before.label}: the baseline, {100 * before.mean():.1f}, cannot be told from chance, "
                f"{100 * chance:.1f}: no loss can show there"
            )
    return found


def _verdict(check: Check, adjusted_p: float, alpha: float) -> Verdict:
    if check.unchanged:
        return Verdict.PASS
    # Rounding of 1 - 0.95 must not decide.
    if adjusted_p <= alpha + 1e-12:
        return Verdict.FAIL
    return Verdict.PASS if check.test.p_within <= alpha + 1e-12 else Verdict.TOO_FEW


def _score_check(pair: Pair, limits: Limits) -> Check:
    before, now = pair.before.values.numbers(), pair.now.values.numbers()
    if is_unchanged(pair, limits.noise):
        test = unchanged_test(len(now))
    else:
        clusters = pair.before.cluster_labels()
        test = drop_test(before, now, clusters, limits.margin, limits.confidence)
    return Check(
        label=pair.now.label,
        task=pair.now.task_label,
        setting=pair.now.setting,
        what=SCORE,
        metric=str(pair.now.task["primary_metric"]),
        unit="points",
        scale=100,
        before=float(before.mean()),
        now=float(now.mean()),
        limit=limits.margin,
        test=test,
        lost=int((now < before).sum()),
        gained=int((now > before).sum()),
        worst=_worst_depth(pair),
        shots=pair.now.spec["shots"],
        fewshot_sampler=pair.now.fewshot_sampler,
        cells=(pair.now.cell_id,),
    )


def _retention_checks(pairs: Sequence[Pair], checks: Sequence[Check], limits: Limits) -> list[Check]:
    groups: dict[tuple, list[tuple[Pair, Check]]] = defaultdict(list)
    for pair, check in zip(pairs, checks, strict=True):
        if pair.now.task["kind"] == "retention":
            model = str(pair.now.model.get("name"))
            options = sorted(pair.now.spec["options"].items())
            groups[model, pair.now.setting, str(options), pair.now.shots_label].append((pair, check))
    found = []
    for (model, setting, _, shots_label), members in groups.items():
        if len(members) < 2:
            continue
        own = [check for _, check in members]
        changed = [check for check in own if not check.unchanged]
        test = combine([check.test for check in own], limits.margin, limits.confidence)
        if not changed:
            test = unchanged_test(sum(check.test.items for check in own))
        worst = max(own, key=lambda check: check.test.drop)
        place = f"{worst.task}{', ' + worst.worst if worst.worst else ''}"
        found.append(
            Check(
                label=f"{model.rstrip('/').rsplit('/', 1)[-1]} {setting} {RETENTION} {shots_label}",
                task=f"{RETENTION} of {len(own)} tasks",
                setting=setting,
                what=RETENTION,
                metric="average",
                unit="points",
                scale=100,
                before=sum(check.before for check in own) / len(own),
                now=sum(check.now for check in own) / len(own),
                limit=limits.margin,
                test=test,
                worst=place if worst.test.drop > 0 else None,
                shots=own[0].shots,
                fewshot_sampler=own[0].fewshot_sampler,
                cells=tuple(cell for check in own for cell in check.cells),
            )
        )
    return found


def _fidelity_checks(pair: Pair, limits: Limits) -> list[Check]:
    if pair.now.spec["strategy"] == "full":
        return []  # the distance of full from itself
    clusters = pair.before.cluster_labels()
    found = []

    def add(name: str, what: str, limit: float, before: float | None, test: DropTest, now: float) -> None:
        unit, scale = ("nats", 1) if name == KL else ("points", 100)
        found.append(
            Check(
                label=pair.now.label,
                task=pair.now.task_label,
                setting=pair.now.setting,
                what=what,
                metric=name,
                unit=unit,
                scale=scale,
                before=before,
                now=now,
                limit=limit,
                test=test,
                shots=pair.now.spec["shots"],
                fewshot_sampler=pair.now.fewshot_sampler,
                cells=(pair.now.cell_id,),
            )
        )

    if limits.max_kl is not None:
        kl = _measured(pair.now, KL, "results")
        test = mean_test(kl, limits.max_kl, clusters, limits.confidence)
        add(KL, "kl against full", limits.max_kl, None, test, float(kl.mean()))
    if limits.min_agreement is not None:
        missed = 1 - _measured(pair.now, AGREEMENT, "results")
        test = mean_test(missed, 1 - limits.min_agreement, clusters, limits.confidence)
        add(AGREEMENT, "disagreement with full", 1 - limits.min_agreement, None, test, float(missed.mean()))
    for name, margin, sign in ((KL, limits.kl_margin, -1), (AGREEMENT, limits.agreement_margin, 1)):
        if margin is None:
            continue
        now, before = _measured(pair.now, name, "results"), _measured(pair.before, name, "baseline")
        if is_unchanged(pair, limits.noise) and numpy.allclose(now, before, rtol=0, atol=limits.noise):
            test = unchanged_test(len(now))
        else:
            test = drop_test(sign * before, sign * now, clusters, margin, limits.confidence, shares=False)
        what = "rise of kl" if name == KL else "drop of agreement"
        add(name, what, margin, float(before.mean()), test, float(now.mean()))
    return found


def _measured(one: Snapshot, name: str, where: str) -> numpy.ndarray:
    if name not in one.fidelity:
        raise KvaccError(
            f"{one.label}: the {where} have no {name} per item, so no limit of it can be checked; run "
            "them with --set fidelity=true, or leave the limit out"
        )
    return one.fidelity[name].numbers()


def _worst_depth(pair: Pair) -> str | None:
    """``depth 50 %: 12 of 16 items lost``, of the depth with the largest drop; None without a loss."""
    if pair.now.depths is None:
        return None
    depths = pair.now.depths.numbers()
    drops = pair.before.values.numbers() - pair.now.values.numbers()
    by_depth = {depth: drops[depths == depth] for depth in sorted(set(depths.tolist())) if depth >= 0}
    if not by_depth:
        return None
    worst = max(by_depth, key=lambda depth: by_depth[depth].mean())
    there = by_depth[worst]
    if there.mean() <= 0:
        return None
    return f"depth {100 * worst:.0f} %: {int((there > 0).sum())} of {len(there)} items lost"


def require(limits: Limits) -> None:
    """Raise KvaccError for a limit that is out of range."""
    checks: list[tuple[str, Any, Callable[[float], bool], str]] = [
        ("margin", limits.margin, lambda x: 0 < x < 1, "above 0 and below 1 (that is 100 points)"),
        ("confidence", limits.confidence, lambda x: 0.5 < x < 1, "between 0.5 and 1, such as 0.95"),
        ("max_kl", limits.max_kl, lambda x: x > 0, "above 0"),
        ("min_agreement", limits.min_agreement, lambda x: 0 < x < 1, "between 0 and 1"),
        ("kl_margin", limits.kl_margin, lambda x: x > 0, "above 0"),
        ("agreement_margin", limits.agreement_margin, lambda x: 0 < x < 1, "between 0 and 1"),
        ("noise", limits.noise, lambda x: x >= 0, "0 or more"),
    ]
    for name, value, allowed, words in checks:
        if value is not None and not allowed(value):
            raise KvaccError(f"{name} {value} is out of range; give one {words}")
