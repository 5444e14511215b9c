"""A recommendation in sentences: the pick with what it rests on, and why the others are not it."""

from __future__ import annotations

from kvacc.advice.choose import Advice, Check, Judged, Verdict
from kvacc.probes.records import Distribution

_DOING = {"prefill": "the prompt was read", "decode": "tokens were made"}
MOST_MISSES = 5
"""Candidates that do not satisfy the limits whose reasons the text gives; JSON has all."""
_KEPT_ALIKE = 0.01


def headline(advice: Advice) -> str:
    """The pick, or that there is none, in one line."""
    count = sum(not one.candidate.is_control for one in advice.qualified)
    of = f"{count} of {sum(not one.candidate.is_control for one in advice.judged)} strategies satisfy this"
    if advice.pick is None:
        beaten = "; none of them is better than full in anything" if count else ""
        return f"nothing to recommend: {of}{beaten}" if count else f"nothing satisfies this ({of})"
    name = advice.pick.candidate.name
    if advice.pick.candidate.is_full:
        rest = "no strategy that satisfies it is better" if count else "no strategy is shown to"
        return f"full: the uncompressed cache satisfies this, and {rest}"
    sure = "" if advice.pick.verdict is Verdict.YES else ", by point estimate only"
    return f"{name}: {of}{sure}, and this one is best in {advice.prefer}"


def asked(advice: Advice) -> str:
    """The limits, in one line."""
    limits, parts = advice.limits, []
    by_name = dict(limits.max_drop_of)
    if limits.max_drop is not None:
        several = len(advice.evidence.tasks) > 1
        where = "on every task and on average" if several else f"on {advice.evidence.tasks[0]}"
        other = " else" if by_name else ""
        parts.append(f"at most {100 * limits.max_drop:g} points lost {where}{other}")
    parts += [f"at most {100 * drop:g} lost on {name}" for name, drop in sorted(by_name.items())]
    for name, limit in (("memory", limits.memory), ("KV memory", limits.kv_memory)):
        parts += [] if limit is None else [f"{name} at most {as_size(limit)}"]
    for name, limit in (
        ("time per output token", limits.latency),
        ("time to first token", limits.time_to_first_token),
    ):
        parts += [] if limit is None else [f"{name} at most {as_time(limit)}"]
    sure = f"with {100 * limits.confidence:g} % confidence" if limits.certain else "by point estimate"
    return f"asked for: {', '.join(parts)} ({sure})"


def about(advice: Advice) -> list[str]:
    """What was judged, and where costs were measured."""
    evidence = advice.evidence
    where = f"{evidence.model} ({evidence.dtype}), {evidence.shots}, protocol {evidence.protocol}"
    lines = [f"accuracy: {where}: {', '.join(evidence.tasks)}"]
    if advice.setting is None:
        lines.append(
            "cost: not probed; the share of KV entries that a query reads stands in for memory (kvacc probe "
            "measures memory and time)"
        )
    else:
        versions = f"; {advice.setting.versions}" if advice.setting.versions else ""
        lines.append(f"cost: {advice.setting.words}{versions}")
    return lines


def of_pick(advice: Advice) -> list[str]:
    """What the pick rests on, a line each."""
    pick, full = advice.pick, advice.full
    if pick is None:
        return []
    lines = []
    for check in pick.checks:
        if check.unit == "points":
            sure = f"{100 * advice.limits.confidence:g} % confidence"
            bound = "no bound" if check.bound is None else f"at most {tenths(check.bound):.1f} with {sure}"
            value = f"{check.what}: {tenths(check.value):.1f} points, {bound}"
            lines.append(f"{value} (allowed {check.limit:g}), {check.items:,} items")
    candidate, cost = pick.candidate, pick.cost
    if not candidate.is_full:
        lines.append(f"kept: {100 * candidate.kept_fraction:.1f} % of the KV entries that a query could read")
    if cost.memory is not None:
        baseline = "" if _no_baseline(pick, full) else f" (full: {as_size(full.cost.memory)})"
        lines.append(f"memory: {as_size(cost.memory)} at most, while {_DOING[cost.memory_of]}{baseline}")
    if cost.kv_memory is not None:
        host = f", and {as_size(cost.kv_host)} in host memory" if cost.kv_host else ""
        baseline = "" if _no_baseline(pick, full) else f" (full: {as_size(full.cost.kv_memory)})"
        lines.append(f"KV memory: {as_size(cost.kv_memory)} on the device{host}{baseline}")
    for name, field in (("time per output token", "latency"), ("time to first token", "time_to_first_token")):
        own, baseline = getattr(cost, field), getattr(full.cost, field)
        if own is not None:
            other = "" if candidate.is_full or baseline is None else f" (full: {median_words(baseline)})"
            lines.append(f"{name}: {median_words(own)}, {own.count} measurements{other}")
    if cost.case_id is not None:
        lines.append(f"probe: case {cost.case_id}, kernel {cost.kernel}")
    return lines + [f"note: {note}" for note in candidate.notes]


def remarks(advice: Advice) -> list[str]:
    """What a reader of the whole must know."""
    found, pick, limits = list(advice.notes), advice.pick, advice.limits
    if pick is not None and not pick.candidate.is_full and len(advice.judged) > 1:
        number, alpha = len(advice.judged), 1 - limits.confidence
        holds = "holds" if pick.adjusted_p <= alpha + 1e-12 else "does not hold"
        found.append(
            f"each strategy was judged by itself; corrected for all {number} (Holm), that the pick stays "
            f"within the allowed drops {holds} (p = {pick.adjusted_p:.2g})"
        )
    cheap = [
        one.candidate.name for one in advice.qualified
        if one.candidate.is_control and pick is not None and not pick.candidate.is_full
        and one.candidate.kept_fraction <= pick.candidate.kept_fraction + _KEPT_ALIKE
    ]  # fmt: skip
    if cheap:
        found.append(
            f"the control {', '.join(cheap)} satisfies this too, keeping no more: these tasks do not tell a "
            "good choice of entries from an arbitrary one"
        )
    likely = [one for one in advice.judged if one.verdict is Verdict.LIKELY and not one.qualifies]
    if likely:
        names = ", ".join(one.candidate.name for one in likely)
        found.append(f"by point estimates alone (--point) these would satisfy it too: {names}")
    return found


def misses(advice: Advice, most: int | None = MOST_MISSES) -> list[str]:
    """The nearest misses, each with the checks that it fails and by how much."""
    found = [one for one in advice.judged if not one.qualifies and not one.candidate.is_control]
    lines = [f"{one.candidate.name}: {'; '.join(map(miss, one.failing))}" for one in found[:most]]
    if most is not None and len(found) > most:
        lines.append(f"and {len(found) - most} more, further off (--format json has them all)")
    return lines


def miss(check: Check) -> str:
    """Which limit is not kept, and by how much."""
    if check.value is None:
        return f"{check.what}: {check.why}" if check.what != "run" else f"did not run: {check.why}"
    value, limit = amount(check, check.value), amount(check, check.limit)
    if check.verdict is Verdict.NO:
        return f"{check.what} {value}, {amount(check, check.value - check.limit)} beyond {limit}"
    if check.why:
        return f"{check.what} {value} ({check.why}), allowed {limit}"
    head = f"{check.what} {value} but perhaps {amount(check, check.bound)}, allowed {limit}"
    return f"{head}{_items_needed(check)}"


def amount(check: Check, value: float) -> str:
    """A value of the check in its unit."""
    if check.unit == "bytes":
        return as_size(value)
    return as_time(value) if check.unit == "seconds" else f"{tenths(value):.1f} points"


def as_size(number: float) -> str:
    """``512 B``, ``1.118 GiB``: digits enough to see what lies just beyond a limit."""
    unit, *larger = ("B", "KiB", "MiB", "GiB", "TiB")
    # From here on four digits would show 1024.
    while larger and number >= 1023.5:
        number /= 1024
        unit = larger.pop(0)
    return f"{number:.4g} {unit}"


def as_time(seconds: float) -> str:
    """``850 us``, ``12.3 ms``, ``2.05 s``"""
    if seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


def _items_needed(check: Check) -> str:
    if check.needed is None or check.items is None:
        return ""
    if check.needed <= check.items and (check.needed_as_seen or 0) <= check.items:
        return f"; chance was against these {check.items} items"
    cases = ((check.needed, "nothing is lost"), (check.needed_as_seen, "the drop seen is the true one"))
    parts = [f"{count:,} if {case}" for count, case in cases if count is not None and count > check.items]
    if check.needed == check.needed_as_seen:
        del parts[1:]
    return f"; items that would show it: about {', '.join(parts)} (there were {check.items:,})"


def _no_baseline(pick: Judged, full: Judged) -> bool:
    return pick.candidate.is_full or full.cost.memory is None


def median_words(measured: Distribution) -> str:
    """``12.3 ms [11.9, 12.8]``"""
    return f"{as_time(measured.median)} [{as_time(measured.low)}, {as_time(measured.high)}]"


def tenths(value: float) -> float:
    """Never -0.0 when shown with a decimal."""
    return round(value, 1) + 0.0
