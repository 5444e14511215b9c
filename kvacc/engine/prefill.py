"""Chunked prefill: a prompt read in several forward passes.

A forward pass holds the activations of all its tokens at once, and an eager kernel a square of
them, so the length of a pass and not the cache bounds the longest prompt. Reading the prompt in
chunks changes no result of a strategy that declares :attr:`~kvacc.strategy.Strategy.chunked_prefill`:
the step path replays its decisions token by token however the tokens arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvacc.engine import attention
from kvacc.engine.layers import layer_kinds
from kvacc.engine.scoring import step_forward
from kvacc.engine.stepping import RowReading
from kvacc.engine.wrapped import WrappedModel
from kvacc.errors import KvaccError
from kvacc.strategy import Strategy, make_strategy


def require_chunk(chunk: Any) -> int | None:
    """``chunk``, a number of tokens of at least 1, or None for the whole prompt at once.

    Raises:
        KvaccError: it is neither.
    """
    if chunk is None:
        return None
    try:
        number = int(chunk)
    except (TypeError, ValueError):
        number = 0
    if isinstance(chunk, bool) or number < 1 or number != float(chunk):
        raise KvaccError(
            f"prefill_chunk {chunk!r} is not a number of tokens of at least 1; give one, or leave it out to "
            "read each prompt in one pass"
        )
    return number


def require_chunked_prefill(strategy: Strategy, chunk: int | None) -> None:
    """Raise KvaccError unless ``strategy`` gives the same results when prompts are read in chunks."""
    if chunk is not None and not strategy.chunked_prefill:
        raise KvaccError(
            f"{strategy!r} does not give the same result when a prompt is read in chunks; leave out "
            f"prefill_chunk={chunk}"
        )


def chunks(tokens: torch.Tensor, chunk: int | None) -> tuple[torch.Tensor, ...]:
    """Tokens [B, n] in pieces of ``chunk`` columns, the last one shorter; one piece when None."""
    return (tokens,) if chunk is None else torch.split(tokens, chunk, dim=1)


def passes_of(prompt_tokens: int, chunk: int | None) -> int:
    """Forward passes in which a prompt is read."""
    return 1 if chunk is None else -(-prompt_tokens // chunk)


def read_in_chunks(wrapped: WrappedModel, tokens: torch.Tensor, chunk: int) -> torch.Tensor:
    """Logits [1, V] after ``tokens`` [1, n] read in chunks with the full cache."""
    count = tokens.shape[1]
    session = wrapped.step(make_strategy("full"), [RowReading(0, count, count)])
    first = 0
    with attention.active(session), torch.inference_mode():
        for part in chunks(tokens, chunk):
            logits = step_forward(wrapped, session, part, first)[:, -1]
            first += part.shape[1]
    return logits


_STATE_TOKENS, _STATE_CHUNK = 12, 5
_CARRIED: WeakKeyDictionary[torch.nn.Module, float] = WeakKeyDictionary()
"""model -> how far its logits after a prompt in chunks are from those of one pass, in units of
their standard deviation."""
_CARRIED_WITHIN = {torch.float32: 1e-3, torch.float64: 1e-3}
_CARRIED_WITHIN_HALF = 0.3


def require_state_carried(model, read: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """Raise KvaccError when a model's recurrent layers lose their state between chunks.

    Some families of transformers start every pass of several tokens from an empty state
    (Mamba 1 in 5.24), and say nothing. Each model is tried once.

    Args:
        read: (tokens [1, n], chunk) -> logits [1, V] after the last, with a cache of its own.
    """
    recurrent = any(kind.name == "other" for kind in layer_kinds(model.config))
    if not recurrent and model.config.model_type != "rwkv":
        return
    if model not in _CARRIED:
        size = min(model.config.get_text_config(decoder=True).vocab_size - 1, 97)
        tokens = torch.tensor([[2 + (5 * i) % (size - 2) for i in range(_STATE_TOKENS)]], device=model.device)
        whole, parts = read(tokens, _STATE_TOKENS).float(), read(tokens, _STATE_CHUNK).float()
        _CARRIED[model] = float((whole - parts).abs().max() / whole.std().clamp(min=1e-30))
    if _CARRIED[model] > _CARRIED_WITHIN.get(model.dtype, _CARRIED_WITHIN_HALF):
        raise KvaccError(
            f"model family {model.config.model_type!r} loses the state of its recurrent layers between "
            "passes of several tokens in this release of transformers, so its prompts cannot be read in "
            "chunks; leave out prefill_chunk"
        )
