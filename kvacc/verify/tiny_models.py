"""Tiny random models, made without any hub, that a strategy is checked on."""

from __future__ import annotations

from typing import Any

BASE = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Settings of all of them. Families with settings of their own names get those too."""

HYBRID = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_oss": {
        "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **HYBRID,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
    "deepseek_v3": LATENT,
}  # fmt: skip

DESCRIPTIONS = {
    "llama": "grouped queries, rotary positions",
    "gemma2": "a sliding and a full layer, capped logits",
    "opt": "one KV head per query head, learned positions",
    "gpt_oss": "a sliding and a full layer, attention sinks",
    "deepseek_v3": "one latent for all heads",
}
"""What each family brings to a check."""

ATTENTION_INPUTS = (
    "q_proj", "k_proj", "qkv", "c_attn", "query_key_value", "kv_a_proj", "q_a_proj", "q_b_proj",
)  # fmt: skip

LONGEST = 512
"""Tokens that the models of :func:`sharp_model` can read."""


def tiny_model(family: str, layers: int | None = None, **settings: Any):
    """A random model of ``family``, the same on every call. Weights are wide, those of
    queries and keys more so: with attention near uniform, accumulated scores would decide
    nothing and H2O would keep the same entries whatever its rule.

    Args:
        layers: how many; a hybrid's kinds of layers go on in turn.
        settings: the configuration; by default :data:`FAMILIES`' own over :data:`BASE`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = {**BASE, **FAMILIES.get(family, {}), **settings}
    if layers is not None:
        settings["num_hidden_layers"] = layers
        if "layer_types" in settings:
            settings["layer_types"] = (settings["layer_types"] * layers)[:layers]
    config = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(15 if any(word in name for word in ATTENTION_INPUTS) else 3)
    return model


def sharp_model(family: str, layers: int | None = None, **settings: Any):
    """The same with heads that look at a few tokens each: under nearly uniform attention
    every accumulated score is decided by age alone."""
    import torch

    model = tiny_model(family, layers, **settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(0.3 / parameter.std())
    return model


def flat_model(layers: int):
    """A Llama whose every query attends equally to all that it reads: scores tie exactly."""
    import torch

    model = tiny_model("llama", layers, max_position_embeddings=LONGEST)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter.zero_()
    return model
