"""Which cell of the results answers which cell of the baseline, or why none can.

Two cells are compared only when they answered the same prompts of the same task version on
the same model. Whatever keeps a cell from being compared is an error, all of them listed:
a gate that leaves out what it cannot compare passes when it should not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvacc.errors import KvaccError, nearest
from kvacc.gate.baseline import Baseline, key_of
from kvacc.gate.snapshot import Snapshot


@dataclass(frozen=True)
class Pair:
    """A cell of the baseline and the one that answers it now."""

    before: Snapshot
    now: Snapshot


@dataclass(frozen=True)
class Matches:
    """What is compared, and what a reader should know about it."""

    pairs: list[Pair]
    new: list[str]
    """Labels of cells that the baseline does not know (only where they are allowed)."""
    notes: list[str]


def match(
    baseline: Baseline,
    results: Sequence[Snapshot],
    *,
    compare_as: Mapping[str, str] | None = None,
    allow_new: bool = False,
) -> Matches:
    """Pair the results with the baseline's cells.

    Args:
        baseline: from :func:`kvacc.gate.baseline.read_baseline`.
        results: snapshots of the new cells.
        compare_as: strategies that stand in for others: ``{"mine": "h2o"}`` compares the cells
            of ``mine`` with the baseline's of ``h2o``, budget by budget. Results of ``h2o``
            itself are then left out, with a note.
        allow_new: cells that the baseline does not know are named, not refused.

    Raises:
        KvaccError: with a line for each cell that is missing, unknown, there twice, or of
            another seed, limit, task version, data, model or prompt.
    """
    renamed = dict(compare_as or {})
    _refuse_unknown_names(renamed, baseline, results)
    replaced = set(renamed.values())
    notes = [f"{new} stands in for {old}" for new, old in sorted(renamed.items())]
    faults: list[str] = []
    current: dict[str, Snapshot] = {}
    for one in results:
        name = one.spec["strategy"]
        if name in replaced:
            notes.append(f"left out: {one.label}, for which another stands in")
            continue
        key = key_of(one, renamed.get(name), with_options=name not in renamed)
        other = current.setdefault(key, one)
        if other is not one:
            faults.append(f"{one.label} is in the results twice ({_twins(other, one)}); keep one")
    known: dict[str, Snapshot] = {}
    for one in baseline.cells:
        name = one.spec["strategy"]
        if name in renamed:
            notes.append(f"left out: {one.label} of the baseline, whose strategy stands in for another")
            continue
        other = known.setdefault(key_of(one, with_options=name not in replaced), one)
        if other is not one:
            faults.append(
                f"{one.label}: the baseline has it with several options, so none can stand in for it"
            )
    pairs = []
    for key, before in known.items():
        now = current.get(key)
        if now is None:
            faults.append(
                f"{before.label} is missing from the results; run it, or drop it with: "
                "kvacc baseline update RUNS --remove-missing"
            )
        elif fault := _fault(before, now):
            faults.append(f"{now.label}: {fault}")
        else:
            pairs.append(Pair(before, now))
    new = sorted(current[key].label for key in current.keys() - known.keys())
    if not allow_new:
        faults += [
            f"{label} is not in the baseline; add it with: kvacc baseline update RUNS, or give --allow-new"
            for label in new
        ]
    if len(faults) == 1:
        raise KvaccError(faults[0])
    if faults:
        raise KvaccError("\n".join([f"{len(faults)} cells cannot be compared:", *faults]))
    return Matches(pairs, new, [*notes, *_environment_notes(pairs)])


def _refuse_unknown_names(renamed: dict[str, str], baseline: Baseline, results: Sequence[Snapshot]) -> None:
    ours = {one.spec["strategy"] for one in results}
    theirs = {one.spec["strategy"] for one in baseline.cells}
    for new, old in renamed.items():
        for name, names, where in ((new, ours, "results have"), (old, theirs, "baseline has")):
            if name not in names:
                raise KvaccError(
                    f"--compare-as {new}={old}: the {where} no strategy {name!r}{nearest(name, names)}; "
                    f"known: {', '.join(sorted(names))}"
                )
    if len(set(renamed.values())) < len(renamed):
        raise KvaccError("--compare-as: two strategies stand in for the same one; give one of them")


def _fault(before: Snapshot, now: Snapshot) -> str | None:
    """Why the two cannot be compared item by item; None when they can."""
    for name, word in (("seed", "seed"), ("limit", "limit"), ("tail_tokens", "tail_tokens")):
        if before.spec[name] != now.spec[name]:
            return f"{word} {now.spec[name]} here, {before.spec[name]} in the baseline; run with the same"
    if before.task["version"] != now.task["version"]:
        return (
            f"task version {now.task['version']} here, {before.task['version']} in the baseline; "
            "make a new baseline for it"
        )
    if before.task["primary_metric"] != now.task["primary_metric"]:
        return (
            f"metric {now.task['primary_metric']} here, {before.task['primary_metric']} in the baseline; "
            "make a new baseline for it"
        )
    if before.model != now.model:
        names = sorted({*before.model, *now.model})
        differ = [name for name in names if before.model.get(name) != now.model.get(name)]
        return f"another model than the baseline's ({', '.join(differ)} differ); run with the same model"
    if before.task["data_fingerprint"] != now.task["data_fingerprint"]:
        return "the task's documents are not the baseline's; run with the same data, or make a new baseline"
    if before.prompts != now.prompts:
        pairs = zip(before.prompt_hashes(), now.prompt_hashes(), strict=False)
        first = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
        where = f"first at item {first}" if first is not None else f"{now.items} here, {before.items} there"
        return f"the prompts are not the baseline's ({where}); make a new baseline for it"
    return None


def _twins(one: Snapshot, other: Snapshot) -> str:
    for name in ("limit", "seed", "tail_tokens"):
        if one.spec[name] != other.spec[name]:
            return f"{name} {one.spec[name]} and {other.spec[name]}"
    return f"cells {one.cell_id} and {other.cell_id}"


def _environment_notes(pairs: Sequence[Pair]) -> list[str]:
    """Versions and hardware that differ from the baseline's: allowed, but told."""
    found: dict[str, None] = {}
    for pair in pairs:
        for name, value in pair.before.environment.items():
            now = pair.now.environment.get(name, "")
            if name == "device":  # "cpu, 2 threads": threads change the order of sums only
                value, now = value.partition(",")[0], now.partition(",")[0]
            if value != now:
                found[f"{name} {now} here, {value} in the baseline"] = None
    return list(found)
