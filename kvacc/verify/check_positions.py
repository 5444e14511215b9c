"""Invariant 7: a query's position is the number of tokens seen, not of entries kept."""

from __future__ import annotations

from kvacc.errors import KvaccError
from kvacc.verify.bench import Bench, Case, is_select
from kvacc.verify.results import Failure, Result, Tally
from kvacc.verify.runs import PATHS_AGREE, Run, logits_difference
from kvacc.verify.subjects import own_logits


def check_positions(bench: Bench) -> Result:
    """7. The model's own attention over the whole text, at its own positions, under a mask made
    of what was read, gives the same logits; on the step path also when the model counts the
    positions by the cache's length, as ``generate`` does.

    A strategy that rotates to cache positions is compared with the entries that it reads
    moved to 0, 1, 2, ... one query at a time.
    """
    tally = Tally(7, bench.subject.label)
    if is_select(bench.strategy) and bench.strategy.needs_rotation:
        tally.reasons.append("it reads some entries at other distances by definition")
        return tally.result()
    for case in bench.cases:
        paths = {"parallel path": bench.parallel}
        if bench.is_causal:
            paths["step path"] = bench.step
            if case.strategy is bench.main_case.strategy or len(case.text) < bench.tokens:
                paths["step path, positions from the cache"] = _by_the_cache(bench)
        for name, path in paths.items():
            try:
                failure = _compare(bench, tally, case, path(case), name)
            except KvaccError as error:
                tally.reasons.append(str(error))
                continue
            if failure is not None:
                return tally.result(failure)
    return tally.result()


def _by_the_cache(bench: Bench):
    return lambda case: bench.step_again(case, own_positions=True)


def _compare(bench: Bench, tally: Tally, case: Case, run: Run, name: str) -> Failure | None:
    rotation = None
    if getattr(case.strategy, "rotates_to_cache_positions", False):
        rotation = bench.subject.wrapped.rotation_for(case.strategy)
    expected = own_logits(bench.subject, case.text.tokens, run.reads, rotation)
    difference = logits_difference(expected, run.logits, bench.tolerance(case.text, PATHS_AGREE))
    if difference is not None and bench.logits_are_rounding(case, expected, run.logits):
        tally.undecided += 1
        return None
    tally.cases += 1
    if difference is None:
        return None
    why = f"expected is the model's own attention over what was read, found is the {name}"
    return bench.failure(case, difference, why)
