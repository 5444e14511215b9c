"""Tiny random models of the families that kvacc supports, and those that it refuses."""

from __future__ import annotations

import functools

from kvacc.verify.tiny_models import HYBRID, LATENT, tiny_model

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
FAMILIES = {
    "llama": {},
    "smollm3": {"num_hidden_layers": 4},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**EXPERTS, "head_dim": 8},
    "mistral": {"sliding_window": None},
    "ministral": {"head_dim": 8, **HYBRID},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, **HYBRID},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **HYBRID},
    "cohere": {},
    "cohere2": HYBRID,
    "olmo": {},
    "olmo2": {},
    "olmo3": HYBRID,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "phimoe": {"num_local_experts": 4},
    "stablelm": {"partial_rotary_factor": 0.25},
    "starcoder2": {},
    "granite": {},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        "num_hidden_layers": 4, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 32,
        "attention_chunk_size": 8, "moe_layers": [],
    },  # fmt: skip
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gptj": {**GPT, "rotary_dim": 4},
    "codegen": {**GPT, "rotary_dim": 4},
    "gpt_neox": {},
    "persimmon": {},
    "biogpt": {},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "exaone4": HYBRID,
    "ernie4_5": {},
    "helium": {"head_dim": 8},
    "nemotron": {},
    "arcee": {},
    "bitnet": {},
    "seed_oss": {"head_dim": 8},
    "apertus": {},
    "hunyuan_v1_dense": {"head_dim": 8},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "qwen3_next": {
        "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, **EXPERTS,
        "shared_expert_intermediate_size": 16,
    },  # fmt: skip
}  # fmt: skip

REFUSED = {
    "falcon": {},
    "bloom": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "xglm": {"d_model": 32, "ffn_dim": 48, "attention_heads": 4, "num_layers": 2},
}

NO_ROTATION = {"opt", "gpt2", "gpt_bigcode", "biogpt", "deepseek_v2", "deepseek_v3", "hunyuan_v1_dense"}
"""Families whose keys cannot be moved to other positions: learned positions, a shared
latent that is not rotated as a whole, or keys normalised after the rotation."""


def build(family: str, **changes):
    """A random model of ``family``, the same on every call."""
    return tiny_model(family, **{**{**FAMILIES, **REFUSED}.get(family, {}), **changes})


@functools.cache
def wrapped(family: str):
    """The family's model under kvacc's attention, made once per test session."""
    from naive import calibration

    from kvacc.engine.wrapped import WrappedModel

    return WrappedModel(build(family), calibration=calibration)
