"""How many bytes a strategy's cache takes, from the model's configuration alone: no weights.

Equal to the byte to what the step path holds (tests/test_kv_size.py), for every strategy and
kind of layer. In a layer where the strategy acts it is::

    rows x KV heads x kept entries x (key size + value size) x bytes of a number

:func:`kept_entries` is what strategies differ in; while decoding, one slot more can stay free for
the next token (:func:`held_slots`). Layers in which none acts (sliding, chunked, recurrent) hold
what transformers' cache holds (:mod:`kvacc.layer_sizes`).

Not counted: the positions and scores that are kept beside entries, the room of up to 128 tokens
in which a full cache grows, memory that the allocator holds beyond them, and copies while a
token is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvacc.errors import KvaccError, unknown
from kvacc.layer_sizes import LayerSize, layer_sizes
from kvacc.select_strategy import SelectStrategy
from kvacc.strategy import PROTOCOLS, EvictStrategy, Strategy
from kvacc.summary_size import summary_bytes

TAIL_TOKENS = 32
"""Prompt tokens that protocol ``context`` leaves uncompressed where the task does not say."""


@dataclass(frozen=True)
class KVBytes:
    """Bytes of a cache, of all rows.

    Attributes:
        device: keys and values on the device.
        host: keys and values in host memory.
        summaries: what a selection is chosen by, on the device: InfiniGen's partial keys,
            Quest's page bounds, InfLLM's representatives, a sparse attention's index.
        state: state of recurrent layers.
    """

    device: int = 0
    host: int = 0
    summaries: int = 0
    state: int = 0

    def __add__(self, other: KVBytes) -> KVBytes:
        return KVBytes(
            self.device + other.device,
            self.host + other.host,
            self.summaries + other.summaries,
            self.state + other.state,
        )

    @property
    def on_device(self) -> int:
        """All but the host's."""
        return self.device + self.summaries + self.state


@dataclass(frozen=True)
class Reading:
    """How a text is read.

    Args:
        prompt_tokens: tokens of the prompt of each row.
        generated: tokens read after it. The last token of an answer is made and not read, so a
            generation of n tokens ends with n - 1 read ones.
        batch: rows, all of this length.
        protocol: ``stream``, ``context`` or ``serve``.
        context_tokens: length of the context segment in ``context``; by default all but the
            last :data:`TAIL_TOKENS` (at most half) of the prompt.
        prefill_chunk: tokens of the prompt per forward pass; None is all.

    Raises:
        KvaccError: a number out of range.
    """

    prompt_tokens: int
    generated: int = 0
    batch: int = 1
    protocol: str = "serve"
    context_tokens: int | None = None
    prefill_chunk: int | None = None

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise unknown("protocol", self.protocol, PROTOCOLS)
        least = {"prompt_tokens": 1, "generated": 0, "batch": 1, "context_tokens": 1, "prefill_chunk": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise KvaccError(f"{name} {value} is too small; give {smallest} or more")
        if self.context_tokens is not None and self.context_tokens > self.prompt_tokens:
            raise KvaccError(
                f"context_tokens {self.context_tokens} is more than the prompt's {self.prompt_tokens}"
            )

    @property
    def tokens(self) -> int:
        """All tokens read so far."""
        return self.prompt_tokens + self.generated

    @property
    def dense(self) -> int:
        """Tokens read with the full cache before the strategy acts."""
        if self.protocol == "stream":
            return 0
        if self.protocol == "serve":
            return self.prompt_tokens
        tail = min(TAIL_TOKENS, self.prompt_tokens // 2)
        return self.context_tokens or max(1, self.prompt_tokens - tail)

    @property
    def compressed(self) -> int:
        """The length that a fractional budget refers to."""
        return self.dense or self.prompt_tokens

    @property
    def last_pass(self) -> int:
        """Tokens of the last forward pass."""
        if self.generated:
            return 1
        chunk = self.prefill_chunk or self.prompt_tokens
        return (self.prompt_tokens - 1) % chunk + 1


def kept_entries(strategy: Strategy, reading: Reading) -> int:
    """Entries per KV head that a layer holds in which ``strategy`` acts, after ``reading``.

    ====================  =================================================================
    evicts                ``min(tokens, budget)``; before its first compression all tokens; one
                          that acts at prefill only lets the later ones join
    evicts, a simulation  all tokens: it hides entries, and frees none
    selects, ``full``     all tokens
    ====================  =================================================================
    """
    return _kept_at(strategy, reading, reading.tokens)


def _kept_at(strategy: Strategy, reading: Reading, tokens: int) -> int:
    if not isinstance(strategy, EvictStrategy) or not strategy.physical_eviction:
        return tokens
    if tokens < reading.dense:
        return tokens
    at_compression = strategy.budget.entries(reading.compressed, max(1, reading.dense))
    if reading.dense and not strategy.acts_while_decoding:
        return min(reading.dense, at_compression) + tokens - reading.dense
    # A budget never shrinks, so what is kept follows it from below.
    return min(tokens, strategy.budget.entries(reading.compressed, tokens))


def held_slots(strategy: Strategy, reading: Reading) -> int:
    """Slots per KV head for which the step path holds memory then: the kept entries, and the one
    place, if any, that was left for the next token when the last one displaced an entry."""
    kept = kept_entries(strategy, reading)
    if not isinstance(strategy, EvictStrategy) or not strategy.physical_eviction:
        return kept
    from kvacc.engine.compiled import needs_positions_only

    before = reading.tokens - reading.last_pass
    slots = (_kept_at(strategy, reading, before) if before else 0) + reading.last_pass
    return slots if slots - kept == 1 and needs_positions_only(strategy) else kept


def kv_bytes_of(
    config,
    strategy: Strategy,
    prompt_tokens: int,
    generated: int = 0,
    batch: int = 1,
    dtype_bytes: int = 2,
    protocol: str = "serve",
    *,
    context_tokens: int | None = None,
    prefill_chunk: int | None = None,
) -> KVBytes:
    """Bytes of the cache of a whole batch, after the prompt and ``generated`` more tokens.

    Args:
        config: a transformers configuration; no weights are needed.
        dtype_bytes: bytes of a number of the model's type: 2 for float16 and bfloat16.

    The other arguments are those of :class:`Reading`.

    Raises:
        KvaccError: a number out of range, a protocol that the strategy does not support, or a
            family whose cache is not known.
    """
    reading = Reading(prompt_tokens, generated, batch, protocol, context_tokens, prefill_chunk)
    strategy.require_protocol(protocol)
    if not strategy.causal:
        raise KvaccError(f"{strategy!r} reads future tokens, so it has no cache to decode with")
    return bytes_of_layers(layer_sizes(config), strategy, reading, dtype_bytes)


def bytes_of_layers(
    sizes: Sequence[LayerSize], strategy: Strategy, reading: Reading, number_bytes: int | Fraction
) -> KVBytes:
    """The same for layers whose sizes are known.

    Args:
        number_bytes: bytes of a stored number; a fraction below a byte is rounded up at the end
            of each layer.
    """
    acts_in = acting_kind(sizes, strategy, reading.tokens)
    total = KVBytes()
    for index, size in enumerate(sizes):
        total += _of_layer(size, index, acts_in, strategy, reading, number_bytes)
    return total


def acting_kind(sizes: Sequence[LayerSize], strategy: Strategy, tokens: int) -> str:
    """The kind of layer in which the strategy acts.

    Full ones; where every layer slides (Mistral 7B v0.1), those, as long as no token is older
    than the window: as :meth:`kvacc.engine.wrapped.WrappedModel.kinds_for` has it.

    Raises:
        KvaccError: there is none, or a text longer than the window.
    """
    entries_alone = [size for size in sizes if size.kind != "none" and not size.has_state]
    kinds = {(size.kind, size.window) for size in entries_alone}
    acts = isinstance(strategy, (EvictStrategy, SelectStrategy))
    if not acts or any(kind == "full" for kind, _ in kinds):
        return "full"
    if len(kinds) == 1 and next(iter(kinds))[0] == "sliding":
        window = next(iter(kinds))[1]
        if tokens > window:
            raise KvaccError(
                f"{tokens} tokens exceed the model's sliding window of {window}: its layers would evict by "
                "themselves, beside the strategy; give fewer tokens or strategy=full"
            )
        return "sliding"
    raise KvaccError(
        f"no layer of this model attends to everything, so strategy {strategy.name!r} could not act; "
        "use strategy=full"
    )


def _of_layer(
    size: LayerSize,
    index: int,
    acts_in: str,
    strategy: Strategy,
    reading: Reading,
    number_bytes: int | Fraction,
) -> KVBytes:
    state = reading.batch * math.ceil(size.state_bytes(number_bytes))
    if size.kind == "none":
        return KVBytes(state=state)

    def entries(count: int) -> int:
        return math.ceil(reading.batch * count * size.numbers_per_token * number_bytes)

    acts = size.kind == acts_in and not size.has_state  # a layer of both kinds keeps transformers' cache
    if not acts or not isinstance(strategy, (EvictStrategy, SelectStrategy)):
        stored = size.stored_tokens(reading.tokens)
        index_bytes = math.ceil(reading.batch * reading.tokens * size.index_size * number_bytes)
        return KVBytes(device=entries(stored), summaries=index_bytes, state=state)
    if isinstance(strategy, SelectStrategy) and _selects_in(strategy, index):
        summary = reading.batch * summary_bytes(strategy, size, reading, number_bytes)
        return KVBytes(host=entries(reading.tokens), summaries=math.ceil(summary))
    return KVBytes(device=entries(held_slots(strategy, reading)))


def _selects_in(strategy: SelectStrategy, index: int) -> bool:
    settings = strategy.speculation
    guessable = settings is None or settings.source == "current" or index > 0
    return index >= strategy.dense_layers and guessable


def kv_formula(config, strategy: Strategy, dtype_bytes: int | Fraction = 2) -> str:
    """The formula in words, with this model's numbers: one clause for each kind of layer."""
    groups: dict[tuple, list[int]] = {}
    for index, size in enumerate(layer_sizes(config)):
        host = isinstance(strategy, SelectStrategy) and size.kind == "full" and _selects_in(strategy, index)
        groups.setdefault((size, host), []).append(index)
    return "; ".join(
        _words(size, host, len(layers), strategy, dtype_bytes) for (size, host), layers in groups.items()
    )


def _words(size: LayerSize, host: bool, count: int, strategy: Strategy, number_bytes: int | Fraction) -> str:
    layers = f"{count} layer{'s' if count != 1 else ''}"
    state = f"{_number(size.state_bytes(number_bytes))} bytes of recurrent state a row"
    if size.kind == "none":
        return f"{layers}: {state if size.has_state else 'no cache'}"
    each = f"{size.key_size} + {size.value_size} numbers"
    head = "KV head" if size.heads == 1 else "KV heads"
    if size.latent:
        head, each = "latent", f"{size.key_size} + {size.value_size} rotary numbers"
    what = f"{size.heads} {head} x ({each}) x {_number(number_bytes)} bytes = "
    what += f"{_number(size.numbers_per_token * number_bytes)} bytes a token"
    kept = "all tokens"
    if size.kind in ("sliding", "chunked"):
        kept = f"the newest {max(1, size.window - 1):,} tokens"
    elif host:
        kept = "all tokens, in host memory"
    elif size.kind == "full" and isinstance(strategy, EvictStrategy) and strategy.physical_eviction:
        kept = f"budget {strategy.budget}"
    also = f" and {state}" if size.has_state else ""
    index = _number(size.index_size * number_bytes)
    also += f" and {index} bytes a token of index" if size.index_size else ""
    return f"{layers}, {size.attention} attention: {what}, {kept}{also}"


def _number(value: int | Fraction) -> str:
    return f"{int(value):,}" if value == int(value) else f"{float(value):,}"
