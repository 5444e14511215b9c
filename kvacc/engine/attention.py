"""The attention function that transformers calls, and the tensor operations it is made of.

Registered under the name ``kvacc`` with a mask function that returns None: every mask
is made here, from positions and kept sets, because a model builds one mask for all
layers and counts columns as if nothing had ever been evicted. What a call does is
decided by the *session* that is active around the model's forward pass (a context
variable, so nothing is patched and nothing outlives the ``with`` block).

Shapes: B rows, Q query heads, K heads of the given keys, n queries, W entries,
D key dimension, V value dimension.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

import torch

from kvacc.engine.scan import masked_softmax
from kvacc.products import times_transposed
from kvacc.select_strategy import dots

if TYPE_CHECKING:
    from kvacc.engine.prefix import StoredLayer

NAME = "kvacc"


class Session(Protocol):
    """What one forward pass (or one generation) does in each attention layer. With an
    attribute ``inputs`` (:class:`~kvacc.engine.speculation.Inputs`) it is also told what the
    layers are given."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The attention output [B, Q, n, V]."""
        ...


class AttentionCall:
    """One layer's attention as the model asks for it.

    Args:
        module: the model's attention module.
        layer: index of the layer.
        query: [B, Q, n, D]; key: [B, K, W, D]; value: [B, K, W, V], rotated.
        scaling: factor of the logits.
        softcap: Gemma 2's cap of the logits, or None.
        aux: [Q] GPT-OSS's attention-sink logits, or None.
    """

    def __init__(self, module, layer, query, key, value, scaling, softcap, aux):
        self.module: torch.nn.Module = module
        self.layer: int = layer
        self.query: torch.Tensor = query
        self.key: torch.Tensor = key
        self.value: torch.Tensor = value
        self.scaling: float = scaling
        self.softcap: float | None = softcap
        self.aux: torch.Tensor | None = aux

    def part(self, first: int, count: int, columns: int) -> AttentionCall:
        """The same call for ``count`` queries from ``first`` on and the first ``columns`` keys."""
        return self.with_tensors(
            self.query[:, :, first : first + count], self.key[:, :, :columns], self.value[:, :, :columns]
        )

    def of_head(self, row: int, head: int, heads: int) -> AttentionCall:
        """The same call for one row and one of ``heads`` groups of heads: query [1, Q/heads, n, D],
        key and value [1, K/heads, W, ..]."""
        one = slice(row, row + 1)

        def share(x: torch.Tensor, dim: int) -> torch.Tensor:
            size = x.shape[dim] // heads
            return x.narrow(dim, head * size, size)

        call = self.with_tensors(*(share(x[one], 1) for x in (self.query, self.key, self.value)))
        if self.aux is not None:
            call.aux = share(self.aux, 0)
        return call

    def after(self, stored: StoredLayer) -> AttentionCall:
        """The same attention with stored entries, shared by all rows, before its own."""
        rows = len(self.query)
        key, value = (
            torch.cat([before.expand(rows, -1, -1, -1), own], 2)
            for before, own in ((stored.key, self.key), (stored.value, self.value))
        )
        return self.with_tensors(self.query, key, value)

    def with_tensors(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> AttentionCall:
        """The same layer's attention over other tensors."""
        return AttentionCall(self.module, self.layer, query, key, value, self.scaling, self.softcap, self.aux)


_ACTIVE: ContextVar[Session | None] = ContextVar("kvacc_session", default=None)


@contextlib.contextmanager
def active(session: Session) -> Iterator[None]:
    """Let ``session`` answer the attention calls made inside the block."""
    token = _ACTIVE.set(session)
    inputs = getattr(session, "inputs", None)
    try:
        with inputs.watching() if inputs else contextlib.nullcontext():
            yield
    finally:
        _ACTIVE.reset(token)


def kvacc_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """transformers' attention interface: output [B, n, Q, V] and no weights."""
    session = _ACTIVE.get()
    if session is None:
        # Without a session there is no mask: answering would let tokens read the future.
        raise RuntimeError("a model with kvacc attention was called outside a kvacc session")
    call = AttentionCall(
        module,
        module.layer_idx,
        query,
        key,
        value,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        kwargs.get("softcap"),
        kwargs.get("s_aux"),
    )
    return session.attend(call).transpose(1, 2).contiguous(), None


def register() -> None:
    """Make ``attn_implementation="kvacc"`` known to transformers. Safe to repeat."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, kvacc_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


def attention_logits(call: AttentionCall, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Scaled logits, float32 [B, Q, n, W], query heads grouped by KV head."""
    # In float32 whatever the model's type: scores rank entries by small differences.
    logits = dots(query.float() * call.scaling, key)
    if call.softcap is not None:
        logits = torch.tanh(logits / call.softcap) * call.softcap
    return logits


def weighted_values(attention: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """attention [B, Q, n, W] times value [B, K, W, V]: [B, Q, n, V]."""
    rows, heads, count, width = attention.shape
    kv_heads = value.shape[1]
    grouped = attention.to(value.dtype).reshape(rows, kv_heads, heads // kv_heads * count, width)
    if rows * kv_heads == 1:
        return times_transposed(grouped[0, 0], value[0, 0].T).view(1, heads, count, value.shape[-1])
    return (grouped @ value).view(rows, heads, count, value.shape[-1])


def for_query_heads(mask: torch.Tensor, query_heads: int) -> torch.Tensor:
    """A mask [B, H, n, W] of deciding heads, repeated for the query heads [B, Q, n, W] that each serves;
    that of a single head stays as it is, since it broadcasts."""
    heads = mask.shape[1]
    return mask if heads == 1 else mask.repeat_interleave(query_heads // heads, 1)


def dense_attention(call: AttentionCall, mask: torch.Tensor | None) -> torch.Tensor:
    """Attention under a mask [B, 1, K or Q, n, W], bool or (without softcap and sink logits)
    a bias added to the logits; None is plain causal, n = W, or a single query that reads all."""
    query, key, value = call.query, call.key, call.value
    fused = call.softcap is None and call.aux is None
    if mask is not None and 1 < mask.shape[1] < query.shape[1]:
        if fused and query.shape[2] > 1 and query.device.type == "cpu":
            return _by_kv_head(call, mask)
        mask = for_query_heads(mask, query.shape[1])
    if fused:
        if query.shape[2] == 1 and query.dtype == torch.float32 and query.device.type == "cpu":
            return _one_query(call, mask)
        if query.shape[2] == 1 and mask is None:
            mask = torch.ones(1, 1, 1, key.shape[2], dtype=torch.bool, device=key.device)
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=call.scaling
        )
    if mask is None:
        count, width = query.shape[2], key.shape[2]
        mask = torch.ones(count, width, dtype=torch.bool, device=key.device)
        mask = (mask.tril() if count > 1 else mask)[None, None]
    logits = attention_logits(call, query, key)
    heads = call.aux.view(-1, 1).float() if call.aux is not None else None
    attention = masked_softmax(logits[:, :, None], mask[:, :, None], heads)[:, :, 0]
    return weighted_values(attention, value)


def _by_kv_head(call: AttentionCall, mask: torch.Tensor) -> torch.Tensor:
    """:func:`dense_attention` under a mask [B, K, n, W], one problem per KV head: the processor's fused
    kernel would turn a mask repeated for every query head into numbers, and that takes longer than
    the attention."""
    rows, query_heads, count, size = call.query.shape
    heads = call.key.shape[1]
    group = query_heads // heads
    key, value = (x.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for x in (call.key, call.value))
    out = torch.nn.functional.scaled_dot_product_attention(
        call.query.reshape(rows * heads, group, count, size),
        key,
        value,
        attn_mask=mask.flatten(0, 1)[:, None],
        scale=call.scaling,
    )
    return out.reshape(rows, query_heads, count, value.shape[-1])


def _one_query(call: AttentionCall, mask: torch.Tensor | None) -> torch.Tensor:
    """:func:`dense_attention` of one query without softcap and sinks. The processor's fused kernel
    wants keys and values repeated for every query head, which costs more than the attention."""
    logits = attention_logits(call, call.query, call.key)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
    return weighted_values(logits.softmax(-1), call.value)
