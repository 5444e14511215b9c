"""What kind of attention each layer of a model has, read from transformers' own tables.

Strategies act in full-attention layers. A sliding or chunked layer already forgets,
and a recurrent one keeps no entries: those keep transformers' own cache classes and
count as fully kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvacc.errors import KvaccError


@dataclass(frozen=True)
class LayerKind:
    """``full``, ``sliding`` (a window of tokens), ``chunked`` or ``other`` (no entries).

    A ``full`` kind with a window is a sliding layer treated as full, which is right up to
    that many tokens; see :meth:`require_length`.
    """

    name: str
    window: int = 0

    def require_length(self, tokens: int) -> None:
        """Raise KvaccError when a layer treated as full would have to slide."""
        if self.name == "full" and self.window and tokens > self.window:
            raise KvaccError(
                f"{tokens} tokens exceed the model's sliding window of {self.window}: its layers would "
                "evict by themselves, beside the strategy; use shorter texts or strategy=full"
            )

    def visible(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
        """bool [..., n, W]: may the query at a position read the key at another, as far
        as the window goes? None where every position may. query [..., n], key [..., W]."""
        if self.name == "sliding":
            return query[..., :, None] - key[..., None, :] < self.window
        if self.name == "chunked":
            return query[..., :, None] // self.window == key[..., None, :] // self.window
        return None


def layer_kinds(config) -> list[LayerKind]:
    """One kind per layer of a model's configuration."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    decoder = config.get_text_config(decoder=True)
    named = getattr(decoder, "layer_types", None)
    kinds = []
    for index, layer in enumerate(DynamicCache(config=decoder).layers):
        if type(layer) is DynamicLayer:
            kinds.append(LayerKind("full"))
        elif type(layer) is DynamicSlidingWindowLayer:
            chunked = named is not None and named[index] == "chunked_attention"
            kinds.append(LayerKind("chunked" if chunked else "sliding", layer.sliding_window))
        else:
            kinds.append(LayerKind("other"))
    return kinds


def shares_latent(config) -> bool:
    """True for multi-head latent attention (DeepSeek): one stored latent serves all
    heads, so there can be only one kept set per layer."""
    return getattr(config.get_text_config(decoder=True), "kv_lora_rank", None) is not None
