"""A batch of sequences decoded step by step: what latency and memory are measured on.

Two kinds. Under the kernel ``kvacc`` a strategy's own cache, on kvacc's step path. Under
transformers' kernels (``eager``, ``sdpa``, ``flash_attention_2``) the model as everybody runs
it, with transformers' cache: what a user has without kvacc. Neither can reach the parallel
path, which frees nothing: see :func:`step_path_only`.
"""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from kvacc.engine import attention
from kvacc.engine.layers import layer_kinds
from kvacc.engine.offload import OffloadedLayer
from kvacc.engine.prefill import (
    chunks,
    read_in_chunks,
    require_chunk,
    require_chunked_prefill,
    require_state_carried,
)
from kvacc.engine.stepping import KeptLayer, RowReading
from kvacc.engine.wrapped import PARALLEL_PATH, WrappedModel
from kvacc.errors import KvaccError, unknown
from kvacc.kv_size import TAIL_TOKENS, KVBytes
from kvacc.probes.records import KERNELS
from kvacc.strategy import Strategy, make_strategy


@contextlib.contextmanager
def step_path_only() -> Iterator[None]:
    """Inside the block a forward pass of the parallel path raises KvaccError, so that no figure
    measured there can come from it."""
    token = PARALLEL_PATH.set(False)
    try:
        yield
    finally:
        PARALLEL_PATH.reset(token)


class Decoder(ABC):
    """One batch of equally long sequences on the step path.

    Args:
        model: any causal language model of transformers.
        strategy: decides what its cache holds.
        prompt_tokens: tokens of each prompt.
        batch: rows B.

    Attributes:
        cache: the cache in use.
        passes: forward passes so far.
    """

    def __init__(self, model, strategy: Strategy, prompt_tokens: int, batch: int) -> None:
        self.model = model
        self.strategy = strategy
        self.prompt_tokens = prompt_tokens
        self.batch = batch
        self.passes = 0
        self.seen = 0
        accepted = inspect.signature(model.forward).parameters
        self._keeps_logits = "logits_to_keep" in accepted
        self._takes_positions = "position_ids" in accepted
        self.cache: DynamicCache

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def moved_bytes(self) -> list[int]:
        """For each forward pass, bytes copied from host to device, of all rows together."""
        return [0] * self.passes

    def prefill(self, tokens: torch.Tensor, chunk: int | None = None) -> torch.Tensor:
        """Read the prompts.

        Args:
            tokens: long [B, n], n the ``prompt_tokens`` that the budget was made for.
            chunk: tokens per forward pass; all at once when None.

        Returns:
            logits of the last position [B, V].

        Raises:
            KvaccError: another shape, a prompt that was read already, or a strategy that
                cannot read prompts in chunks.
        """
        if tuple(tokens.shape) != (self.batch, self.prompt_tokens):
            raise KvaccError(
                f"this decoder was made for {self.batch} prompts of {self.prompt_tokens} tokens, and got "
                f"{tuple(tokens.shape)}"
            )
        if self.seen:
            raise KvaccError("this decoder has read its prompts already: make another one")
        chunk = require_chunk(chunk)
        if chunk is not None and chunk < self.prompt_tokens:
            require_chunked_prefill(self.strategy, chunk)
            if chunk > 1:  # one token at a time is decoding
                require_state_carried(self.model, self._read_fresh)
        for part in chunks(tokens, chunk):
            logits = None  # those of the part before are not wanted, so they should not be held
            logits = self._forward(part)
        return logits

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read one more token of each row, long [B]; the logits [B, V] of what follows it.

        Raises:
            KvaccError: there are more or fewer tokens than rows, or no prompt was read.
        """
        if tuple(tokens.shape) != (self.batch,):
            raise KvaccError(
                f"a step takes one token for each of {self.batch} rows, not {tuple(tokens.shape)}"
            )
        if self.seen < self.prompt_tokens:
            raise KvaccError("a decoder reads its prompts before it takes steps: call prefill first")
        return self._forward(tokens[:, None])

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [B, n] -> logits [B, V] of the last one."""
        arguments = {"logits_to_keep": 1} if self._keeps_logits else {}
        end = self.seen + tokens.shape[1]
        if self._takes_positions:
            places = torch.arange(self.seen, end, device=tokens.device)
            arguments["position_ids"] = places[None].expand(tokens.shape)
        last = contextlib.nullcontext() if self._keeps_logits else _last_position(self.model)
        with torch.inference_mode(), self._answering(), last:
            out = self.model(input_ids=tokens, use_cache=True, **self._held(), **arguments)
        self.seen = end
        self.passes += 1
        self._hold(out)
        return out.logits[:, -1]

    def _held(self) -> dict[str, Any]:
        """What the model is given of the tokens before."""
        return {"cache": self.cache}

    def _hold(self, out) -> None:  # noqa: B027 - most models note it in the cache by themselves
        """Note what the model returned for the tokens to come."""

    @abstractmethod
    def _read_fresh(self, tokens: torch.Tensor, chunk: int) -> torch.Tensor:
        """Logits [1, V] after ``tokens`` [1, n] read in chunks, with a cache of its own."""

    @abstractmethod
    def _answering(self) -> contextlib.AbstractContextManager:
        """What answers the attention calls of a forward pass."""

    def kv_bytes(self) -> KVBytes:
        """Bytes that the cache holds now, of all rows: the entries' tensors themselves.

        Not counted: what the allocator holds beyond them, and :meth:`bookkeeping_bytes`.
        """
        device = host = summaries = state = 0
        for layer in self.cache.layers:
            if isinstance(layer, OffloadedLayer):
                host += layer.host_bytes()
                summaries += layer.device_bytes()
                continue
            device += _bytes(getattr(layer, "keys", None)) + _bytes(getattr(layer, "values", None))
            summaries += _bytes(getattr(layer, "indexer_keys", None))  # DeepSeek V3.2's lightning indexer
            for name in ("conv_states", "recurrent_states"):
                state += sum(map(_bytes, getattr(layer, name, {}).values()))
        return KVBytes(device=device, host=host, summaries=summaries, state=state)

    def bookkeeping_bytes(self) -> int:
        """Bytes of the positions, scores and flags that kvacc keeps beside evicting layers' entries."""
        kept = [layer for layer in self.cache.layers if isinstance(layer, KeptLayer) and layer.is_initialized]
        return sum(
            _bytes(tensor)
            for layer in kept
            for tensor in (layer.entries.position, layer.entries.alive, layer.entries.score)
        )


class StrategyDecoder(Decoder):
    """A strategy's cache on kvacc's step path.

    Attributes:
        session: the :class:`~kvacc.engine.stepping.StepSession` that answers.
    """

    def __init__(
        self, wrapped: WrappedModel, strategy: Strategy, prompt_tokens: int, batch: int, reading: RowReading
    ) -> None:
        super().__init__(wrapped.model, strategy, prompt_tokens, batch)
        self.wrapped = wrapped
        self.session = wrapped.step(strategy, [reading] * batch)
        self.cache = self.session.cache

    @property
    def moved_bytes(self) -> list[int]:
        return [int(moved.sum()) for moved in self.session.moved]

    def _answering(self):
        return attention.active(self.session)

    def _read_fresh(self, tokens, chunk):
        return read_in_chunks(self.wrapped, tokens, chunk)


class StockDecoder(Decoder):
    """The model with a kernel of transformers and transformers' cache, as without kvacc.

    Raises:
        KvaccError: the kernel is not available, or the family keeps its past in a way of its own.
    """

    def __init__(self, model, prompt_tokens: int, batch: int, kernel: str) -> None:
        super().__init__(model, make_strategy("full"), prompt_tokens, batch)
        self.kernel = kernel
        self._kernel = _Kernel(model, kernel)
        self.cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        self.state: list[torch.Tensor] | None = None
        """RWKV's state, which transformers keeps in no cache: five of [B, D, layers]."""
        accepted = inspect.signature(model.forward).parameters
        self._has_state = "cache" not in accepted and "state" in accepted
        if "cache" not in accepted and not self._has_state:
            raise KvaccError(
                f"model family {model.config.model_type!r} takes no cache of transformers, so it cannot be "
                "probed; use another family"
            )
        if self._has_state and batch > 1:
            # Its shifted state [B, D] is added to [B, 1, D], which mixes the rows.
            raise KvaccError(
                f"model family {model.config.model_type!r} mixes the rows of a batch while decoding in this "
                "release of transformers; use batch 1"
            )

    def _held(self):
        return {"state": self.state} if self._has_state else super()._held()

    def _hold(self, out):
        if self._has_state:
            self.state = out.state

    def _answering(self):
        return self._kernel.in_use()

    def _read_fresh(self, tokens, chunk):
        other = StockDecoder(self.model, tokens.shape[1], 1, self.kernel)
        for part in chunks(tokens, chunk):
            logits = other._forward(part)
        return logits

    def kv_bytes(self):
        return super().kv_bytes() + KVBytes(state=sum(map(_bytes, self.state or [])))


def make_decoder(
    model: WrappedModel | torch.nn.Module,
    strategy: Strategy,
    prompt_tokens: int,
    batch: int,
    protocol: str = "serve",
    kernel: str = "kvacc",
    tail_tokens: int = TAIL_TOKENS,
) -> Decoder:
    """A fresh decoder, with everything prepared that is prepared once for a model.

    Args:
        model: a wrapped model, or a model of transformers.
        strategy: what to decode under; ``full`` alone where the kernel is not ``kvacc``.
        protocol: when the strategy acts: ``stream`` from the first token on, ``serve`` after the
            prompt, ``context`` ``tail_tokens`` before its end (half of it at most).
        kernel: ``kvacc``, ``eager``, ``sdpa`` or ``flash_attention_2``.

    Raises:
        KvaccError: a strategy, protocol or kernel that cannot be used here.
    """
    if kernel not in KERNELS:
        raise unknown("kernel", kernel, KERNELS)
    if prompt_tokens < 1 or batch < 1:
        raise KvaccError(f"a batch of {batch} prompts of {prompt_tokens} tokens: give at least one of each")
    if kernel != "kvacc":
        if strategy.name != "full":
            raise KvaccError(
                f"kernel {kernel!r} is transformers' own and keeps every entry, so strategy "
                f"{strategy.name!r} cannot act in it; use kernel=kvacc, or strategy=full"
            )
        inner = model.model if isinstance(model, WrappedModel) else model
        return StockDecoder(inner, prompt_tokens, batch, kernel)
    strategy.require_protocol(protocol)
    token = PARALLEL_PATH.set(True)  # a preparation is no measurement
    try:
        if not isinstance(model, WrappedModel):
            model = WrappedModel(model)
        dense = {
            "stream": 0,
            "serve": prompt_tokens,
            "context": max(1, prompt_tokens - min(tail_tokens, prompt_tokens // 2)),
        }[protocol]
        reading = RowReading(padding=0, dense=dense, compressed=dense or prompt_tokens)
        return StrategyDecoder(model, strategy, prompt_tokens, batch, reading)
    finally:
        PARALLEL_PATH.reset(token)


class _Kernel:
    """Switches a model to one of transformers' own kernels, and back after each pass.

    transformers' own ``set_attn_implementation`` walks all modules, which costs as much as a
    small model's layer; so what it changes is noted once, and set again directly.
    """

    def __init__(self, model, name: str) -> None:
        self.before: list[tuple] = []
        self.after: list[tuple] = []
        attends = any(kind.name != "other" for kind in layer_kinds(model.config))
        if not attends:  # a recurrent model has no attention to switch
            if name != "eager":
                raise KvaccError(
                    f"model family {model.config.model_type!r} has no attention, so there is no kernel "
                    f"{name!r} of it; use kernel=eager"
                )
            return
        if not model._can_set_attn_implementation():
            current = model.config._attn_implementation
            if current != name:
                raise KvaccError(
                    f"model family {model.config.model_type!r} cannot change its kernel after loading: it "
                    f"runs {current!r}, and {name!r} was asked for"
                )
            return
        self.before = _implementations(model)
        try:
            model.set_attn_implementation(name)
            self.after = _implementations(model)
        except (ImportError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split()).split(". ")[0]
            raise KvaccError(f"kernel {name!r} is not available for this model here: {reason}") from None
        finally:
            _set(self.before)
        if any(value != name for _, value in self.after[:1]):
            raise KvaccError(f"kernel {name!r} is not available here: transformers uses {self.after[0][1]!r}")
        if name.startswith("flash") and model.device.type != "cuda":
            raise KvaccError(f"kernel {name!r} needs a CUDA device, and this model is on {model.device.type}")

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        _set(self.after)
        try:
            yield
        finally:
            _set(self.before)


def _implementations(model) -> list[tuple]:
    """(configuration, attention implementation) of the model, the model's own first, each once."""
    configs = [model.config, *(m.config for m in model.modules() if hasattr(m, "config"))]
    distinct = {id(config): config for config in configs if hasattr(config, "_attn_implementation_internal")}
    return [(config, config._attn_implementation_internal) for config in distinct.values()]


def _set(implementations: list[tuple]) -> None:
    for config, name in implementations:
        config._attn_implementation_internal = name


@contextlib.contextmanager
def _last_position(model) -> Iterator[None]:
    """Let the output embedding see the last position only."""

    def last(module, arguments):
        return (arguments[0][:, -1:], *arguments[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(last)
    try:
        yield
    finally:
        handle.remove()


def _bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes
