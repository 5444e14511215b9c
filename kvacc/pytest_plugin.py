"""The fixture ``kvacc_check``, for teams who keep the gate among their tests.

    def test_h2o_still_holds(kvacc_check):
        kvacc_check("baselines/smollm2.json", config="configs/ci.yaml", margin=2)

pytest finds it through the entry point ``pytest11``. Nothing but pytest is imported until the
fixture is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvacc.gate.verdicts import Report

Path_ = str | os.PathLike[str]


@pytest.fixture
def kvacc_check(tmp_path) -> Callable[..., Report]:
    """A function that runs the gate, and fails the test where ``kvacc check`` would.

    Its arguments are those of the command: the baseline file, ``results`` (one folder or
    several) or ``config`` (run afresh, in a temporary folder), ``margin`` and
    ``agreement_margin`` in points, ``confidence``, ``compare_as``, ``allow_new``, ``include``,
    ``set`` (overrides), and the limits of :class:`kvacc.gate.verdicts.Limits`. Where there are
    too few items to tell the test fails too, or is skipped with ``inconclusive="skip"``, or
    passes with ``"pass"``. It returns the report. What cannot be compared raises KvaccError.
    """

    def check(
        baseline: Path_,
        results: Path_ | Sequence[Path_] | None = None,
        *,
        config: Path_ | None = None,
        margin: float = 1.0,
        inconclusive: str = "fail",
        compare_as: Mapping[str, str] | None = None,
        allow_new: bool = False,
        include: Sequence[Path_] = (),
        set: Sequence[str] = (),
        agreement_margin: float | None = None,
        **limits: float,
    ) -> Report:
        from kvacc.errors import KvaccError, unknown
        from kvacc.gate import outputs
        from kvacc.gate.check import check_results, run_for_check
        from kvacc.gate.verdicts import Limits, Verdict

        if inconclusive not in ("fail", "skip", "pass"):
            raise unknown("inconclusive", inconclusive, ("fail", "skip", "pass"))
        if (config is None) == (results is None):
            raise KvaccError("kvacc_check: give either results or config")
        agreement = None if agreement_margin is None else agreement_margin / 100
        allowed = Limits(margin=margin / 100, agreement_margin=agreement, **limits)
        if config is not None:
            folders = run_for_check(config, tmp_path / "kvacc-check", overrides=set, include=include)
        else:
            folders = [results] if isinstance(results, (str, os.PathLike)) else list(results)
        report = check_results(folders, baseline, allowed, compare_as=compare_as, allow_new=allow_new)
        found = [check for check in report.checks if check.verdict is not Verdict.PASS]
        text = "\n".join([outputs.headline(report), *map(outputs.sentence, found)])
        if report.verdict is Verdict.FAIL or (report.verdict is Verdict.TOO_FEW and inconclusive == "fail"):
            pytest.fail(text, pytrace=False)
        if report.verdict is Verdict.TOO_FEW and inconclusive == "skip":
            pytest.skip(text)
        return report

    return check
