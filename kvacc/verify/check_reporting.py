"""Invariant 10: what a strategy hid is reported as it was."""

from __future__ import annotations

import dataclasses

import torch

from kvacc.engine.scoring import score_by_steps, score_documents
from kvacc.verify.bench import Bench, Case, try_budget
from kvacc.verify.results import Result, Tally
from kvacc.verify.runs import Difference, Run

_SCORED = 4
_EXACT = 1e-9


def check_reporting(bench: Bench) -> Result:
    """10. ``hidden`` and the kept fraction are those of the scored queries, counted from what
    they read: False and 1.0 where nothing was hidden, on both paths."""
    tally = Tally(10, bench.subject.label)
    for case in [*bench.cases, *_ample(bench)]:
        request = case.text.request(scored=min(_SCORED, len(case.text)))
        paths = {"parallel path": score_documents(bench.subject.wrapped, [[request]], case.strategy)[0][0]}
        if bench.is_causal and (bench.subject.is_tiny or case.strategy is bench.main_case.strategy):
            paths["step path"] = score_by_steps(bench.subject.wrapped, [request], case.strategy)[0][0]
        kept, hidden = _counted(bench, case, len(request.targets))
        for name, score in paths.items():
            tally.cases += 1
            difference = None
            if score.hidden != hidden:
                difference = Difference("reported as hidden", None, str(hidden), str(score.hidden))
            elif abs(score.kept_fraction - kept) > _EXACT or (score.kept_fraction == 1.0) == hidden:
                difference = Difference(
                    "kept fraction reported", None, f"{kept:.6f}", f"{score.kept_fraction:.6f}"
                )
            if difference is not None:
                why = f"expected is counted from what the scored queries read, found is the {name}'s report"
                return tally.result(bench.failure(case, difference, why))
    return tally.result()


def _ample(bench: Bench) -> list[Case]:
    """The longer text under a budget that hides nothing."""
    if not bench.strategy.has_budget:
        return []
    strategies = [try_budget(bench.strategy, budget) for budget in (1.0, 10_000)]
    return [dataclasses.replace(bench.main_case, strategy=s) for s in strategies if s is not None]


def _counted(bench: Bench, case: Case, scored: int) -> tuple[float, bool]:
    """Kept fraction, and whether an entry was hidden, of the last ``scored`` queries."""
    run: Run = bench.parallel(case)
    kinds = bench.subject.wrapped.kinds_for(case.strategy)
    layers = sum(kind.name != "other" for kind in kinds)
    could = torch.arange(1, len(case.text) + 1, dtype=torch.float64)[-scored:]
    # Layers without a record read all that the model lets them, which counts as everything.
    kept = torch.full((scored,), float(layers - len(run.reads)), dtype=torch.float64)
    hidden = False
    for read in run.reads.values():
        visible = read.sum(-1)[:, -scored:]
        kept += (visible / could).mean(0)
        hidden = hidden or bool((visible < could).any())
    return float((kept / layers).mean()), hidden
