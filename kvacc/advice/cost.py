"""What probes measured of each candidate, all of them in the same setting.

Costs are compared only within one setting: the same machine, prompt length, batch, output length,
protocol and prefill chunk. It is the nearest that there is to what was asked for, and always named.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvacc.errors import KvaccError
from kvacc.probes.records import KERNELS, Distribution, ProbeRecord
from kvacc.results import SpecRecord

_PLACE = ("device", "device_map")


@dataclass(frozen=True)
class Wanted:
    """The setting asked for; None leaves it open."""

    prompt_tokens: int | None = None
    """Else the longest prompt with which most strategies ran."""
    batch: int | None = None
    """Else the smallest batch, likewise."""
    prefill_chunk: int | None = None
    """Tokens per prefill pass; else prompts read whole."""


@dataclass(frozen=True)
class Setting:
    """Where costs were taken, the same for every candidate."""

    prompt_tokens: int
    batch: int
    output_tokens: int
    protocol: str
    prefill_chunk: int | None
    machine: str
    """Device and processor; of what was computed the kernel that was assumed."""
    smaller_than_asked: bool
    """The prompt or the batch is, so what fits here may not fit there."""
    versions: str = ""
    computed: bool = False
    """From the model's configuration alone; then there is no machine."""

    @property
    def words(self) -> str:
        """``prompt of 4,096 tokens, batch 1, 32 tokens generated, serve, on cpu (EPYC)``"""
        chunk = f", prefill in chunks of {self.prefill_chunk:,}" if self.prefill_chunk else ""
        place = f"{self.machine}, computed and not measured" if self.computed else f"on {self.machine}"
        return (
            f"prompt of {self.prompt_tokens:,} tokens, batch {self.batch}, {self.output_tokens} tokens "
            f"generated, protocol {self.protocol}{chunk}, {place}"
        )


@dataclass(frozen=True)
class Cost:
    """What one candidate costs in the setting. Sizes in bytes, times in seconds; None: not known."""

    memory: int | None = None
    """Most bytes live on the device, weights included."""
    memory_of: str = ""
    """``prefill`` or ``decode``: when that was."""
    kv_memory: int | None = None
    """Keys, values, what they are chosen by and recurrent state on the device."""
    kv_host: int | None = None
    """Keys and values in host memory."""
    latency: Distribution | None = None
    """Time for each output token."""
    time_to_first_token: Distribution | None = None
    kernel: str = ""
    failure: str | None = None
    """Why the case could not run."""
    case_id: str | None = None
    """Of the probe; None where the bytes were computed, not measured."""


class Setup(Protocol):
    """A model with a strategy, whose costs are looked for: a candidate, say."""

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> SpecRecord: ...

    @property
    def model(self) -> Mapping[str, Any]:
        """Fingerprint of the loaded model."""


def same_setup(candidate: Setup, record: ProbeRecord) -> bool:
    """True when the probe is of the candidate's model, strategy, options and budget."""
    case, spec = record.case, candidate.spec
    if not same_model(candidate, record) or case.strategy != spec.strategy:
        return False
    if _is_full(candidate):
        return True
    return (
        _plain(case.options) == _plain(spec.options)
        and case.budget == spec.budget
        and (spec.budget is None or case.budget_of == spec.budget_of)
    )


def same_model(candidate: Setup, record: ProbeRecord) -> bool:
    """True when both asked for the same model and, as far as it is known, loaded the same weights."""
    if _asked(candidate.spec.model) != _asked(record.case.model):
        return False
    ours, theirs = candidate.model.get("content"), record.fingerprint.get("content")
    return ours is None or theirs is None or ours == theirs


def read_costs(
    candidates: Sequence[Setup], records: Sequence[ProbeRecord], wanted: Wanted
) -> tuple[Setting, dict[str, Cost]]:
    """The cost of each candidate that was probed, by its name, and the setting of all of them.

    Raises:
        KvaccError: no probe is of any of the candidates, they come from several machines, or one
            case was probed twice.
    """
    found = [
        (candidate, record) for candidate in candidates for record in records if same_setup(candidate, record)
    ]
    if not found:
        raise KvaccError(_why_none(candidates, records))
    setting, matching = _in_one_setting(found, wanted)
    costs: dict[str, Cost] = {}
    for candidate in candidates:
        own = [record for other, record in matching if other is candidate]
        own = [one for one in own if one.case.protocol == setting.protocol] or own
        own = _of_best_kernel(own)
        if len(own) > 1:
            raise KvaccError(
                f"{candidate.name} was probed twice in one setting (cases {own[0].case_id} and "
                f"{own[1].case_id}); name the folder of one of them"
            )
        if own:
            costs[candidate.name] = cost_of(own[0])
    return setting, costs


def cost_of(record: ProbeRecord) -> Cost:
    """What a probe measured, as a recommendation needs it."""
    memory, latency = record.memory, record.latency
    known: dict[str, Any] = {}
    if memory is not None:
        of_prefill = memory.prefill_peak >= memory.decode_peak
        known = {
            "memory": max(memory.prefill_peak, memory.decode_peak),
            "memory_of": "prefill" if of_prefill else "decode",
            "kv_memory": max(memory.kv_device, memory.kv_device_end) + memory.summaries + memory.state,
            "kv_host": max(memory.kv_host, memory.kv_host_end),
        }
    if latency is not None:
        known |= {
            "latency": latency.time_per_output_token,
            "time_to_first_token": latency.time_to_first_token,
        }
    return Cost(**known, kernel=record.case.kernel, failure=record.failure, case_id=record.case_id)


def machine_of(record: ProbeRecord) -> str:
    """``cpu, 2 threads (AMD EPYC)``"""
    environment = record.environment
    if not environment.processor or environment.processor in environment.device:
        return environment.device
    return f"{environment.device} ({environment.processor})"


_Pairs = list[tuple[Setup, ProbeRecord]]


def _in_one_setting(found: _Pairs, wanted: Wanted) -> tuple[Setting, _Pairs]:
    machines = sorted({machine_of(record) for _, record in found})
    if len(machines) > 1:
        raise KvaccError(
            f"the probes are of several machines, {'; '.join(machines)}; name folders of one with --probes"
        )
    protocols = {record.case.protocol for _, record in found}
    # As in the accuracy results where that was probed, else what a server does.
    own = next((c.spec.protocol for c, _ in found if not _is_full(c)), "serve")
    protocol = next((name for name in (own, "serve") if name in protocols), min(protocols))
    found = [pair for pair in found if pair[1].case.protocol == protocol or _is_full(pair[0])]
    chunk = _chunk({record.case.prefill_chunk for _, record in found}, wanted.prefill_chunk)
    found = [pair for pair in found if pair[1].case.prefill_chunk == chunk]
    found, prompt = _nearest(found, lambda case: case.prompt_tokens, wanted.prompt_tokens, largest=True)
    found, batch = _nearest(found, lambda case: case.batch, wanted.batch, largest=False)
    found, output = _nearest(found, lambda case: case.output_tokens, None, largest=True)
    first = found[0][1]
    smaller = prompt < (wanted.prompt_tokens or 0) or batch < (wanted.batch or 0)
    versions = f"kvacc {first.environment.kvacc}, torch {first.environment.torch}"
    return Setting(prompt, batch, output, protocol, chunk, machines[0], smaller, versions), found


def _chunk(known: set[int | None], wanted: int | None) -> int | None:
    """The prefill chunk asked for; else whole prompts, and the largest chunk where there are none."""
    if wanted in known:
        return wanted
    if wanted is not None:
        names = ", ".join(sorted("whole" if one is None else str(one) for one in known))
        raise KvaccError(f"prefill_chunk {wanted} was not probed; known: {names}")
    return max(one for one in known if one is not None)


def _nearest(
    found: _Pairs, value_of: Callable[[Any], int], wanted: int | None, *, largest: bool
) -> tuple[_Pairs, int]:
    """The pairs whose value is nearest to the wanted one in ratio, the larger of two as near.

    Where none is wanted: the largest (or smallest) value with which most of the setups ran, for a
    series of probes often ends where memory did.
    """
    values = sorted({value_of(record.case) for _, record in found})
    if wanted is not None:
        best = min(reversed(values), key=lambda value: abs(math.log(value / wanted)))
    else:
        ran = {
            value: len({one.name for one, record in found
                        if value_of(record.case) == value and record.failure is None})
            for value in values
        }  # fmt: skip
        most = [value for value in values if ran[value] == max(ran.values())]
        best = most[-1] if largest else most[0]
    return [pair for pair in found if value_of(pair[1].case) == best], best


def _is_full(one: Setup) -> bool:
    return one.spec.strategy == "full"


def _of_best_kernel(records: Sequence[ProbeRecord]) -> list[ProbeRecord]:
    """``full`` may have been probed with several kernels; kvacc's own is every strategy's."""
    for kernel in KERNELS:
        if own := [record for record in records if record.case.kernel == kernel]:
            return own
    return []


def _why_none(candidates: Sequence[Setup], records: Sequence[ProbeRecord]) -> str:
    model = str(candidates[0].spec.model.get("pretrained"))
    own = [record for record in records if same_model(candidates[0], record)]
    if not own:
        theirs = sorted({str(record.case.model.get("pretrained")) for record in records})
        dtype = candidates[0].spec.model.get("dtype")
        return (
            f"the probes are of {', '.join(theirs) or 'nothing'}, none of the model as it was run ({model}, "
            f"{dtype}); probe it with: kvacc probe CONFIG"
        )
    theirs = sorted({f"{record.case.strategy} {record.case.budget or ''}".strip() for record in own})
    return (
        f"no probe is of a strategy, with its options and budget, that the results are of; the probes are of "
        f"{', '.join(theirs)}; probe others with: kvacc probe CONFIG"
    )


def _asked(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model without where it runs, and without what was left at its default."""
    return {name: value for name, value in model.items() if name not in _PLACE and value not in (None, False)}


def _plain(options: Mapping[str, Any]) -> str:
    return json.dumps(options, sort_keys=True, default=str)
