"""Bytes on each GPU, part by part.

Weights and the cache are exact (:mod:`kvacc.kv_size`). Activations are a formula of what
transformers' implementation holds at once in a layer, checked against measured peaks: the
largest of four moments, for T tokens of a forward pass (rows x tokens), W entries that each row
attends to, Q query heads of D numbers (values V), and numbers of ``a`` bytes::

    rotation        a T (3 hidden + 2 D + 5 Q D + stored)
    attention       a T (3 hidden + 2 D + Q D + Q V) + mask + copies + square
    feed-forward    a T (4 hidden + 2 D + inner) + mask + weights of eager attention
    logits          a vocabulary of each row, of its last token alone

    inner           3 intermediate states; in a mixture, 4 and two hidden ones of each expert used
    mask            eager: a T W; sdpa: T W where one is needed, in windows and after a first pass,
                    and a T W more in attention; windows and full layers have masks of their own
    copies          a layer's keys as a new pass joins them, or keys and values repeated for all
                    query heads where the kernel does not group them, or made from a latent
    square          eager: T W Q x 8 bytes in float32, 10 in 16 bits: logits, and their softmax
                    in float32
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvacc.kv_size import KVBytes, Reading, bytes_of_layers
from kvacc.layer_sizes import FLOAT32, LayerSize
from kvacc.planner.models import PlannedModel, parameters_on_device
from kvacc.select_strategy import SelectStrategy
from kvacc.strategy import EvictStrategy, Strategy

KERNELS = ("eager", "sdpa", "flash_attention_2")
RESERVE = 2**30
"""Bytes set aside for what is not modelled: the CUDA context, libraries' work space, fragments."""


@dataclass(frozen=True)
class Workload:
    """What is asked of the machine.

    Attributes:
        prompt_tokens, output_tokens, batch: of every row; rows.
        weight_bytes, activation_bytes, kv_bytes: bytes of one number; a fraction below 8 bits.
        devices: GPUs that share the model by tensor parallelism.
        reserve: bytes set aside on each.
    """

    prompt_tokens: int
    output_tokens: int
    batch: int
    protocol: str
    prefill_chunk: int | None
    kernel: str
    weight_bytes: Fraction
    activation_bytes: int
    kv_bytes: Fraction
    devices: int = 1
    reserve: int = RESERVE

    @property
    def passes(self) -> int:
        """Forward passes in which the prompt is read."""
        return -(-self.prompt_tokens // self.pass_tokens)

    @property
    def pass_tokens(self) -> int:
        """Tokens of each row in the longest of them."""
        return min(self.prefill_chunk or self.prompt_tokens, self.prompt_tokens)

    def reading(self, generated: int) -> Reading:
        return Reading(
            self.prompt_tokens, generated, self.batch, self.protocol, prefill_chunk=self.prefill_chunk
        )


@dataclass(frozen=True)
class MemoryParts:
    """Bytes on each GPU, and in host memory.

    Attributes:
        cache_in_prefill: the most that the cache takes while the prompt is read, activations
            apart: before a strategy has evicted anything, it can be more than afterwards.
        cache: of the whole answer, after its last token.
        host: the pool in host memory of all GPUs together.
    """

    weights: int
    cache_in_prefill: int
    prefill_activations: int
    cache: KVBytes
    decode_activations: int
    reserve: int
    host: int

    @property
    def prefill_peak(self) -> int:
        return self.weights + self.cache_in_prefill + self.prefill_activations + self.reserve

    @property
    def decode_peak(self) -> int:
        return self.weights + self.cache.on_device + self.decode_activations + self.reserve

    @property
    def peak(self) -> int:
        return max(self.prefill_peak, self.decode_peak)


def memory_of(model: PlannedModel, strategy: Strategy, work: Workload) -> MemoryParts:
    """Bytes on each GPU for a workload."""
    sizes = [size.shared_among(work.devices) for size in model.layers]
    after = work.reading(work.output_tokens - 1)
    cache = bytes_of_layers(sizes, strategy, after, work.kv_bytes)
    whole = cache
    if work.devices > 1:
        whole = bytes_of_layers(model.layers, strategy, after, work.kv_bytes)
    weights = math.ceil(parameters_on_device(model, work.devices) * work.weight_bytes)
    return MemoryParts(
        weights + model.parameters.buffer_bytes,
        cache_in_prefill(sizes, strategy, work),
        activations(model, sizes, work, work.pass_tokens, work.prompt_tokens),
        cache,
        activations(model, sizes, work, 1, work.prompt_tokens + work.output_tokens - 1),
        work.reserve,
        whole.host,
    )


def cache_in_prefill(sizes: Sequence[LayerSize], strategy: Strategy, work: Workload) -> int:
    """The most bytes that the cache takes on the device while the prompt is read.

    A strategy that evicts after a dense prefill evicts layer by layer where the prompt is one
    pass: when the last layer is read, all others hold what is kept. In chunks it can evict only
    when the last one has been read, so all layers hold nearly the whole prompt until then.
    """
    kept = bytes_of_layers(sizes, strategy, work.reading(0), work.kv_bytes).on_device
    kept += _held_by_views(sizes, work)
    evicts = isinstance(strategy, EvictStrategy) and strategy.physical_eviction
    selects = isinstance(strategy, SelectStrategy)
    if not evicts and not selects:
        return kept
    if evicts and work.protocol != "stream" and work.passes > 1:
        everything = bytes_of_layers(sizes, _FULL, work.reading(0), work.kv_bytes).on_device
        return max(kept, everything + _held_by_views(sizes, work))
    # The new entries of one layer, before they are evicted or moved to the host.
    acting = [size.numbers_per_token for size in sizes if size.kind == "full" and not size.has_state]
    return kept + math.ceil(work.batch * max(acting, default=0) * work.pass_tokens * work.kv_bytes)


def _held_by_views(sizes: Sequence[LayerSize], work: Workload) -> int:
    """Bytes of the entries that sliding layers have dropped and still hold: transformers keeps a
    view of the newest ones, so a pass's whole storage stays until the next one."""
    prompt, total = work.prompt_tokens, 0
    for size in sizes:
        if size.kind in ("sliding", "chunked"):
            storage = prompt if work.passes == 1 else min(prompt, size.window - 1 + work.pass_tokens)
            dropped = max(0, storage - size.stored_tokens(prompt))
            total += math.ceil(work.batch * dropped * size.numbers_per_token * work.kv_bytes)
    return total


class _Everything(Strategy):
    name = "full"
    has_budget = False


_FULL = _Everything()


def activations(
    model: PlannedModel, sizes: Sequence[LayerSize], work: Workload, tokens: int, width: int
) -> int:
    """Bytes beside weights and cache at the widest moment of a forward pass.

    Args:
        tokens: of each row in the pass; width: entries that the last of them attends to.
    """
    number, all_tokens = work.activation_bytes, work.batch * tokens
    attending = {size for size in sizes if size.kind != "none"}
    mask = sum({(s.kind, s.window): _mask(s, work, tokens, width) for s in attending}.values())
    heads = max((size.query_heads for size in attending), default=0)
    rotary = 2 * max((size.full_key_size for size in attending), default=0)
    inner = -(-model.inner // work.devices)
    feed_forward = number * all_tokens * (4 * model.hidden + rotary + inner) + mask
    if work.kernel == "eager":  # transformers' layers hold the attention weights until they end
        feed_forward += number * all_tokens * width * heads
    logits = work.batch * -(-model.vocabulary // work.devices) * (number + 4)
    moments = [_attention(size, model.hidden, work, tokens, width) + mask for size in attending]
    return max(feed_forward, logits, *moments)


def _mask(size: LayerSize, work: Workload, tokens: int, width: int) -> int:
    """Bytes of the attention mask."""
    width = min(width, size.window - 1 + tokens) if size.window else width
    if work.kernel == "eager":
        return work.batch * tokens * width * work.activation_bytes
    return work.batch * tokens * width if _needs_mask(size, work, tokens, width) else 0


def _needs_mask(size: LayerSize, work: Workload, tokens: int, width: int) -> bool:
    later, slides = width > tokens, 0 < size.window < tokens
    return work.kernel == "sdpa" and tokens > 1 and (later or slides)


def _attention(size: LayerSize, hidden: int, work: Workload, tokens: int, width: int) -> int:
    """Bytes at the widest moment of one layer's attention, without the mask."""
    number, rows = work.activation_bytes, work.batch
    needs_mask = _needs_mask(size, work, tokens, width)
    if size.window:
        width = min(width, size.window - 1 + tokens)
    query, value = size.query_heads * size.full_key_size, size.query_heads * size.full_value_size
    beside = 3 * hidden + 2 * size.full_key_size
    rotation = rows * tokens * (beside + 5 * query + size.numbers_per_token)
    copies = size.heads * max(size.key_size, size.value_size) * width if width > tokens else 0
    if size.latent:  # the latent's projection, and keys joined from it and the rotary part
        nope = size.query_heads * (size.full_key_size - size.value_size)
        copied = value if rows > 1 else 0  # matrix products of a batch want the values to lie together
        copies = max(copies, width * (query + nope + value + copied))
    elif size.heads != size.query_heads and (work.kernel == "eager" or needs_mask):
        copies = max(copies, width * (query + value))
    attention = rows * (tokens * (beside + query + value) + copies)
    # sdpa makes the logits' bias of a mask of bits.
    square = rows * tokens * width * number if needs_mask else 0
    if work.kernel == "eager":
        square = rows * tokens * width * size.query_heads * (8 if number == FLOAT32 else 10)
    return max(number * rotation, number * attention + square)
