"""Probe records as rows to read: each beside ``full`` of the same group.

Times are compared only between cases that were timed in turns (same ``started``), run by run;
bytes do not depend on when they were counted, and are compared within the same sizes and machine.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvacc.config import BASELINE
from kvacc.probes.cases import case_label, model_label
from kvacc.probes.config import OWN_KERNEL
from kvacc.probes.intervals import Ratio, paired_ratio
from kvacc.probes.records import Distribution, LatencyRecord, ProbeCase, ProbeRecord

TIMED_APART = "timed apart from full, so no ratio"


class ProbeRow(BaseModel):
    """One case with its comparisons; seconds and bytes. Ratios are to ``full`` under kvacc's own
    kernel and the same prefill chunk."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    case_id: str = Field(description="The record's.")
    model: str = Field(description="Last part of the model's name.")
    dtype: str = Field(description="Number format asked for.")
    device: str = Field(description="Device and processor.")
    prompt_tokens: int = Field(description="Tokens of each prompt.")
    batch: int = Field(description="Prompts read at once.")
    output_tokens: int = Field(description="Tokens generated after each prompt.")
    strategy: str = Field(description="Name of the strategy.")
    options: dict[str, Any] = Field(description="Its options.")
    budget: str | None = Field(description="Entries kept.")
    budget_of: str = Field(description="What a fraction refers to.")
    protocol: str = Field(description="When compression acts.")
    kernel: str = Field(description="Attention kernel.")
    prefill_chunk: int | None = Field(description="Tokens per prefill pass; null is all.")
    repeats: int | None = Field(default=None, description="Timed runs.")
    first_token: float | None = Field(default=None, description="Median seconds to the first token.")
    first_token_low: float | None = Field(default=None, description="Lower end of its 95 % interval.")
    first_token_high: float | None = Field(default=None, description="Upper end.")
    first_token_ratio: float | None = Field(default=None, description="Over full's, paired by run.")
    first_token_ratio_low: float | None = Field(default=None, description="Lower end.")
    first_token_ratio_high: float | None = Field(default=None, description="Upper end.")
    per_token: float | None = Field(default=None, description="Median seconds per output token.")
    per_token_low: float | None = Field(default=None, description="Lower end of its 95 % interval.")
    per_token_high: float | None = Field(default=None, description="Upper end.")
    per_token_p95: float | None = Field(default=None, description="95th percentile of all tokens.")
    per_token_p99: float | None = Field(default=None, description="99th percentile.")
    per_token_ratio: float | None = Field(default=None, description="Over full's, paired by run.")
    per_token_ratio_low: float | None = Field(default=None, description="Lower end.")
    per_token_ratio_high: float | None = Field(default=None, description="Upper end.")
    tokens_per_second: float | None = Field(default=None, description="Median over runs, all rows.")
    kv_device: int | None = Field(default=None, description="Keys and values on the device after the prompt.")
    kv_host: int | None = Field(default=None, description="Keys and values in host memory then.")
    kv_share: float | None = Field(default=None, description="kv_device over full's.")
    predicted_device: int | None = Field(default=None, description="kv_device by the formula.")
    predicted_host: int | None = Field(default=None, description="kv_host by the formula.")
    weights: int | None = Field(default=None, description="Parameters and buffers of the model.")
    summaries: int | None = Field(default=None, description="What a selection is chosen by.")
    prefill_peak: int | None = Field(default=None, description="Most bytes live in prefill.")
    decode_peak: int | None = Field(default=None, description="Most bytes live in decoding.")
    bytes_to_device: float | None = Field(default=None, description="Brought per token and row.")
    bytes_to_host: float | None = Field(default=None, description="Written to the host per token and row.")
    prefetched_share: float | None = Field(default=None, description="Of the entries brought, ahead.")
    seconds_hidden: float | None = Field(default=None, description="Copying beside computation, per token.")
    seconds_exposed: float | None = Field(default=None, description="Waiting for copies, per token.")
    failure: str | None = Field(default=None, description="Why the case could not run.")
    note: str | None = Field(default=None, description="What keeps a comparison from being made.")
    started: str = Field(description="When its group was begun; equal for cases that may be compared.")

    @property
    def label(self) -> str:
        """``h2o 0.2 serve``"""
        return case_label(
            ProbeCase(
                model={},
                **{name: getattr(self, name) for name in ProbeCase.model_fields if name != "model"},
            )
        )

    @property
    def group(self) -> tuple:
        """What the rows of one table share."""
        sizes = (self.prompt_tokens, self.batch, self.output_tokens)
        return self.model, self.dtype, self.device, *sizes


def build_rows(records: Iterable[ProbeRecord]) -> list[ProbeRow]:
    """Rows of records, those of one group together, ``full`` first and larger budgets before smaller.

    The order of ``records`` does not matter.
    """
    rows = []
    ordered = sorted(records, key=_group_of)
    for _, members in itertools.groupby(ordered, key=_group_of):
        group = sorted(members, key=_order)
        rows += [_row(record, group) for record in group]
    return rows


def _group_of(record: ProbeRecord) -> tuple:
    case = record.case
    model = json.dumps([case.model, record.fingerprint], sort_keys=True)
    return model, _device(record), case.prompt_tokens, case.batch, case.output_tokens


def _order(record: ProbeRecord) -> tuple:
    case = record.case
    return (
        case.strategy != BASELINE,
        case.strategy,
        json.dumps(case.options, sort_keys=True),
        -float(case.budget or 0),
        case.protocol,
        case.kernel != OWN_KERNEL,
        case.kernel,
        case.prefill_chunk is not None,
        -(case.prefill_chunk or 0),
        record.started,
        record.case_id,
    )


def _device(record: ProbeRecord) -> str:
    environment = record.environment
    return ", ".join(part for part in (environment.device, environment.processor) if part)


def _row(record: ProbeRecord, group: Sequence[ProbeRecord]) -> ProbeRow:
    case = record.case
    shared = {name: getattr(case, name) for name in ProbeCase.model_fields if name != "model"}
    row = ProbeRow(
        case_id=record.case_id,
        model=model_label(str(case.model.get("pretrained", "model"))),
        dtype=str(record.fingerprint.get("dtype") or case.model.get("dtype", "")),
        device=_device(record),
        **shared,
        failure=record.failure,
        started=record.started,
    )
    _add_latency(row, record, group)
    _add_memory(row, record, group)
    if record.transfers is not None:
        for name in (
            "bytes_to_device",
            "bytes_to_host",
            "prefetched_share",
            "seconds_hidden",
            "seconds_exposed",
        ):
            setattr(row, name, getattr(record.transfers, name))
    return row


def _add_latency(row: ProbeRow, record: ProbeRecord, group: Sequence[ProbeRecord]) -> None:
    latency = record.latency
    if latency is None:
        return
    row.repeats = latency.time_to_first_token.count
    row.tokens_per_second = latency.tokens_per_second.median
    _add(row, "first_token", latency.time_to_first_token)
    if latency.time_per_output_token is not None:
        _add(row, "per_token", latency.time_per_output_token)
        row.per_token_p95 = latency.time_per_output_token.p95
        row.per_token_p99 = latency.time_per_output_token.p99
    if _is_baseline(record, record.case):
        return
    fulls = [other for other in group if _is_baseline(other, record.case) and other.latency is not None]
    together = [other for other in fulls if other.started == record.started]
    if together:
        other = together[0].latency
        _add_ratio(row, "first_token", _ratio(latency, other, "time_to_first_token"))
        _add_ratio(row, "per_token", _ratio(latency, other, "time_per_output_token"))
    elif fulls:
        row.note = TIMED_APART


def _add_memory(row: ProbeRow, record: ProbeRecord, group: Sequence[ProbeRecord]) -> None:
    memory = record.memory
    if memory is None:
        return
    names = ("kv_device", "kv_host", "predicted_device", "predicted_host", "weights", "summaries")
    for name in (*names, "prefill_peak", "decode_peak"):
        setattr(row, name, getattr(memory, name))
    fulls = [other for other in group if other.case.strategy == BASELINE and other.memory is not None]
    if fulls and fulls[0].memory.kv_device:
        row.kv_share = memory.kv_device / fulls[0].memory.kv_device


def _is_baseline(record: ProbeRecord, case: ProbeCase) -> bool:
    """Is this ``full`` as ``case`` is compared with it?"""
    own = record.case
    return own.strategy == BASELINE and own.kernel == OWN_KERNEL and own.prefill_chunk == case.prefill_chunk


def _ratio(one: LatencyRecord, other: LatencyRecord, name: str) -> Ratio | None:
    mine, full = getattr(one, name), getattr(other, name)
    if mine is None or full is None:
        return None
    return paired_ratio(
        _runs(mine, one.time_to_first_token.count), _runs(full, other.time_to_first_token.count)
    )


def _runs(times: Distribution, runs: int) -> list[list[float]]:
    """The values of each run: they stand one run after the other."""
    size = len(times.values) // runs
    return [times.values[start : start + size] for start in range(0, runs * size, size)]


def _add(row: ProbeRow, name: str, times: Distribution) -> None:
    for ending, value in (("", times.median), ("_low", times.low), ("_high", times.high)):
        setattr(row, name + ending, value)


def _add_ratio(row: ProbeRow, name: str, ratio: Ratio | None) -> None:
    if ratio is not None:
        for ending, value in (("", ratio.value), ("_low", ratio.low), ("_high", ratio.high)):
            setattr(row, f"{name}_ratio{ending}", value)
