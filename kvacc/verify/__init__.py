"""Is a strategy implemented correctly? DESIGN's ten invariants, for any strategy.

:func:`verify_strategy` runs every check on every model and reports what holds; the same
checks back the test suite. Each is a function from a :class:`~kvacc.verify.bench.Bench`
(a strategy on a model) to a :class:`~kvacc.verify.results.Result`.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import kvacc
from kvacc.errors import KvaccError
from kvacc.strategy import Strategy
from kvacc.verify.bench import DEFAULT_TOKENS, SHORT, Bench
from kvacc.verify.check_batches import check_batches, check_leaks
from kvacc.verify.check_budget import check_budget, check_heads
from kvacc.verify.check_causality import check_causality
from kvacc.verify.check_equality import check_full_budget, check_paths
from kvacc.verify.check_positions import check_positions
from kvacc.verify.check_reporting import check_reporting
from kvacc.verify.check_scores import check_scores
from kvacc.verify.results import INVARIANTS, Failure, Report, Result, Tally, merged
from kvacc.verify.subjects import Subject, layers_for, loaded_subject, tiny_subject, tiny_subjects

CHECKS: dict[int, Callable[[Bench], Result]] = {
    1: check_full_budget,
    2: check_causality,
    3: check_paths,
    4: check_budget,
    5: check_batches,
    6: check_leaks,
    7: check_positions,
    8: check_heads,
    9: check_scores,
    10: check_reporting,
}
"""Invariant number -> its check."""

__all__ = [
    "CHECKS",
    "INVARIANTS",
    "Bench",
    "Failure",
    "Report",
    "Result",
    "Subject",
    "loaded_subject",
    "tiny_subject",
    "tiny_subjects",
    "verify_strategy",
]


def verify_strategy(
    strategy: Strategy,
    subjects: Sequence[Subject] | None = None,
    budgets: Sequence[Any] | None = None,
    tokens: int = DEFAULT_TOKENS,
    thorough: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Check ``strategy`` against the ten invariants.

    Args:
        strategy: with its options; its own budget is used only where ``budgets`` are.
        subjects: models to check on; by default the tiny ones.
        budgets: tight budgets to try, in place of the usual ones.
        tokens: length of the longer text.
        thorough: try every budget and length on the first model, if it is a tiny one.
        progress: told what is being checked.

    Raises:
        KvaccError: it refuses a budget, or runs on none of the models.
    """
    begin = time.perf_counter()
    found: dict[int, list[Result]] = {number: [] for number in CHECKS}
    refused: dict[str, str] = {}
    acted = False
    subjects = tiny_subjects(layers_for(strategy)) if subjects is None else list(subjects)
    for subject in subjects:
        # One tiny model shows what depends on budgets and lengths; the others, structure.
        everything = thorough and subject.is_tiny and subject is subjects[0]
        bench = Bench(subject, strategy, budgets, tokens, everything)
        try:
            bench.parallel(bench.main_case)
        except KvaccError as error:
            refused[subject.label] = str(error)
            continue
        except Exception:
            pass  # what it raises is said by each check that meets it
        for number, check in CHECKS.items():
            if progress is not None:
                progress(f"{subject.label}: {number}. {INVARIANTS[number]}")
            found[number].append(_smallest(check, bench, number, budgets))
        acted = acted or _acted(bench)
    if len(refused) == len(subjects):
        raise KvaccError(next(iter(refused.values())))
    return Report(
        strategy=_described(strategy),
        results=tuple(merged(results) for results in found.values()),
        models=tuple(subject.label for subject in subjects if subject.label not in refused),
        refused=tuple(f"{label}: {reason}" for label, reason in refused.items()),
        acted=acted,
        seconds=time.perf_counter() - begin,
    )


def _smallest(
    check: Callable[[Bench], Result], bench: Bench, number: int, budgets: Sequence[Any] | None
) -> Result:
    """The check's result; where it fails on a longer text only, it is tried on a short one."""
    result = _guarded(check, bench, number)
    if result.failure is None or bench.thorough or bench.tokens <= SHORT:
        return result
    short = _guarded(check, Bench(bench.subject, bench.strategy, budgets, SHORT, thorough=False), number)
    return result if short.failure is None else replace(result, failure=short.failure)


def _guarded(check: Callable[[Bench], Result], bench: Bench, number: int) -> Result:
    """The check's result; an exception that the strategy raises is a failure too."""
    try:
        return check(bench)
    except Exception as error:
        case = bench.main_case
        what = " ".join(str(error).split()) or "no message"
        failure = Failure(
            what="an exception",
            model=bench.subject.label,
            protocol=case.protocol,
            budget=case.budget,
            tokens=len(case.text),
            expected="none",
            found=f"{type(error).__name__}: {what}",
            why=f"raised at {_place(error)}",
        )
        return Tally(number, bench.subject.label).result(failure)


def _place(error: BaseException) -> str:
    """The innermost line outside the installed libraries: the strategy's, if it is to blame."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = Path(kvacc.__file__).parent
    outside = [f for f in frames if f.filename.endswith(".py") and "site-packages" not in f.filename]
    users = [f for f in outside if ours not in Path(f.filename).parents]
    frame = (users or outside or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _described(strategy: Strategy) -> str:
    """``h2o recent_fraction=0.5``: the budget is not its own here."""
    return " ".join([strategy.name, *(f"{name}={value}" for name, value in strategy.options().items())])


def _acted(bench: Bench) -> bool:
    """Was an entry hidden in some case? A strategy that cannot run has not been idle."""
    try:
        return any(bench.parallel(case).hides for case in bench.cases)
    except Exception:
        return True
