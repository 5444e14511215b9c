"""Which strategy to use: what satisfies a limit of accuracy, memory and time, with the evidence.

    advice = recommend(read_cells(["runs/paper"]), Limits(max_drop=0.02, memory=24 * 10**9),
                       probes=read_probes(["runs/probes"]))
    print(to_markdown(advice))

Accuracy comes from results (:mod:`kvacc.advice.accuracy`), memory and times from probes
(:mod:`kvacc.advice.cost`); :mod:`kvacc.advice.choose` judges, :mod:`kvacc.advice.output` words it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvacc.advice.accuracy import Candidate, Evidence, read_evidence
from kvacc.advice.choose import PREFERENCES, Advice, Check, Judged, Verdict, choose
from kvacc.advice.cost import Cost, Setting, Wanted, read_costs
from kvacc.advice.limits import Limits, require
from kvacc.advice.predict import predict_costs
from kvacc.advice.selection import Selection
from kvacc.errors import KvaccError, unknown
from kvacc.probes.records import ProbeRecord
from kvacc.results import Cell

__all__ = [
    "PREFERENCES", "Advice", "Candidate", "Check", "Cost", "Evidence", "Judged", "Limits", "Selection",
    "Setting", "Verdict", "Wanted", "recommend",
]  # fmt: skip


def recommend(
    cells: Sequence[Cell],
    limits: Limits,
    *,
    probes: Sequence[ProbeRecord] = (),
    selection: Selection | None = None,
    wanted: Wanted | None = None,
    prefer: str = "memory",
) -> Advice:
    """Judge every strategy of the results against the limits, and pick one.

    Args:
        cells: results, ``full`` among them.
        limits: what must be satisfied; at least a drop.
        probes: measurements of memory and time. Without any, a limit of memory is judged by what is
            computed for ``wanted``'s prompt; without such a limit, candidates are compared by what
            they kept.
        selection: which of the results.
        wanted: at which prompt length and batch memory and time are asked for.
        prefer: one of :data:`PREFERENCES`: what decides among candidates that nothing beats.

    Raises:
        KvaccError: bad input; limits that the results or probes cannot speak of.
    """
    require(limits)
    if prefer not in PREFERENCES:
        raise unknown("preference", prefer, PREFERENCES)
    wanted = wanted or Wanted()
    evidence = read_evidence(cells, limits, selection or Selection())
    everyone = [evidence.full, *evidence.candidates]
    excluded = list(evidence.excluded)
    if probes:
        setting, costs = read_costs(everyone, probes, wanted)
        missing = [one.name for one in evidence.candidates if one.name not in costs]
        excluded += [(name, "not probed in that setting") for name in missing]
    elif limits.of_resources or wanted.prompt_tokens is not None:
        _require_no_times(limits)
        setting, costs, why = predict_costs(everyone, wanted, evidence.protocol)
        excluded += sorted(why.items())
    else:
        setting, costs = None, {one.name: Cost() for one in everyone}
    return choose(evidence, limits, setting, costs, prefer, excluded, evidence.notes)


def _require_no_times(limits: Limits) -> None:
    for option, limit in (("latency", limits.latency), ("ttft", limits.time_to_first_token)):
        if limit is not None:
            raise KvaccError(
                f"--{option} needs measurements, which accuracy results do not hold; make some with: "
                "kvacc probe CONFIG, and name their folder with --probes"
            )
