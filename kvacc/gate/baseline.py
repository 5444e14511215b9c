"""The baseline file: snapshots of cells, why they are as they are, and a checksum.

It is made by ``kvacc baseline create``, committed with the code that it guards, and changed
only by ``kvacc baseline update``, which asks for a reason and keeps it. It holds no clock, no
path and no name of a machine, so the same results give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import kvacc
from kvacc.errors import KvaccError
from kvacc.files import write_whole
from kvacc.gate.snapshot import Snapshot, snapshot
from kvacc.results import Cell

SCHEMA_VERSION = 1


class HistoryEntry(BaseModel):
    """One making or changing of the baseline."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reason: str = Field(min_length=1, description="Why, in the words of whoever did it.")
    kvacc: str = Field(description="Version of kvacc.")
    changes: list[str] = Field(description="What changed, a line per cell.")


class Baseline(BaseModel):
    """The content of a baseline file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = Field(default=SCHEMA_VERSION, description="Version of this layout.")
    history: list[HistoryEntry] = Field(min_length=1, description="Oldest first.")
    cells: list[Snapshot] = Field(min_length=1, description="Sorted by label.")


def make_baseline(cells: Sequence[Cell], reason: str) -> Baseline:
    """A new baseline of all the cells.

    Raises:
        KvaccError: no reason, damaged samples, a metric that has no value per item, or two
            cells that answer the same question.
    """
    snapshots = _sorted([snapshot(cell) for cell in cells])
    _refuse_twins(snapshots)
    entry = _entry(reason, [f"new: {one.label}: {_score(one)}" for one in snapshots])
    return Baseline(history=[entry], cells=snapshots)


def update_baseline(
    baseline: Baseline, cells: Sequence[Cell], reason: str, *, remove_missing: bool = False
) -> tuple[Baseline, list[str]]:
    """The baseline with the cells put in place of those that they answer.

    Args:
        baseline: as it was.
        cells: new results.
        reason: why, kept in the file.
        remove_missing: drop the cells that the results lack.

    Returns:
        The new baseline, and a line for each cell that changed (empty: nothing did).
    """
    fresh = {key_of(one): one for one in _distinct([snapshot(cell) for cell in cells])}
    known = {key_of(one): one for one in baseline.cells}
    lines = []
    for one in _sorted(list(fresh.values())):
        line = _change(known.get(key_of(one)), one)
        lines += [line] if line else []
    kept = {} if remove_missing else known
    if remove_missing:
        gone = _sorted([known[key] for key in known.keys() - fresh.keys()])
        lines += [f"removed: {one.label}" for one in gone]
    if not lines:
        return baseline, []
    entry = _entry(reason, lines)
    merged = _sorted(list({**kept, **fresh}.values()))
    return Baseline(history=[*baseline.history, entry], cells=merged), lines


def key_of(one: Snapshot, stands_for: str | None = None, *, with_options: bool = True) -> str:
    """What a cell asked, as text, apart from what must be equal and is therefore checked (seed, data).

    Args:
        one: the cell.
        stands_for: the strategy that it counts as, by default its own.
        with_options: False where another strategy's options are to be compared with its own.
    """
    spec = one.spec
    name = stands_for or spec["strategy"]
    # A gate is for strategies whose file has been edited.
    options = {key: value for key, value in spec["options"].items() if key != "file_sha256"}
    asked = {
        "model": {key: value for key, value in spec["model"].items() if value is not None},
        "strategy": name,
        "options": options if with_options else {},
        "budget": spec["budget"],
        "budget_of": spec["budget_of"],
        "protocol": None if name == "full" else spec["protocol"],
        "task": spec["task"],
        "task_options": spec.get("task_options") or {},
        "shots": spec["shots"],
        "fewshot_sampler": one.fewshot_sampler,
    }
    return json.dumps(asked, sort_keys=True, default=str)


def write_baseline(path: str | Path, baseline: Baseline) -> None:
    """Write the file in one step.

    Raises:
        KvaccError: it cannot be written.
    """
    path = Path(path)
    content = baseline.model_dump(mode="json")
    text = json.dumps({**content, "sha256": _checksum(content)}, indent=1, ensure_ascii=False) + "\n"
    write_whole(path, text)


def read_baseline(path: str | Path) -> Baseline:
    """The checked content of a baseline file.

    Raises:
        KvaccError: it is missing, truncated, edited by hand, or from a newer kvacc.
    """
    path = Path(path)
    mend = "restore it from version control, or make it anew with: kvacc baseline create"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise KvaccError(
            f"baseline {path} does not exist; make it with: kvacc baseline create RUNS --output {path} "
            '--reason "first baseline"'
        ) from None
    except OSError as error:
        raise KvaccError(f"baseline {path} cannot be read: {error.strerror}; name a file") from None
    except ValueError as error:
        raise KvaccError(
            f"baseline {path} is truncated or not JSON ({' '.join(str(error).split())}); {mend}"
        ) from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise KvaccError(f"baseline {path} is no baseline file (schema_version {version!r}); {mend}")
    if version > SCHEMA_VERSION:
        raise KvaccError(
            f"baseline {path}: schema_version {version} is newer than {SCHEMA_VERSION}, which this kvacc "
            "reads; update kvacc"
        )
    stored = content.pop("sha256", None)
    if stored != _checksum(content):
        raise KvaccError(f"baseline {path} was edited by hand (its checksum differs); {mend}")
    try:
        return Baseline.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        what = " ".join(first["msg"].removeprefix("Value error, ").split())
        raise KvaccError(f"baseline {path}: {field}: {what}; {mend}") from None


def _checksum(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _entry(reason: str, changes: list[str]) -> HistoryEntry:
    reason = " ".join(reason.split())
    if not reason:
        raise KvaccError("a baseline needs a reason, which is kept in it: --reason 'h2o keeps its sinks now'")
    return HistoryEntry(reason=reason, kvacc=kvacc.__version__, changes=changes)


def _sorted(snapshots: list[Snapshot]) -> list[Snapshot]:
    return sorted(snapshots, key=lambda one: (one.label, one.cell_id))


def _distinct(snapshots: list[Snapshot]) -> list[Snapshot]:
    _refuse_twins(snapshots)
    return snapshots


def _refuse_twins(snapshots: list[Snapshot]) -> None:
    seen: dict[str, Snapshot] = {}
    for one in snapshots:
        other = seen.setdefault(key_of(one), one)
        if other is not one:
            names = ("limit", "seed", "tail_tokens")
            differ = [name for name in names if one.spec.get(name) != other.spec.get(name)]
            what = (
                f" ({', '.join(f'{n} {other.spec[n]} and {one.spec[n]}' for n in differ)})" if differ else ""
            )
            raise KvaccError(
                f"{one.label} is there twice{what}, as cells {other.cell_id} and {one.cell_id}; keep one"
            )


def _change(old: Snapshot | None, new: Snapshot) -> str | None:
    """What a new snapshot changes, or None when it is the old one."""
    if old is None:
        return f"new: {new.label}: {_score(new)}"
    freely = {"cell_id", "environment"}
    if old.model_dump(exclude=freely) == new.model_dump(exclude=freely):
        return None
    asked = [
        f"{name} {old.spec.get(name)} -> {new.spec.get(name)}"
        for name in ("limit", "seed", "tail_tokens")
        if old.spec.get(name) != new.spec.get(name)
    ]
    for name in ("version", "data_fingerprint", "primary_metric"):
        if old.task[name] != new.task[name]:
            asked.append(f"task {name} {str(old.task[name])[:12]} -> {str(new.task[name])[:12]}")
    if old.model != new.model:
        asked.append("another model")
    if old.prompts != new.prompts:
        asked.append("other prompts")
    if not asked:
        before, after = old.values.numbers(), new.values.numbers()
        lost, gained = int((after < before).sum()), int((after > before).sum())
        asked.append(f"{lost} items lost, {gained} gained")
        if not lost and not gained and old.loglikelihoods != new.loglikelihoods:
            asked.append("log-likelihoods moved")
    return f"changed: {new.label}: {_score(old)} -> {_score(new)} ({', '.join(asked)})"


def _score(one: Snapshot) -> str:
    return f"{one.task['primary_metric']} {100 * one.score:.1f} on {one.items} items"
