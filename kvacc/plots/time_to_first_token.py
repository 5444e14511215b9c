"""Time to first token by length of the prompt: a line for each strategy, kernel and prefill chunk.

Where a line ends because the case could not run, a cross marks the prompt that was too long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from kvacc.plots.figure import Figure, inline
from kvacc.plots.probe_series import about_case, in_order, labels_of, pictures, protocol_of
from kvacc.plots.style import HEIGHT, WIDTH, Series
from kvacc.probes.records import ProbeRecord

CAPTION = (
    "Median of the time to the first token, with the 95 % interval of the median. A cross marks the shortest "
    "prompt that could not be run; its height says nothing."
)
CROSS = "M-.7,-.7L.7,.7M.7,-.7L-.7,.7"
"""A cross as a path, unlike the plus that Vega calls so and that stands for a series elsewhere."""
_WIDE_X, _WIDE_Y = 4, 20
"""From this ratio of the largest to the smallest on, an axis is logarithmic."""
_MOST_TICKS = 6


def time_to_first_token_figures(records: Sequence[ProbeRecord]) -> list[Figure]:
    """A figure for each model, protocol, machine, batch and output length of which a time is known."""
    labels = labels_of(records)
    known = [one for one in records if one.latency is not None or one.failure is not None]
    found = []
    outputs = {one.case.output_tokens for one in known}
    for title, members in pictures(known, lambda case: (case.batch, case.output_tokens)):
        if any(one.latency is not None for one in members):
            case = members[0].case
            of_output = [f"{case.output_tokens} tokens generated"] if len(outputs) > 1 else []
            title = ", ".join([title, f"batch {case.batch}", *of_output])
            found.append(_figure(title, in_order(members, labels), labels))
    return found


def _figure(title: str, members: Sequence[ProbeRecord], labels: dict[str, str]) -> Figure:
    import altair

    measured = [one for one in members if one.latency is not None]
    longest = max(one.latency.time_to_first_token.median for one in measured)
    scale, unit = (1, "s") if longest >= 1 else (1000, "ms")
    values = [
        {
            "label": labels[one.case_id],
            "prompt": one.case.prompt_tokens,
            "time": scale * one.latency.time_to_first_token.median,
            "low": scale * one.latency.time_to_first_token.low,
            "high": scale * one.latency.time_to_first_token.high,
            "case": one.case_id,
        }
        for one in measured
    ]
    x, y, failures = _axes(values, _first_failures(members, labels), unit)
    names = [labels[one.case_id] for one in members]
    series = Series(names)
    base = altair.Chart(inline(values)).encode(x=x, color=series.colour("label", names))
    layers = [
        base.mark_line(strokeWidth=1.5).encode(y=y, strokeDash=series.dash("label", names)),
        base.mark_rule(strokeWidth=1.5).encode(y=altair.Y("low:Q"), y2=altair.Y2("high:Q")),
        base.mark_point(size=50, strokeWidth=1.5, opacity=1).encode(
            y=y, shape=series.shape("label", names), fill=series.fill("label", names)
        ),
    ]
    if failures:
        lost = altair.Chart(inline(failures)).encode(x=x, color=series.colour("label", names))
        tails = altair.Chart(inline(_tails(values, failures))).encode(
            x=x, y=y, color=series.colour("label", names)
        )
        layers += [
            tails.mark_line(strokeWidth=1, strokeDash=[2, 3]),
            lost.mark_point(shape=CROSS, size=110, strokeWidth=2.5, opacity=1, filled=False).encode(
                y=y, tooltip=["label:N", "prompt:Q", "reason:N"]
            ),
        ]
    return Figure(
        kind="ttft",
        title=title,
        chart=altair.layer(*layers).properties(width=WIDTH, height=HEIGHT),
        description=f"Time to first token in {unit} by prompt length. {_in_words(names, values, failures)}",
        caption=CAPTION,
        remark=_reasons(failures),
        about=about_case(members[0].case, protocol_of(members)),
    )


def _first_failures(members: Sequence[ProbeRecord], labels: dict[str, str]) -> list[dict[str, Any]]:
    """The shortest prompt of each label that could not be run, in the order of the labels."""
    found: dict[str, dict[str, Any]] = {}
    for one in members:
        label = labels[one.case_id]
        if one.failure is None or (label in found and found[label]["prompt"] <= one.case.prompt_tokens):
            continue
        found[label] = {"label": label, "prompt": one.case.prompt_tokens, "reason": one.failure}
    return list(found.values())


def _axes(values: list[dict[str, Any]], failures: list[dict[str, Any]], unit: str) -> tuple:
    """The encodings of both axes, and the failures with a height above everything measured."""
    import altair

    lengths = sorted({value["prompt"] for value in (*values, *failures)})
    low, high = min(value["low"] for value in values), max(value["high"] for value in values)
    logarithmic = low > 0 and high / low >= _WIDE_Y
    step = (high / low) ** 0.07 if logarithmic else 0.07 * high
    raised: dict[int, int] = defaultdict(int)
    placed = []
    for failure in failures:
        raised[failure["prompt"]] += 1
        count = raised[failure["prompt"]] + 0.5
        placed.append({**failure, "time": high * step**count if logarithmic else high + step * count})
    top = max([high, *(failure["time"] for failure in placed)])
    if logarithmic:
        y_scale = altair.Scale(type="log", domain=[low / step, top * step], nice=False)
    else:
        y_scale = altair.Scale(domain=[0, top + step], nice=False)
    wide = lengths[-1] / lengths[0] >= _WIDE_X
    x_scale = altair.Scale(type="log", base=2, padding=12) if wide else altair.Scale(zero=False, padding=12)
    ticks = lengths if len(lengths) <= _MOST_TICKS else lengths[:: len(lengths) // -_MOST_TICKS]
    x = altair.X(
        "prompt:Q", title="tokens of the prompt", scale=x_scale,
        axis=altair.Axis(values=ticks, format=",d", grid=False),
    )  # fmt: skip
    y = altair.Y(
        "time:Q", title=f"time to first token, {unit}", scale=y_scale,
        axis=altair.Axis(tickCount=6, format="~g"),
    )  # fmt: skip
    return x, y, placed


def _tails(values: list[dict[str, Any]], failures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """From the longest prompt of a label that ran to its cross, if that is longer."""
    found = []
    for failure in failures:
        own = [v for v in values if v["label"] == failure["label"] and v["prompt"] < failure["prompt"]]
        if own:
            last = max(own, key=lambda value: value["prompt"])
            found += [{name: one[name] for name in ("label", "prompt", "time")} for one in (last, failure)]
    return found


def _in_words(names: Sequence[str], values: list[dict[str, Any]], failures: list[dict[str, Any]]) -> str:
    parts = []
    for name in dict.fromkeys(names):
        own = [
            f"{v['prompt']:,}: {v['time']:.3g} ({v['low']:.3g} to {v['high']:.3g})"
            for v in values if v["label"] == name
        ]  # fmt: skip
        own += [f"{f['prompt']:,}: could not run ({f['reason']})" for f in failures if f["label"] == name]
        parts.append(f"{name}: {', '.join(own)}")
    return "; ".join(parts) + "."


def _reasons(failures: Sequence[dict[str, Any]]) -> str:
    said = [f"{f['label']} at {f['prompt']:,} tokens: {f['reason']}" for f in failures]
    return f"Could not run: {'; '.join(said)}." if said else ""
