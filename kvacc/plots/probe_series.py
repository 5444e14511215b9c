"""What pictures of probes share: which records stand in one picture, and what each is called."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvacc.advice.cost import machine_of
from kvacc.leaderboard_rows import FULL, budget_order
from kvacc.probes.records import ProbeCase, ProbeRecord

_OWN_KERNEL = "kvacc"
Key = Callable[[ProbeCase], tuple]
Labels = dict[str, str]


def labels_of(records: Sequence[ProbeRecord]) -> Labels:
    """``h2o 0.2``, ``full, sdpa``, ``h2o 0.2, chunks of 512`` by case id.

    Options stand in it where records of a strategy differ in them, chunks and kernels where they are
    not the usual ones.
    """
    options: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        options[record.case.strategy].append(record.case.options)
    return {record.case_id: _label(record.case, options[record.case.strategy]) for record in records}


def in_order(records: Sequence[ProbeRecord], labels: Labels) -> list[ProbeRecord]:
    """``full`` first, then large budgets before small ones, then by name and prompt length."""
    return sorted(
        records,
        key=lambda one: (
            one.case.strategy != FULL, budget_order(one.case.budget), labels[one.case_id],
            one.case.prompt_tokens, one.case_id,
        ),
    )  # fmt: skip


def pictures(records: Sequence[ProbeRecord], key: Key) -> Iterator[tuple[str, list[ProbeRecord]]]:
    """Records that may stand beside each other, with the picture's title.

    They share model, machine, protocol and ``key``. ``full``, which no protocol changes, stands beside
    every protocol.
    """
    groups: dict[tuple, list[ProbeRecord]] = defaultdict(list)
    for record in records:
        model = json.dumps(record.case.model, sort_keys=True, default=str)
        groups[model, machine_of(record), *key(record.case)].append(record)
    for place in sorted(groups):
        members = groups[place]
        protocols = sorted({one.case.protocol for one in members if one.case.strategy != FULL})
        for protocol in protocols or [""]:
            shown = [one for one in members if one.case.strategy == FULL or one.case.protocol == protocol]
            yield _title(shown[0], protocol), shown


def model_of(case: ProbeCase) -> str:
    """``smollm2-135m (float32)``"""
    name = str(case.model.get("pretrained", "unknown model")).rstrip("/").rsplit("/", 1)[-1]
    return f"{name} ({case.model.get('dtype')})"


def about_case(case: ProbeCase, protocol: str) -> dict[str, str]:
    """What a picture is about, for a page's filters."""
    return {"model": model_of(case), "task": "", "shots": "", "protocol": protocol}


def protocol_of(records: Sequence[ProbeRecord]) -> str:
    """The protocol of a picture; "" where ``full`` is alone in it."""
    return next((one.case.protocol for one in records if one.case.strategy != FULL), "")


def _title(record: ProbeRecord, protocol: str) -> str:
    parts = [model_of(record.case), *([protocol] if protocol else []), machine_of(record)]
    return ", ".join(parts)


def _label(case: ProbeCase, used: Sequence[dict[str, Any]]) -> str:
    names = sorted({name for options in used for name in options})
    varying = [name for name in names if len({repr(options.get(name)) for options in used}) > 1]
    parts = [case.strategy, *(f"{name}={case.options[name]}" for name in varying if name in case.options)]
    if case.budget is not None:
        parts.append(case.budget if case.budget_of == "prompt" else f"{case.budget} of {case.budget_of}")
    label = " ".join(parts)
    if case.kernel != _OWN_KERNEL:
        label += f", {case.kernel}"
    return label if case.prefill_chunk is None else f"{label}, chunks of {case.prefill_chunk}"
