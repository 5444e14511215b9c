"""Lower bounds of time: what memory, arithmetic and wires allow at their peak rates.

A roofline: each GPU takes at least as long as its bytes over its bandwidth and its operations
over its peak, whichever is longer; what comes from host memory can be hidden behind that; what
GPUs exchange cannot. Real kernels reach a part of these rates, and starting them takes time that
is not counted, so real times are longer, those of small models many times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvacc.errors import KvaccError
from kvacc.kv_size import KVBytes, bytes_of_layers
from kvacc.layer_sizes import LayerSize
from kvacc.planner.gpus import Gpu
from kvacc.planner.memory import Workload
from kvacc.planner.models import PlannedModel, parameters_on_device
from kvacc.select_strategy import SelectStrategy
from kvacc.strategy import Strategy


@dataclass(frozen=True)
class Step:
    """Seconds at least, of one forward pass on each GPU.

    Attributes:
        weights, cache: reading them at full bandwidth.
        arithmetic: operations at peak.
        host: bytes from or to host memory.
        exchange: sums over the GPUs of tensor parallelism.
    """

    weights: float
    cache: float
    arithmetic: float
    host: float
    exchange: float

    @property
    def seconds(self) -> float:
        """At least this long."""
        return max(self.weights + self.cache, self.arithmetic, self.host) + self.exchange

    @property
    def bound_by(self) -> str:
        """The largest part."""
        parts = {
            "memory bandwidth": self.weights + self.cache,
            "arithmetic": self.arithmetic,
            "host transfers": self.host,
            "exchange between GPUs": self.exchange,
        }
        return max(parts, key=lambda name: parts[name])


def token_time(model: PlannedModel, strategy: Strategy, work: Workload, gpu: Gpu, dtype: str) -> Step:
    """One more token for every row, at the end of the answer."""
    sizes = [size.shared_among(work.devices) for size in model.layers]
    reading = work.reading(work.output_tokens - 1)
    stored = bytes_of_layers(sizes, strategy, reading, work.kv_bytes)
    brought = _brought(sizes, strategy, work, stored)
    cache = stored.device + stored.summaries + 2 * stored.state + brought
    per_token = _cached_numbers(sizes, stored, brought, work)
    operations = 2 * _matrices(model, work) * work.batch + per_token
    return Step(
        _weights_read(model, work, work.batch) / gpu.bandwidth,
        cache / gpu.bandwidth,
        operations / _peak(gpu, dtype),
        brought / gpu.host,
        _exchange(model, work, work.batch, gpu),
    )


def first_token_time(model: PlannedModel, strategy: Strategy, work: Workload, gpu: Gpu, dtype: str) -> Step:
    """Reading the prompt."""
    sizes = [size.shared_among(work.devices) for size in model.layers]
    tokens = work.batch * work.prompt_tokens
    # Only the last token's logits are computed.
    output = model.parameters.output / work.devices
    operations = 2 * (_matrices(model, work) - output) * tokens + 2 * output * work.batch
    for size in sizes:
        if size.kind != "none":
            each = size.query_heads * (size.full_key_size + size.full_value_size)
            operations += 2 * each * work.batch * _pairs(work.prompt_tokens, size.window)
    stored = bytes_of_layers(sizes, strategy, work.reading(0), work.kv_bytes)
    written = stored.device + stored.summaries + stored.state
    return Step(
        work.passes * _weights_read(model, work, work.batch * work.pass_tokens) / gpu.bandwidth,
        written / gpu.bandwidth,
        operations / _peak(gpu, dtype),
        stored.host / gpu.host,
        _exchange(model, work, tokens, gpu),
    )


def _peak(gpu: Gpu, dtype: str) -> float:
    peak = gpu.operations_for(dtype)
    if peak is None:
        raise KvaccError(
            f"{gpu.name} has no matrix units for {dtype}; give --dtype one of: {', '.join(gpu.operations)}"
        )
    return peak


def _matrices(model: PlannedModel, work: Workload) -> float:
    """Numbers that multiply each token on a GPU."""
    parameters = model.parameters
    active = parameters.matrices - parameters.experts + parameters.experts * model.used
    return float(active / work.devices)


def _weights_read(model: PlannedModel, work: Workload, tokens: int) -> float:
    """Bytes of weights that a pass over ``tokens`` tokens reads on a GPU: of the input embedding
    nothing, of the experts those that some token uses, when each uses others at random."""
    share = parameters_on_device(model, work.devices) / model.parameters.total
    used = 1 - (1 - float(model.used)) ** tokens
    parameters = model.parameters
    read = parameters.total - parameters.embedding - parameters.experts + parameters.experts * used
    return read * share * float(work.weight_bytes)


def _brought(sizes: list[LayerSize], strategy: Strategy, work: Workload, stored: KVBytes) -> float:
    """Bytes that a strategy that selects brings from host memory for one token, at most: its
    budget, of which the newest entry is on the device already."""
    if not isinstance(strategy, SelectStrategy) or not stored.host:
        return 0.0
    reading = work.reading(work.output_tokens - 1)
    budget = strategy.budget.entries(reading.compressed, reading.tokens)
    return stored.host * min(1.0, (min(budget, reading.tokens) - 1) / reading.tokens)


def _cached_numbers(sizes: list[LayerSize], stored: KVBytes, brought: float, work: Workload) -> float:
    """Operations of attention over what is read, of all rows: two for each number of each entry
    and query head."""
    stored_numbers = (stored.device + brought) / float(work.kv_bytes)
    attending = [size for size in sizes if size.kind != "none"]
    if not attending:
        return 0.0
    kept = sum(size.numbers_per_token for size in attending)
    per_entry = sum(size.query_heads * (size.full_key_size + size.full_value_size) for size in attending)
    return 2 * stored_numbers * per_entry / kept


def _pairs(tokens: int, window: int) -> int:
    """Query-key pairs of a causal pass."""
    if not window or tokens <= window:
        return tokens * (tokens + 1) // 2
    return window * (window + 1) // 2 + (tokens - window) * window


def _exchange(model: PlannedModel, work: Workload, tokens: int, gpu: Gpu) -> float:
    """Two sums of hidden states per layer, in a ring: 2 (n - 1) / n of their bytes pass each GPU."""
    if work.devices == 1:
        return 0.0
    size = 2 * len(model.layers) * tokens * model.hidden * work.activation_bytes
    return math.ceil(size * 2 * (work.devices - 1) / work.devices) / gpu.between
