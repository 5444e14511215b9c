"""Memory of each strategy in parts, and the peaks of prefill and decode.

What the device holds stands first, so that a peak can be read off the same axis; what lies in host
memory follows behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvacc.plots.figure import Figure, inline
from kvacc.plots.probe_series import about_case, in_order, labels_of, pictures, protocol_of
from kvacc.plots.style import WIDTH, Series
from kvacc.probes.records import MemoryRecord, ProbeRecord
from kvacc.records import as_bytes

PARTS = {
    "weights": "weights",
    "kv_device": "KV entries on the device",
    "summaries": "what entries are selected by",
    "state": "recurrent state",
    "prefill_activations": "prefill activations",
    "kv_host": "KV entries in host memory",
}
"""Fields of :class:`MemoryRecord` and their names, in the order of the bars."""
PEAKS = {"prefill_peak": "peak of prefill", "decode_peak": "peak of decode"}
CAPTION = (
    "Live bytes, as counted: the entries are those kept after the prompt; prefill activations are what the "
    "peak of prefill has beyond weights and entries. Triangles mark the peaks. Host memory is another "
    "memory, and not part of a device's peak."
)
_BAR = 42
"""Pixels for each bar."""
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def memory_figures(records: Sequence[ProbeRecord]) -> list[Figure]:
    """A figure for each model, protocol, machine, prompt, batch and output length with a memory measured."""
    labels = labels_of(records)
    found = []
    outputs = {one.case.output_tokens for one in records}
    of_case = lambda case: (case.prompt_tokens, case.batch, case.output_tokens)  # noqa: E731
    for title, members in pictures(records, of_case):
        if any(one.memory is not None for one in members):
            case = members[0].case
            words = [title, f"prompt of {case.prompt_tokens:,} tokens", f"batch {case.batch}"]
            words += [f"{case.output_tokens} tokens generated"] if len(outputs) > 1 else []
            found.append(_figure(", ".join(words), in_order(members, labels), labels))
    return found


def _figure(title: str, members: Sequence[ProbeRecord], labels: dict[str, str]) -> Figure:
    import altair

    measured = [one for one in members if one.memory is not None]
    most = max(_end(one.memory) for one in measured)
    unit, size = next(((name, size) for name, size in _UNITS if most >= size), _UNITS[-1])
    parts = [
        {
            "label": labels[one.case_id],
            "part": name,
            "place": place,
            "size": getattr(one.memory, field) / size,
        }
        for one in measured
        for place, (field, name) in enumerate(PARTS.items())
        if getattr(one.memory, field)
    ]
    peaks = [
        {"label": labels[one.case_id], "peak": name, "size": getattr(one.memory, field) / size}
        for one in measured
        for field, name in PEAKS.items()
    ]
    order = list(dict.fromkeys(labels[one.case_id] for one in measured))
    names = list(PARTS.values())
    shown = [name for name in names if any(part["part"] == name for part in parts)]
    y = altair.Y("label:N", sort=order, title=None, scale=altair.Scale(paddingInner=0.5, paddingOuter=0.35))
    x = altair.X(
        "size:Q", title=f"live bytes, {unit}", stack="zero", scale=altair.Scale(zero=True, nice=False),
        axis=altair.Axis(tickCount=6),
    )  # fmt: skip
    bars = (
        altair.Chart(inline(parts))
        .mark_bar()
        .encode(y=y, x=x, color=Series(names).colour("part", shown), order=altair.Order("place:Q"))
    )
    shape = altair.Shape(
        "peak:N",
        scale=altair.Scale(domain=list(PEAKS.values()), range=["triangle-down", "triangle-up"]),
        legend=altair.Legend(title=None, orient="bottom", columns=1),
    )
    layers = [bars, *(_peak_layer(peaks, name, y, shape) for name in PEAKS.values())]
    return Figure(
        kind="memory",
        title=title,
        chart=altair.layer(*layers).properties(width=WIDTH, height=_BAR * len(order)),
        description=f"Memory in parts. {_in_words(measured, labels)}",
        caption=CAPTION,
        remark=_not_run(members, labels),
        about=about_case(members[0].case, protocol_of(members)),
    )


def _peak_layer(peaks: list[dict[str, Any]], name: str, y: Any, shape: Any) -> Any:
    """Triangles above the bars (prefill) or below them (decode)."""
    import altair

    above = name == PEAKS["prefill_peak"]
    return (
        altair.Chart(inline([peak for peak in peaks if peak["peak"] == name]))
        .mark_point(size=45, filled=True, opacity=1, color="#7d7d85", yOffset=-13 if above else 13)
        .encode(y=y, x=altair.X("size:Q"), shape=shape)
    )


def _end(memory: MemoryRecord) -> int:
    """The right end of a bar or of its peaks."""
    return max(sum(getattr(memory, field) for field in PARTS), memory.prefill_peak, memory.decode_peak)


def _in_words(measured: Sequence[ProbeRecord], labels: dict[str, str]) -> str:
    said = []
    for one in measured:
        memory = one.memory
        parts = [
            f"{name} {as_bytes(getattr(memory, field))}"
            for field, name in (PARTS | PEAKS).items()
            if getattr(memory, field)
        ]
        if memory.predicted_device is not None:
            same = "as the formula says" if _as_predicted(memory) else _formula(memory)
            parts.append(f"entries {same}")
        said.append(f"{labels[one.case_id]}: {', '.join(parts)}")
    return "; ".join(said) + "."


def _as_predicted(memory: MemoryRecord) -> bool:
    return (memory.predicted_device, memory.predicted_host or 0) == (memory.kv_device, memory.kv_host)


def _formula(memory: MemoryRecord) -> str:
    host = f" and {as_bytes(memory.predicted_host)} in host memory" if memory.predicted_host else ""
    return f"by the formula {as_bytes(memory.predicted_device)}{host}"


def _not_run(members: Sequence[ProbeRecord], labels: dict[str, str]) -> str:
    said = [f"{labels[one.case_id]}: {one.failure}" for one in members if one.failure is not None]
    return f"Could not run: {'; '.join(said)}." if said else ""
