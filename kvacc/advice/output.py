"""A recommendation as people and programs read it: terminal, Markdown, JSON.

The same recommendation gives the same bytes: nothing here knows the time or the machine.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from kvacc.advice.choose import Advice, Check, Judged
from kvacc.advice.words import about, as_size, asked, headline, median_words, misses, of_pick, remarks, tenths

if TYPE_CHECKING:
    from rich.console import Console

NO_VALUE = "-"
TITLES = (
    "strategy", "difference", "drop at most", "kept", "memory", "KV memory", "per token", "first token", "",
)  # fmt: skip


def table(advice: Advice) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of every candidate and ``full``; columns that nobody knows are left out."""
    rows = [_row(one, advice) for one in (advice.full, *advice.judged)]
    shown = [place for place in range(len(TITLES)) if any(row[place] != NO_VALUE for row in rows)]
    return [TITLES[place] for place in shown], [[row[place] for place in shown] for row in rows]


def render(advice: Advice, console: Console) -> None:
    """Print it to a terminal."""
    from rich import box
    from rich.table import Table

    def say(line: str, style: str | None = None) -> None:
        console.print(line, style=style, highlight=False, markup=False)

    say(headline(advice), "bold")
    for line in of_pick(advice):
        say(f"  {line}")
    for line in (asked(advice), *about(advice)):
        say(line)
    titles, rows = table(advice)
    drawn = Table(box=box.SIMPLE, pad_edge=False)
    for place, title in enumerate(titles):
        last = place == len(titles) - 1
        drawn.add_column(title, justify="left" if place == 0 or last else "right", overflow="fold")
    from rich.text import Text

    for row in rows:
        drawn.add_row(*map(Text, row))
    console.print(drawn)
    for heading, lines in _sections(advice):
        say(heading, "bold")
        for line in lines:
            say(f"  {line}")


def to_markdown(advice: Advice) -> str:
    """The whole recommendation as Markdown."""
    lines = ["# Recommendation", "", f"**{_escaped(headline(advice))}**", ""]
    lines += [f"- {_escaped(line)}" for line in of_pick(advice)] + [""] * (advice.pick is not None)
    lines += [f"{_escaped(line)}  " for line in (asked(advice), *about(advice))] + [""]
    titles, rows = table(advice)
    rule = [":--"] + ["--:"] * (len(titles) - 2) + [":--"]
    for row in (titles, rule, *rows):
        lines.append("| " + " | ".join(map(_escaped, row)) + " |")
    for heading, found in _sections(advice):
        lines += ["", f"## {heading}", "", *(f"- {_escaped(line)}" for line in found)]
    return "\n".join(lines) + "\n"


def to_json(advice: Advice) -> str:
    """Everything, for programs: drops in points, sizes in bytes, times in seconds."""
    limits, setting = advice.limits, advice.setting
    content = {
        "schema_version": 1,
        "pick": None if advice.pick is None else advice.pick.candidate.name,
        "exit_code": advice.exit_code,
        "headline": headline(advice),
        "limits": {
            "max_drop": None if limits.max_drop is None else _short(100 * limits.max_drop),
            "max_drop_of": {name: _short(100 * drop) for name, drop in sorted(limits.max_drop_of.items())},
            "memory": limits.memory,
            "kv_memory": limits.kv_memory,
            "latency": limits.latency,
            "time_to_first_token": limits.time_to_first_token,
            "confidence": limits.confidence,
            "certain": limits.certain,
        },
        "model": advice.evidence.model,
        "dtype": advice.evidence.dtype,
        "shots": advice.evidence.shots,
        "protocol": advice.evidence.protocol,
        "tasks": list(advice.evidence.tasks),
        "setting": None if setting is None else vars(setting),
        "prefer": advice.prefer,
        "axes": list(advice.axes),
        "full": _plain(advice.full),
        "strategies": [_plain(one) for one in advice.judged],
        "excluded": [{"name": name, "why": why} for name, why in advice.excluded],
        "remarks": remarks(advice),
    }
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _sections(advice: Advice) -> list[tuple[str, list[str]]]:
    found = [
        ("Nearest misses", misses(advice)),
        ("Not judged", [f"{name}: {why}" for name, why in advice.excluded]),
        ("To know", remarks(advice)),
    ]
    return [(heading, lines) for heading, lines in found if lines]


def _row(one: Judged, advice: Advice) -> list[str]:
    candidate, cost = one.candidate, one.cost
    bounds = [check for check in one.checks if check.unit == "points"]
    worst = max(bounds, key=_over, default=None)
    low, value, high = map(tenths, (candidate.low, candidate.difference, candidate.high))
    bound = NO_VALUE
    if worst is not None:
        name = worst.what.removeprefix("drop of ").removeprefix("the ")
        bound = f"{name}: no bound" if worst.bound is None else f"{name}: {tenths(worst.bound):.1f}"
    return [
        candidate.name,
        "baseline" if candidate.is_full else f"{value:+.1f} [{low:+.1f}, {high:+.1f}]",
        bound,
        f"{100 * candidate.kept_fraction:.1f}%",
        NO_VALUE if cost.memory is None else f"{as_size(cost.memory)} ({cost.memory_of})",
        NO_VALUE if cost.kv_memory is None else as_size(cost.kv_memory),
        NO_VALUE if cost.latency is None else median_words(cost.latency),
        NO_VALUE if cost.time_to_first_token is None else median_words(cost.time_to_first_token),
        _standing(one, advice),
    ]


def _standing(one: Judged, advice: Advice) -> str:
    """What became of a candidate."""
    if one is advice.pick or (advice.pick and one.candidate.name == advice.pick.candidate.name):
        return "the pick"
    if one.candidate.is_full and not one.qualifies:
        return "baseline" if not advice.limits.of_resources else str(one.verdict)
    if not one.qualifies:
        return f"{one.verdict} (control)" if one.candidate.is_control else str(one.verdict)
    if one.candidate.is_control:
        return "yes, but a control"
    if one.beaten_by:
        return f"yes, beaten by {', '.join(one.beaten_by)}"
    return "yes, on the front"


def _over(check: Check) -> float:
    return math.inf if check.bound is None else check.bound - check.limit


def _plain(one: Judged) -> dict[str, Any]:
    candidate, cost = one.candidate, one.cost
    times = {
        name: None if measured is None else {
            "median": measured.median, "low": measured.low, "high": measured.high, "count": measured.count
        }
        for name, measured in (("latency", cost.latency), ("time_to_first_token", cost.time_to_first_token))
    }  # fmt: skip
    return {
        "name": candidate.name,
        "strategy": candidate.spec.strategy,
        "options": candidate.spec.options,
        "budget": candidate.spec.budget,
        "budget_of": candidate.spec.budget_of,
        "control": candidate.is_control,
        "verdict": str(one.verdict),
        "qualifies": one.qualifies,
        "on_front": one.on_front,
        "beaten_by": list(one.beaten_by),
        "difference": _short(candidate.difference),
        "difference_low": _short(candidate.low),
        "difference_high": _short(candidate.high),
        "items": candidate.items,
        "kept_fraction": _short(candidate.kept_fraction),
        "p_value": _short(one.p_value),
        "p_value_adjusted": _short(one.adjusted_p),
        "memory": cost.memory,
        "memory_of": cost.memory_of or None,
        "kv_memory": cost.kv_memory,
        "kv_host": cost.kv_host,
        **times,
        "kernel": cost.kernel or None,
        "failure": cost.failure,
        "probe": cost.case_id,
        "cells": [evidence.row.cell_id for evidence in candidate.tasks],
        "checks": [_plain_check(check) for check in one.checks],
        "notes": list(candidate.notes),
    }


def _plain_check(check: Check) -> dict[str, Any]:
    values = {name: getattr(check, name) for name in ("what", "unit", "verdict", "why", "items")}
    numbers = {name: _short(getattr(check, name)) for name in ("value", "bound", "limit")}
    needed = {"items_needed": check.needed, "items_needed_as_seen": check.needed_as_seen}
    return {**values, "verdict": str(check.verdict), **numbers, **needed}


def _short(number: float | None) -> float | None:
    return None if number is None else round(number, 9) + 0.0


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
