"""A gate's report as people and machines read it: sentences, Markdown, JUnit XML, JSON, annotations.

The same report gives the same bytes: nothing here knows the time or the machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from kvacc.errors import KvaccError
from kvacc.files import write_whole
from kvacc.gate.verdicts import Check, Report, Verdict
from kvacc.shots import shots_text

_WORDS = {Verdict.PASS: "passed", Verdict.FAIL: "FAILED", Verdict.TOO_FEW: "too few items to tell"}
# Control characters are not allowed in XML 1.0, not even escaped.
_NOT_XML = {code: None for code in range(32) if code not in (9, 10, 13)}


def headline(report: Report) -> str:
    """One line for the whole gate."""
    counts = {verdict: sum(check.verdict is verdict for check in report.checks) for verdict in Verdict}
    parts = [f"{counts[verdict]} {_WORDS[verdict]}" for verdict in Verdict if counts[verdict]]
    limits = report.limits
    rule = f"margin {100 * limits.margin:g} points, {100 * limits.confidence:g} % confidence"
    return f"kvacc check {_WORDS[report.verdict]}: {', '.join(parts)} ({rule})"


def sentence(check: Check) -> str:
    """What was found, in one line that names the task and where most was lost."""
    test, name = check.test, f"{check.label}: {check.metric}"
    if check.unchanged:
        return f"{name} {_amount(check, check.now)}, unchanged"
    bound = _bound(check)
    limit = _amount(check, check.limit)
    if check.before is None:
        head = f"{check.label}: {check.what} {_amount(check, check.now)}{bound}"
        words = {Verdict.FAIL: "above", Verdict.PASS: "within", Verdict.TOO_FEW: "not shown to be within"}
        return f"{head}, {words[check.verdict]} the limit of {limit} {check.unit}{_needed(check)}"
    change = f"{_amount(check, check.before)} -> {_amount(check, check.now)}"
    drop = f"{'rise' if check.what == 'rise of kl' else 'drop'} {_amount(check, test.drop, sign=True)}"
    flips = "" if check.lost is None else f", {check.lost} items lost, {check.gained} gained of {test.items}"
    worst = f"; most at {check.worst}" if check.worst else ""
    words = {
        Verdict.FAIL: f"beyond the margin of {limit} {check.unit} (p = {check.adjusted_p:.2g} after Holm)",
        Verdict.PASS: f"within the margin of {limit} {check.unit}",
        Verdict.TOO_FEW: f"too few items to tell at a margin of {limit} {check.unit}{_needed(check)}",
    }
    return f"{name} {change}, {drop}{bound}, {words[check.verdict]}{flips}{worst}"


def to_markdown(report: Report) -> str:
    """A summary with a table, as for a step summary or a comment."""
    titles = ("", "task", "setting", "metric", "baseline", "now", "drop", "95 % bounds", "lost / gained")
    confidence = f"{100 * report.limits.confidence:g} %"
    titles = tuple(title.replace("95 %", confidence) for title in titles)
    lines = [f"### {headline(report)}", ""]
    lines += _table(titles, [_row(check) for check in report.checks])
    for verdict in (Verdict.FAIL, Verdict.TOO_FEW):
        found = [check for check in report.checks if check.verdict is verdict]
        if found:
            lines += [
                "",
                f"**{_WORDS[verdict]}**",
                "",
                *(f"- {_escaped(sentence(check))}" for check in found),
            ]
    if report.new:
        lines += ["", f"Not in the baseline, so not judged: {_escaped(', '.join(report.new))}."]
    if report.notes:
        lines += ["", "Notes:", "", *(f"- {_escaped(note)}" for note in report.notes)]
    lines += [
        "",
        "A drop is the baseline's score minus the score now, on the same items. A check fails when its "
        f"drop is beyond the margin with {confidence} confidence (one-sided, Holm's correction over the "
        f"{_counted(report)} of {len(report.checks)} checks in which enough items changed to fail at all), "
        f"passes when it is within it with {confidence} confidence, and else has too few items. "
        "*Unchanged*: every log-likelihood and answer is as in the baseline.",
    ]
    return "\n".join(lines) + "\n"


def to_junit(report: Report) -> str:
    """JUnit XML: a test case per check; one with too few items is skipped."""
    failures = sum(check.verdict is Verdict.FAIL for check in report.checks)
    skipped = sum(check.verdict is Verdict.TOO_FEW for check in report.checks)
    counts = {"tests": str(len(report.checks)), "failures": str(failures), "errors": "0"}
    root = ElementTree.Element("testsuites", {"name": "kvacc check", **counts})
    suite = ElementTree.SubElement(
        root, "testsuite", {"name": "kvacc check", **counts, "skipped": str(skipped), "time": "0"}
    )
    for check in report.checks:
        name = f"{check.label} {check.what}" if check.what not in check.label else check.label
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": f"kvacc.{_plain(check.task)}", "name": _plain(name), "time": "0"}
        )
        properties = ElementTree.SubElement(case, "properties")
        for key, value in _numbers(check).items():
            ElementTree.SubElement(properties, "property", {"name": key, "value": str(value)})
        text = _plain(sentence(check))
        if check.verdict is Verdict.FAIL:
            failure = ElementTree.SubElement(case, "failure", {"type": "AccuracyRegression", "message": text})
            failure.text = text
        elif check.verdict is Verdict.TOO_FEW:
            ElementTree.SubElement(case, "skipped", {"message": text})
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def to_json(report: Report) -> str:
    """Everything, for programs."""
    content = {
        "schema_version": 1,
        "verdict": str(report.verdict),
        "exit_code": report.exit_code,
        "margin": report.limits.margin,
        "confidence": report.limits.confidence,
        "checks": [
            {
                "label": check.label,
                "task": check.task,
                "setting": check.setting,
                "what": check.what,
                "metric": check.metric,
                "verdict": str(check.verdict),
                "unchanged": check.unchanged,
                "worst": check.worst,
                "cells": list(check.cells),
                "message": sentence(check),
                **_numbers(check),
            }
            for check in report.checks
        ],
        "new": report.new,
        "notes": report.notes,
    }
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def to_annotations(report: Report) -> list[str]:
    """GitHub's workflow commands: an error for each failed check, a warning where items are too few."""
    kinds = {Verdict.FAIL: "error", Verdict.TOO_FEW: "warning"}
    return [
        f"::{kinds[check.verdict]} title={_property(f'kvacc check: {check.task}')}::{_data(sentence(check))}"
        for check in report.checks
        if check.verdict in kinds
    ]


def write_text(path: str | Path, text: str, *, append: bool = False) -> None:
    """Write a report in one step; ``append`` is for a step summary, which other steps share.

    Raises:
        KvaccError: the file cannot be written.
    """
    path = Path(path)
    if not append:
        write_whole(path, text)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise KvaccError(f"cannot write {path}: {error.strerror or error}; choose another file") from None


def _counted(report: Report) -> int:
    return sum(check.test.smallest_p <= 1 - report.limits.confidence for check in report.checks)


def _numbers(check: Check) -> dict[str, Any]:
    test = check.test
    return {
        "unit": check.unit,
        "baseline": _scaled(check, check.before),
        "now": _scaled(check, check.now),
        "drop": _scaled(check, test.drop),
        "drop_at_least": _scaled(check, test.low),
        "drop_at_most": _scaled(check, test.high),
        "limit": _scaled(check, check.limit),
        "p_beyond": test.p_beyond,
        "p_beyond_adjusted": check.adjusted_p,
        "p_within": test.p_within,
        "method": test.method,
        "items": test.items,
        "lost": check.lost,
        "gained": check.gained,
        "discordance": round(test.discordance, 6),
        "design_effect": round(test.design_effect, 6),
        "items_needed": test.needed,
    }


def _row(check: Check) -> tuple[str, ...]:
    test = check.test
    mark = {Verdict.PASS: "✅", Verdict.FAIL: "❌", Verdict.TOO_FEW: "❔"}[check.verdict]
    if check.unchanged:
        drop = bounds = "unchanged"
    else:
        drop = _amount(check, test.drop, sign=True)
        ends = (test.low, test.high)
        bounds = "-" if None in ends else " to ".join(_amount(check, end, sign=True) for end in ends)
    return (
        mark,
        check.task + (f" {shots_text(check.shots, check.fewshot_sampler)}" if check.shots else ""),
        check.setting,
        check.metric if check.before is not None else check.what,
        "-" if check.before is None else _amount(check, check.before),
        _amount(check, check.now),
        drop,
        bounds,
        "-" if check.lost is None else f"{check.lost} / {check.gained} of {test.items}",
    )


def _table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    rule = [":--"] * 4 + ["--:"] * (len(titles) - 4)
    return ["| " + " | ".join(_escaped(cell) for cell in line) + " |" for line in (titles, rule, *rows)]


def _amount(check: Check, number: float, *, sign: bool = False) -> str:
    # -0.0 is nobody's drop.
    return f"{check.scale * number + 0.0:{'+' if sign else ''}.{1 if check.unit == 'points' else 4}f}"


def _bound(check: Check) -> str:
    test = check.test
    if test.low is None:
        return " (no bound: too few independent items)"
    if check.verdict is Verdict.FAIL:
        return f" (at least {_amount(check, test.low, sign=True)})"
    return f" (at most {_amount(check, test.high, sign=True)})"


def _needed(check: Check) -> str:
    test = check.test
    if check.verdict is not Verdict.TOO_FEW or test.needed is None:
        return ""
    # More are needed than there are, or chance was against these: then the drop itself is why.
    if test.needed <= test.items:
        return f" (the drop seen is too close to it for {test.items} items)"
    return f" (about {test.needed} items would do if nothing is lost; {test.items} were there)"


def _scaled(check: Check, number: float | None) -> float | None:
    return None if number is None else round(check.scale * number, 6) + 0.0


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _plain(text: str) -> str:
    return text.translate(_NOT_XML)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
