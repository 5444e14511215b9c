"""What each layer of a model stores for a token, read from its configuration alone.

======================  =====================================================================
multi-head              a key and a value for every attention head
grouped-query           several query heads share one key and value (arXiv:2305.13245)
multi-query             all query heads share one (arXiv:1911.02150)
multi-head latent       one latent for all heads and a rotary part (DeepSeek-V2,
                        arXiv:2405.04434, section 2.1); transformers 5 and serving engines store
                        that, transformers 4 stored the keys and values of all heads made from it
sliding, chunked        one of the above, for a window of tokens
recurrent               a state of constant size: Mamba, gated delta rule, short convolution, RWKV
======================  =====================================================================

Every formula is compared with what transformers' own cache holds, in tests/test_kv_size.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

from kvacc.errors import KvaccError

FLOAT32 = 4
"""Bytes; recurrent states are kept in float32 whatever the model's type."""


@dataclass(frozen=True)
class LayerSize:
    """What one layer stores.

    Attributes:
        kind: ``full``, ``sliding``, ``chunked``, ``indexed``, or ``none`` where there are no entries.
        heads: KV heads that are stored; 1 where all heads share a latent.
        key_size, value_size: numbers per entry and KV head. With a shared latent, the latent
            and its rotary part.
        query_heads: heads that attend.
        full_key_size, full_value_size: sizes of the keys and values that queries meet.
        latent: one latent stands for the keys and values of all heads.
        window: tokens that a sliding or chunked layer's query reads; 0 elsewhere.
        index_size: numbers per token of a sparse attention's index (DeepSeek V3.2).
        state_numbers: numbers of a recurrent state in the model's type, per row: the inputs
            that its convolution still needs.
        state_numbers_float32: numbers of the recurrent state itself, per row.
    """

    kind: str
    heads: int = 0
    key_size: int = 0
    value_size: int = 0
    query_heads: int = 0
    full_key_size: int = 0
    full_value_size: int = 0
    latent: bool = False
    window: int = 0
    index_size: int = 0
    state_numbers: int = 0
    state_numbers_float32: int = 0

    @property
    def numbers_per_token(self) -> int:
        """Numbers stored for a token, of all KV heads."""
        return self.heads * (self.key_size + self.value_size)

    @property
    def expanded_numbers_per_token(self) -> int:
        """The same where the keys and values of all heads are stored, although one latent
        stands for them: what transformers 4 did with multi-head latent attention."""
        if not self.latent:
            return self.numbers_per_token
        return self.query_heads * (self.full_key_size + self.full_value_size)

    @property
    def has_state(self) -> bool:
        """The layer, or a part of it, is recurrent."""
        return self.state_numbers + self.state_numbers_float32 > 0

    @property
    def attention(self) -> str:
        """The kind of attention in words."""
        if self.kind == "none":
            return "recurrent" if self.has_state else "no cache"
        if self.latent:
            return "multi-head latent"
        if self.heads == self.query_heads:
            return "multi-head"
        return "multi-query" if self.heads == 1 else "grouped-query"

    def stored_tokens(self, tokens: int) -> int:
        """Of ``tokens`` tokens, those whose entries the layer holds if nothing is evicted.

        transformers' sliding and chunked layers hold one token less than the window: the next
        query brings the one that is missing.
        """
        if self.kind in ("sliding", "chunked") and self.window > 1:
            return min(tokens, self.window - 1)
        return tokens

    def state_bytes(self, number_bytes: int) -> int:
        """Bytes of the recurrent state of one row."""
        return self.state_numbers * number_bytes + self.state_numbers_float32 * FLOAT32

    def shared_among(self, devices: int) -> LayerSize:
        """The part of each of ``devices`` under tensor parallelism, the largest if they differ.

        Query and KV heads and recurrent channels are divided. A KV head is repeated where there
        are fewer than devices; a latent, and an index, stand on every device.
        """
        share = {name: -(-getattr(self, name) // devices) for name in ("query_heads", "state_numbers")}
        share["state_numbers_float32"] = -(-self.state_numbers_float32 // devices)
        if not self.latent:
            share["heads"] = -(-self.heads // devices)
        return replace(self, **share)


def layer_sizes(config) -> list[LayerSize]:
    """One for each layer of a model's configuration (a transformers ``PreTrainedConfig``).

    Raises:
        KvaccError: a recurrent family whose state is not known here.
    """
    from transformers.cache_utils import DynamicCache

    decoder = config.get_text_config(decoder=True)
    if decoder.model_type == "rwkv":  # it has a cache of its own, which transformers' classes do not name
        return [LayerSize("none", **_state(decoder))] * decoder.num_hidden_layers
    of_layer = decoder.per_layer_config
    named = getattr(decoder, "layer_types", None)
    # A hybrid's types may stand under another name, so the cache's classes are asked, not the names.
    return [
        _layer_size(of_layer[index], cached, named[index] if named else None)
        for index, cached in enumerate(DynamicCache(config=decoder).layers)
    ]


def _layer_size(config, cached, named: str | None) -> LayerSize:
    from transformers.cache_utils import (
        DummyLayer,
        DynamicIndexedLayer,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionCacheLayerMixin,
    )

    if isinstance(cached, DummyLayer):
        return LayerSize("none")
    state = _state(config) if isinstance(cached, LinearAttentionCacheLayerMixin) else {}
    if not isinstance(cached, DynamicLayer):
        return LayerSize("none", **state)
    if isinstance(cached, DynamicSlidingWindowLayer):
        kind = "chunked" if named == "chunked_attention" else "sliding"
        return LayerSize(kind, window=cached.sliding_window, **_entry(config, sliding=True), **state)
    if isinstance(cached, DynamicIndexedLayer):
        index = _required(config, "index_head_dim")
        return LayerSize("indexed", index_size=index, **_entry(config), **state)
    known = (DynamicLayer, LinearAttentionCacheLayerMixin)
    if type(cached) is not DynamicLayer and not (state and isinstance(cached, known)):
        raise KvaccError(
            f"model family {config.model_type!r} has a cache of its own ({type(cached).__name__}), whose "
            "size is not known here; measure it with `kvacc probe`"
        )
    return LayerSize("full", **_entry(config), **state)


def declared(config, name: str) -> Any:
    """A value of a configuration, or None where its family knows no such thing. Some families
    accept settings that they then ignore (OPT with ``num_key_value_heads``)."""
    if not dataclasses.is_dataclass(config):
        return getattr(config, name, None)
    known = {*(field.name for field in dataclasses.fields(config)), *(config.attribute_map or ())}
    return getattr(config, name, None) if name in known else None


def _required(config, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise KvaccError(
            f"the configuration of model family {config.model_type!r} has {name}={value!r}; to say what its "
            "cache holds, a whole number of at least 1 is needed"
        )
    return value


def _entry(config, sliding: bool = False) -> dict[str, Any]:
    """Heads and sizes of the entries of one attention layer."""
    query_heads = _required(config, "num_attention_heads")
    if declared(config, "kv_lora_rank"):
        rotary = _required(config, "qk_rope_head_dim")
        return {
            "heads": 1,
            "key_size": config.kv_lora_rank,
            "value_size": rotary,
            "query_heads": query_heads,
            "full_key_size": _required(config, "qk_nope_head_dim") + rotary,
            "full_value_size": _required(config, "v_head_dim"),
            "latent": True,
        }
    prefix = "swa_" if sliding and declared(config, "swa_head_dim") else ""
    if prefix:
        query_heads = declared(config, "swa_num_attention_heads") or query_heads
    size = declared(config, f"{prefix}head_dim") or _required(config, "hidden_size") // query_heads
    value_size = declared(config, f"{prefix}v_head_dim") or size
    return {
        "heads": declared(config, f"{prefix}num_key_value_heads") or _kv_heads(config, query_heads),
        "key_size": size,
        "value_size": value_size,
        "query_heads": query_heads,
        "full_key_size": size,
        "full_value_size": value_size,
    }


def _kv_heads(config, query_heads: int) -> int:
    """KV heads of a family that does not call them ``num_key_value_heads``."""
    if config.model_type == "falcon" and config.new_decoder_architecture:
        return config.num_kv_heads
    if declared(config, "multi_query"):
        return 1
    return query_heads


def _state(config) -> dict[str, int]:
    """Numbers of a recurrent layer's state: (of its convolution, of the state itself)."""
    family = config.model_type
    for families, numbers in _STATES.items():
        if family in families:
            convolution, state = numbers(config)
            return {"state_numbers": convolution, "state_numbers_float32": state}
    raise KvaccError(
        f"the recurrent state of model family {family!r} is not known here; known: "
        f"{', '.join(sorted(name for families in _STATES for name in families))}"
    )


def _mamba(c) -> tuple[int, int]:
    return c.intermediate_size * c.conv_kernel, c.intermediate_size * c.state_size


def _jamba(c) -> tuple[int, int]:
    inner = c.mamba_expand * c.hidden_size
    return inner * c.mamba_d_conv, inner * c.mamba_d_state


def _mamba2(c) -> tuple[int, int]:
    inner = int(c.expand * c.hidden_size)
    return (inner + 2 * c.n_groups * c.state_size) * c.conv_kernel, c.num_heads * c.head_dim * c.state_size


def _bamba(c) -> tuple[int, int]:
    inner = getattr(c, "mamba_d_ssm", None) or int(c.mamba_expand * c.hidden_size)
    convolved = inner + 2 * c.mamba_n_groups * c.mamba_d_state
    return convolved * c.mamba_d_conv, c.mamba_n_heads * c.mamba_d_head * c.mamba_d_state


def _nemotron(c) -> tuple[int, int]:
    inner = c.mamba_num_heads * c.mamba_head_dim
    return (inner + 2 * c.n_groups * c.ssm_state_size) * c.conv_kernel, inner * c.ssm_state_size


def _zamba2(c) -> tuple[int, int]:
    convolved = int(c.mamba_expand * c.hidden_size) + 2 * c.mamba_ngroups * c.mamba_d_state
    return convolved * c.mamba_d_conv, c.n_mamba_heads * c.mamba_headdim * c.mamba_d_state


def _delta_rule(c) -> tuple[int, int]:
    keys = c.linear_num_key_heads * c.linear_key_head_dim
    values = c.linear_num_value_heads * c.linear_value_head_dim
    return (2 * keys + values) * c.linear_conv_kernel_dim, values * c.linear_key_head_dim


def _short_convolution(c) -> tuple[int, int]:
    return c.hidden_size * c.conv_L_cache, 0


def _rwkv(c) -> tuple[int, int]:
    return 2 * c.hidden_size, 3 * c.hidden_size


_STATES = {
    ("mamba", "falcon_mamba"): _mamba,
    ("jamba",): _jamba,
    ("mamba2",): _mamba2,
    ("bamba", "granitemoehybrid", "falcon_h1"): _bamba,
    ("nemotron_h",): _nemotron,
    ("zamba2",): _zamba2,
    ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"): _delta_rule,
    ("lfm2", "lfm2_moe"): _short_convolution,
    ("rwkv",): _rwkv,
}
