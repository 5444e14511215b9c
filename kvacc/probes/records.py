"""What a probe measured: one JSON file for each case.

A case is model x strategy x budget x protocol x kernel x prompt length x batch x output
length x prefill chunk. All times are wall time in seconds of the step path, all sizes bytes.
Nothing here can come from the parallel path, which frees nothing and reads everything at once.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvacc.results import EnvironmentRecord

SCHEMA_VERSION = 1
PROBE_FILE = "probe.json"
KERNELS = ("kvacc", "eager", "sdpa", "flash_attention_2")
"""``kvacc`` serves every strategy; transformers' own kernels serve ``full`` alone."""

_Natural = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0)]
_Share = Annotated[float, Field(ge=0, le=1 + 1e-9)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ProbeCase(_Record):
    """What was asked for."""

    model: dict[str, Any] = Field(description="As in the spec of a result: ModelEntry.identity().")
    strategy: str = Field(description="Name of the strategy.")
    options: dict[str, Any] = Field(description="Its options.")
    budget: str | None = Field(default=None, description="Entries kept; null for a strategy without one.")
    budget_of: str = Field(default="prompt", description="What a fraction refers to.")
    protocol: str = Field(default="serve", description="When compression acts.")
    kernel: str = Field(default="kvacc", description="Attention: kvacc's, or a kernel of transformers.")
    prompt_tokens: int = Field(ge=1, description="Tokens of each prompt of the batch.")
    batch: int = Field(default=1, ge=1, description="Prompts read at once.")
    output_tokens: int = Field(default=32, ge=1, description="Tokens generated after each prompt.")
    prefill_chunk: int | None = Field(default=None, description="Tokens per prefill pass; null is all.")


class Distribution(_Record):
    """A repeated measurement, with a bootstrap interval of its median."""

    median: _Natural = Field(description="Median.")
    low: _Natural = Field(description="Lower end of the 95 % interval of the median.")
    high: _Natural = Field(description="Upper end.")
    p95: _Natural = Field(description="95th percentile.")
    p99: _Natural = Field(description="99th percentile.")
    count: int = Field(ge=1, description="Measurements.")
    values: list[_Natural] = Field(description="All of them, in the order measured.")


class LatencyRecord(_Record):
    """Times of one case."""

    time_to_first_token: Distribution = Field(description="Seconds from the prompt to its first token.")
    time_per_output_token: Distribution | None = Field(
        default=None, description="Seconds between tokens after the first; null when only one was made."
    )
    tokens_per_second: Distribution = Field(description="Tokens of all rows / time of the whole request.")
    warmup: int = Field(ge=0, description="Runs before the first that counts.")
    clock: str = Field(description="How time was taken: CUDA events, or the processor's clock.")


class MemoryRecord(_Record):
    """Bytes of one case."""

    weights: _Count = Field(description="Parameters and buffers of the model.")
    kv_device: _Count = Field(description="Keys and values on the device after the prompt, compressed.")
    kv_host: _Count = Field(description="Keys and values in host memory then.")
    summaries: _Count = Field(default=0, description="What a selection is chosen by, on the device.")
    state: _Count = Field(default=0, description="State of recurrent layers.")
    kv_device_end: _Count = Field(description="Keys and values on the device after the last token.")
    kv_host_end: _Count = Field(description="Keys and values in host memory then.")
    predicted_device: _Count | None = Field(default=None, description="kv_device by the formula.")
    predicted_host: _Count | None = Field(default=None, description="kv_host by the formula.")
    predicted_device_end: _Count | None = Field(default=None, description="kv_device_end by the formula.")
    predicted_host_end: _Count | None = Field(default=None, description="kv_host_end by the formula.")
    formula: str = Field(default="", description="The formula, and what it does not count, in words.")
    prefill_peak: _Count = Field(description="Most bytes live while the prompt was read, weights included.")
    decode_peak: _Count = Field(description="Most bytes live while tokens were made, weights included.")
    prefill_activations: _Count = Field(
        description="prefill_peak without weights and the entries stored at its end."
    )
    reserved: _Count = Field(description="Most bytes the allocator took from the system.")
    fragmentation: _Count = Field(description="reserved without what was live then.")
    method: str = Field(description="How bytes were counted.")


class TransferRecord(_Record):
    """What moved between host and device while tokens were made, per token and row."""

    bytes_to_device: _Natural = Field(description="Bytes brought to the device per token.")
    bytes_to_host: _Natural = Field(description="Bytes written to the host pool per token.")
    bytes_to_host_of_prompt: _Count = Field(description="Bytes written to the host pool for the prompt.")
    prefetched_share: _Share | None = Field(
        default=None, description="Share of the entries read that were brought before their layer ran."
    )
    seconds_hidden: _Natural | None = Field(
        default=None, description="Copying beside computation, per token; null where it is not known."
    )
    seconds_exposed: _Natural | None = Field(
        default=None, description="Waiting for copies, per token; null where it is not known."
    )
    method: str = Field(default="", description="How the times were taken.")


class ProbeRecord(_Record):
    """The content of probe.json."""

    schema_version: int = Field(default=SCHEMA_VERSION, description="Version of this layout.")
    case_id: str = Field(description="Short hash of the case and the device; also the folder's name.")
    case: ProbeCase = Field(description="What was asked for.")
    path: Literal["step"] = Field(default="step", description="The execution path; there is no other.")
    fingerprint: dict[str, Any] = Field(default_factory=dict, description="Of the loaded model.")
    latency: LatencyRecord | None = Field(default=None, description="Times; null where not measured.")
    memory: MemoryRecord | None = Field(default=None, description="Bytes; null where not measured.")
    transfers: TransferRecord | None = Field(default=None, description="Copies; null without offloading.")
    failure: str | None = Field(default=None, description="Why the case could not run: out of memory, say.")
    environment: EnvironmentRecord = Field(description="Versions and hardware.")
    clocks: str | None = Field(default=None, description="Clock rates of the device, where available.")
    started: str = Field(default="", description="Start in UTC, ISO 8601.")


class CapacityRecord(_Record):
    """What fits into a memory limit, found by bisection."""

    schema_version: int = Field(default=SCHEMA_VERSION, description="Version of this layout.")
    case_id: str = Field(description="Short hash of the case, the limit and the device.")
    case: ProbeCase = Field(description="The case, with prompt_tokens and batch of the largest that fits.")
    path: Literal["step"] = Field(default="step", description="The execution path; there is no other.")
    searched: Literal["prompt_tokens", "batch"] = Field(description="What was made larger.")
    limit: int | None = Field(default=None, description="Bytes allowed; null is the device's own memory.")
    fits: int = Field(ge=0, description="The largest that ran; 0 when none did.")
    fails: int | None = Field(default=None, description="The smallest that did not; null when all ran.")
    peak_of_fits: _Count | None = Field(default=None, description="Most bytes live in the largest that ran.")
    bound_by: Literal["prefill", "decode", "weights", "context", "search"] = Field(
        description="Where memory ran out; context: the model's own limit; search: the largest tried."
    )
    tried: dict[str, str] = Field(default_factory=dict, description="Size tried -> what happened.")
    environment: EnvironmentRecord = Field(description="Versions and hardware.")
