"""Which rows a recommendation is about: one model, one protocol, and the tasks that can show a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvacc.errors import KvaccError, unknown
from kvacc.leaderboard_rows import AT_CHANCE, Row

_WAYS = ("shots_label", "limit", "seed", "metric", "task_version", "data_fingerprint")
"""In what two runs of one task can differ."""


@dataclass(frozen=True)
class Selection:
    """Which results a recommendation is about; an empty choice allows everything."""

    model: str | None = None
    dtype: str | None = None
    protocol: str | None = None
    tasks: tuple[str, ...] = ()
    shots: int | None = None


def select(rows: Sequence[Row], selection: Selection) -> list[Row]:
    """Rows of one model and protocol, ``full`` among them."""
    asked = (("model", selection.model), ("dtype", selection.dtype), ("shots", selection.shots))
    for name, wanted in asked:
        known = {getattr(row, name) for row in rows}
        if wanted is not None and wanted not in known:
            raise unknown(name, str(wanted), map(str, known))
        rows = [row for row in rows if wanted is None or getattr(row, name) == wanted]
    rows = _of_tasks(rows, selection.tasks)
    if len({row.model_id for row in rows}) > 1:
        names = sorted({f"{row.model} ({row.dtype})" for row in rows})
        raise KvaccError(
            f"the results are of several models, {', '.join(names)}; choose one with --model and --dtype"
        )
    protocols = {row.protocol for row in rows if not row.is_full}
    if not protocols:
        raise KvaccError("the results hold no strategy beside full; run some with: kvacc run CONFIG")
    if selection.protocol is not None and selection.protocol not in protocols:
        raise unknown("protocol", selection.protocol, protocols)
    if selection.protocol is None and len(protocols) > 1:
        raise KvaccError(
            f"the results are of several protocols, {', '.join(sorted(protocols))}, which never mix; choose "
            f"one with --protocol {min(protocols)}"
        )
    wanted = selection.protocol or next(iter(protocols))
    return [row for row in rows if row.is_full or row.protocol == wanted]


def _of_tasks(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    if not names:
        return list(rows)
    known = {row.task for row in rows} | {row.task_label for row in rows}
    for name in names:
        if name not in known:
            raise unknown("task", name, known)
    return [row for row in rows if row.task in names or row.task_label in names]


def telling_tasks(
    rows: Sequence[Row], named: bool
) -> tuple[dict[str, Row], list[tuple[str, str]], list[str]]:
    """The ``full`` row of each task that can show a loss; what is left out, with the reason; notes."""
    own = {row.task_label for row in rows if not row.is_full}
    full: dict[str, Row] = {}
    for row in rows:
        if not row.is_full or row.task_label not in own:
            continue
        other = full.setdefault(row.task_label, row)
        if other.group != row.group:
            raise KvaccError(f"full was run in several ways on {row.task_label}: {_ways(other, row)}")
    excluded = [(f"task {label}", "full was not run on it") for label in sorted(own - full.keys())]
    notes = []
    smoke = [label for label, row in full.items() if row.kind == "smoke"]
    if smoke and not named and len(smoke) < len(full):
        excluded += [(f"task {label}", "a smoke test (name it with --task to use it)") for label in smoke]
        full = {label: row for label, row in full.items() if label not in smoke}
    elif smoke:
        notes.append(f"smoke tests, which say little about benchmarks: {', '.join(smoke)}")
    for label, row in list(full.items()):
        if row.unit != "points":
            why = f"{row.metric} is not a share, so a drop in points means nothing"
            excluded.append((f"task {label}", why))
            del full[label]
        elif AT_CHANCE in row.notes:
            level = f"{100 * row.score:.1f} against {100 * row.chance:.1f} by chance"
            excluded.append((f"task {label}", f"full is at chance ({level}), so no loss can show"))
            del full[label]
    if not full:
        reasons = "; ".join(f"{name}: {why}" for name, why in excluded) or "full was not run"
        raise KvaccError(f"no task can show a loss ({reasons}); run tasks that full answers above chance")
    return full, excluded, notes


def _ways(one: Row, other: Row) -> str:
    """In what two runs of a task differ, and the mend."""
    for name in _WAYS:
        values = [getattr(row, name) for row in (one, other)]
        if values[0] != values[1]:
            word = name.removesuffix("_label").replace("_", " ")
            mend = f"--shots {one.shots}" if one.shots != other.shots else "folders that hold one of them"
            return f"{word} {values[0]} and {values[1]}; choose with {mend}"
    return "name folders that hold one of them"
