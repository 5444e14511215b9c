"""What both paths share for strategies that select: what each query of a layer reads, the
attention over it, and how good the selection was."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvacc.engine.attention import (
    AttentionCall,
    attention_logits,
    dense_attention,
    for_query_heads,
    weighted_values,
)
from kvacc.engine.rotary import Rotation
from kvacc.engine.scan import masked_softmax
from kvacc.engine.speculation import Speculation
from kvacc.select_strategy import (
    Asked,
    LayerContext,
    Selection,
    Selector,
    SelectStrategy,
    count_true,
    highest,
)
from kvacc.strategy import Strategy


def selects_in(strategy: Strategy, layer: int, speculation: Speculation | None) -> bool:
    """Does the strategy select in this full-attention layer? Else the layer reads everything."""
    if not isinstance(strategy, SelectStrategy) or layer < strategy.dense_layers:
        return False
    return speculation is None or speculation.can_guess(layer)


def layer_context(
    call: AttentionCall,
    heads: int,
    compressed: torch.Tensor,
    rotation: Rotation | None,
    speculation: Speculation | None,
) -> LayerContext:
    """What the selector of this call's layer may use."""
    layer = call.layer
    return LayerContext(
        layer,
        heads,
        compressed,
        None if rotation is None else lambda x, by: rotation.rotate(layer, x, by),
        None if speculation is None else lambda key: speculation.skewed(layer, key),
    )


def attend_selected(
    call: AttentionCall,
    selection: Selection,
    rotation: Rotation | None,
    position: torch.Tensor,
    entries: torch.Tensor,
) -> torch.Tensor:
    """Attention over what is visible, entries that are ``far`` at their fixed distance.

    Args:
        position: long [B, n]; entries: long [B, 1 or H, W], places in the text.

    Returns:
        [B, Q, n, V]
    """
    rows, query_heads, count, _ = call.query.shape
    visible = selection.visible
    heads, width = visible.shape[1], visible.shape[-1]
    empty = count_true(visible) == 0
    # Padding reads something, so that no row of the softmax is empty.
    mask = visible | empty[..., None] if bool(empty.any()) else visible
    if selection.far is None and call.softcap is None and call.aux is None:
        return dense_attention(call, mask)
    mask = for_query_heads(mask, query_heads)
    logits = attention_logits(call, call.query, call.key)
    if selection.far is not None:
        far = selection.far.expand(rows, heads, count, width)
        far = for_query_heads(far, query_heads)
        query = rotation.rotate(call.layer, call.query, (selection.distance - position)[:, None])
        key = rotation.rotate(call.layer, call.key, -entries)
        logits = torch.where(far, attention_logits(call, query, key), logits)
    aux = None if call.aux is None else call.aux.float().view(-1, 1)
    attention = masked_softmax(logits[:, :, None], mask[:, :, None], aux)[:, :, 0]
    return weighted_values(attention, call.value)


def entry_bytes(call: AttentionCall, latent: bool) -> int:
    """Bytes of one entry of a deciding head: its key and value, or with ``latent`` attention
    the latent and the rotary part that stand for those of all heads."""
    if latent:
        return (call.module.kv_lora_rank + call.module.qk_rope_head_dim) * call.key.element_size()
    return (call.key.shape[-1] + call.value.shape[-1]) * call.key.element_size()


@dataclass
class Quality:
    """How good a selection was, for each query [B, n].

    Attributes:
        mass: share of the true attention, over all that is readable, that falls on what was
            read; mean over query heads.
        recall: share of the true top entries, as many as were read, that were read; mean over
            deciding heads. The true order of a KV head is by the attention of its query heads
            together.
    """

    mass: torch.Tensor
    recall: torch.Tensor


def quality(call: AttentionCall, visible: torch.Tensor, readable: torch.Tensor) -> Quality:
    """How good a selection is.

    Args:
        visible: bool [B, H, n, W], what was read; readable: bool [B, n, W], what could be.
    """
    rows, query_heads, count, width = call.query.shape[0], call.query.shape[1], *readable.shape[1:]
    heads = visible.shape[1]
    logits = attention_logits(call, call.query, call.key)
    logits = logits.view(rows, heads, query_heads // heads, count, width)
    attention = masked_softmax(logits, readable[:, None, None], None)
    mass = (attention * visible[:, :, None]).sum(-1).mean((1, 2))
    read = count_true(visible)
    best = highest(attention.sum(2), read, readable[:, None])
    recall = count_true(best & visible) / read.clamp(min=1)
    return Quality(mass.double(), recall.double().mean(1))


def mass_by_head(call: AttentionCall, visible: torch.Tensor, readable: torch.Tensor) -> torch.Tensor:
    """Share of the true attention, over all that is readable, that falls on what is visible.

    Logits that only join the denominator (GPT-OSS's sinks) scale both alike, so they are left out.

    Args:
        visible: bool [B, H, n, W]; readable: bool [B, n, W].

    Returns:
        float64 [B, H, n], mean over the query heads of each deciding head.
    """
    rows, query_heads, count, width = *call.query.shape[:3], visible.shape[-1]
    heads = visible.shape[1]
    logits = attention_logits(call, call.query, call.key)
    logits = logits.view(rows, heads, query_heads // heads, count, width)
    attention = masked_softmax(logits, readable[:, None, None], None)
    return (attention * visible[:, :, None]).sum(-1, dtype=torch.float64).mean(2)


def ask(selector: Selector, asked: Asked) -> Selection:
    """The selector's answer; where the strategy does not act, everything readable is read."""
    chosen = selector.select(asked)
    acts = asked.acts[:, None, :, None]
    readable = asked.readable[:, None]
    visible = chosen.visible & readable
    if not bool(asked.acts.all()):
        visible = torch.where(acts, visible, readable)
    far = None if chosen.far is None else chosen.far & visible & acts
    return Selection(visible, far, chosen.distance)
