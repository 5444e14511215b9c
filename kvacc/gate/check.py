"""``kvacc check`` without the command line: results, a baseline, a report.

report = check_results(["runs/check"], "baseline.json", Limits(margin=0.02))
print(sentence(report.checks[0]), report.exit_code)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvacc.errors import KvaccError
from kvacc.gate.baseline import read_baseline
from kvacc.gate.matching import match
from kvacc.gate.snapshot import snapshot
from kvacc.gate.verdicts import Limits, Report, judge
from kvacc.results import Cell, read_cells

if TYPE_CHECKING:
    from rich.console import Console

    from kvacc.sweep import LoadModel

Path_ = str | os.PathLike[str]
DEFAULT_FOLDER = Path("runs") / "check"


def check_results(
    results: Sequence[Path_ | Cell],
    baseline: Path_,
    limits: Limits | None = None,
    *,
    compare_as: Mapping[str, str] | None = None,
    allow_new: bool = False,
) -> Report:
    """Judge results that are there already.

    Args:
        results: folders of runs, or cells.
        baseline: a baseline file.
        limits: what is allowed; by default a point, at 95 % confidence.
        compare_as: see :func:`kvacc.gate.matching.match`.
        allow_new: cells that the baseline does not know are named, not refused.

    Raises:
        KvaccError: anything that keeps a cell from being compared.
    """
    known = read_baseline(baseline)
    cells = [one for one in results if isinstance(one, Cell)]
    folders = [one for one in results if not isinstance(one, Cell)]
    if folders or not cells:
        cells += read_cells([os.fspath(folder) for folder in folders])
    found = match(known, [snapshot(cell) for cell in cells], compare_as=compare_as, allow_new=allow_new)
    return judge(found.pairs, limits or Limits(), new=found.new, notes=found.notes)


def run_for_check(
    config: Path_,
    output: Path_ | None = None,
    *,
    resume: bool = False,
    overrides: Sequence[str] = (),
    include: Sequence[Path_] = (),
    console: Console | None = None,
    load_model: LoadModel | None = None,
) -> list[Path]:
    """Run a configuration afresh, and return the folder of its results, in a list.

    Cells of an earlier run are never taken for those of the code as it is now: without
    ``output`` a new folder is made (``runs/check``, ``runs/check-2``, ...), and an ``output``
    that holds a run is refused unless ``resume`` says that the code has not changed since.

    Raises:
        KvaccError: bad configuration, a folder in use, or a cell that failed.
    """
    from kvacc.config import load_config
    from kvacc.sweep import run_sweep

    checked = load_config(config, overrides, include)
    folder = Path(output) if output is not None else _unused(DEFAULT_FOLDER)
    if _holds_run(folder) and not resume:
        raise KvaccError(
            f"{folder} holds results already, perhaps of other code; judge them with --results {folder}, "
            "go on from them with --resume, or choose another --output"
        )
    report = run_sweep(checked, folder, console=console, load_model=load_model)
    if report.failed:
        label, reason = next(iter(report.failed.items()))
        more = f" (and {len(report.failed) - 1} more)" if len(report.failed) > 1 else ""
        raise KvaccError(f"a cell could not be computed, so it cannot be checked: {label}: {reason}{more}")
    # Cells of another configuration may lie in the folder too: only this one's are judged.
    return [folder / "cells" / cell_id for cell_id in dict.fromkeys([*report.computed, *report.skipped])]


def _holds_run(folder: Path) -> bool:
    return (folder / "run.json").exists() or any(folder.glob("cells/*/cell.json"))


def _unused(folder: Path) -> Path:
    number, candidate = 1, folder
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate
