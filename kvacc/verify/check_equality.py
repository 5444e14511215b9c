"""Invariants 1 and 3: a budget of everything is the full cache; both paths say the same."""

from __future__ import annotations

from dataclasses import replace

from kvacc.verify.bench import Bench, Case, try_budget
from kvacc.verify.results import Failure, Result, Tally
from kvacc.verify.runs import PATHS_AGREE, Run, first_difference

SAME_LOGITS = 1e-4
"""Two paths to the full cache, in float32."""

_NON_CAUSAL = "it reads later tokens (causal is False), so there is no step path"


def check_full_budget(bench: Bench) -> Result:
    """1. Under a budget of everything nothing is hidden, and the logits are the full cache's,
    which are the model's own."""
    tally = Tally(1, bench.subject.label)
    for case in _everything(bench):
        expected = Run(bench.own(case.text), {})
        paths = {"parallel path": bench.parallel}
        # Each step costs a forward pass: one protocol shows the step path's arithmetic.
        if bench.is_causal and case.protocol == bench.main_case.protocol:
            paths["step path"] = bench.step
        for name, path in paths.items():
            found = path(case)
            tally.cases += 1
            difference = first_difference(expected, found, bench.tolerance(case.text, SAME_LOGITS))
            if difference is not None:
                why = f"expected is the full cache, found is the {name} under a budget of everything"
                return tally.result(bench.failure(case, difference, why))
    return tally.result()


def _everything(bench: Bench) -> list[Case]:
    """The cases under budgets that hide nothing."""
    found = []
    for case in {(len(c.text), c.protocol): c for c in bench.cases}.values():
        if not bench.strategy.has_budget:
            found.append(case)
            continue
        for budget in (1.0, len(case.text), 10_000):
            strategy = try_budget(bench.strategy, budget)
            if strategy is not None:
                found.append(replace(case, strategy=strategy))
    return found


def check_paths(bench: Bench) -> Result:
    """3. The parallel path reads the same entries and gives the same logits as the step path,
    one token at a time or a prompt in chunks."""
    tally = Tally(3, bench.subject.label)
    if not bench.is_causal:
        tally.reasons.append(_NON_CAUSAL)
        return tally.result()
    for case in bench.cases:
        expected = bench.step(case)
        failure = _compare(bench, tally, case, expected, bench.parallel(case), "parallel path")
        if failure is not None:
            return tally.result(failure)
        for chunk in _chunks(bench, case):
            found = bench.step(case, chunk)
            name = f"step path in chunks of {chunk} tokens"
            failure = _compare(bench, tally, case, expected, found, name)
            if failure is not None:
                return tally.result(failure)
    return tally.result()


def _chunks(bench: Bench, case: Case) -> tuple[int, ...]:
    count = len(case.text)
    if count == bench.tokens and case.strategy is not bench.main_case.strategy:
        return ()
    return (3, count) if bench.thorough else (count,)


def _compare(bench: Bench, tally: Tally, case: Case, expected: Run, found: Run, name: str) -> Failure | None:
    difference = first_difference(expected, found, bench.tolerance(case.text, PATHS_AGREE))
    if difference is None:
        tally.cases += 1
        return None
    if bench.rounding_first(case, expected, found):
        tally.undecided += 1
        return None
    if not bench.repeats(case):
        tally.reasons.append("two runs of the same text differ, so paths cannot be compared (see 6)")
        return None
    tally.cases += 1
    why = f"expected is the step path, one token at a time, found is the {name}"
    return bench.failure(case, difference, why)
