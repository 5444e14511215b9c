"""Predicted sizes of caches against what caches really hold, to the byte."""

from __future__ import annotations

import pytest
import torch
from families import build, wrapped
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvacc.engine import attention
from kvacc.engine.stepping import RowReading
from kvacc.errors import KvaccError
from kvacc.kv_size import KVBytes, Reading, held_slots, kept_entries, kv_bytes_of, kv_formula
from kvacc.layer_sizes import layer_sizes
from kvacc.strategy import make_strategy
from kvacc.verify.tiny_models import BASE, tiny_model

KINDS = ("opt", "llama", "gpt_bigcode", "deepseek_v3", "gemma3_text", "qwen3_next")
"""Multi-head, grouped-query, multi-query, latent, sliding with full, recurrent with full."""

STRATEGIES = {
    "full": {},
    "h2o": {"budget": 0.3},
    "h2o, count": {"budget": 7},
    "h2o, of seen": {"budget": 0.4, "budget_of": "seen"},
    "streaming_llm": {"budget": 0.3, "sinks": 2, "positions": "original"},
    "recent": {"budget": 1.0},
    "random": {"budget": "1/3"},
    "infinigen": {"budget": 0.3},
    "infinigen, pool": {"budget": 0.3, "pool": 0.5, "partial_ratio": 0.5, "columns": "query"},
    "quest": {"budget": 0.5, "page_size": 4, "dense_layers": 1},
    "quest, dense": {"budget": 0.5},
    "infllm": {"budget": 12, "block": 2, "init": 2, "positions": "original", "dense_layers": 1},
}
PROMPT, ROWS = 22, 2


def strategy_of(case: str):
    return make_strategy(case.split(",")[0], **STRATEGIES[case])


def decode(model, strategy, protocol: str, generated: int, chunk: int = PROMPT, prompt: int = PROMPT):
    """A session that has read a prompt, in chunks, and ``generated`` tokens."""
    dense = {"stream": 0, "serve": prompt, "context": prompt - min(32, prompt // 2)}[protocol]
    session = model.step(strategy, [RowReading(0, dense, dense or prompt)] * ROWS)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(3, 90, (ROWS, prompt + generated), generator=generator)
    with attention.active(session), torch.inference_mode():
        for first in range(0, prompt, chunk):
            part = text[:, first : min(first + chunk, prompt)]
            model.model(input_ids=part, cache=session.cache, use_cache=True)
        for place in range(prompt, prompt + generated):
            model.model(input_ids=text[:, place : place + 1], cache=session.cache, use_cache=True)
    return session


def measured_state(cache) -> int:
    """Bytes of recurrent states, from the tensors themselves."""
    tensors = [
        state
        for layer in cache.layers
        for name in ("conv_states", "recurrent_states")
        for state in getattr(layer, name, {}).values()
    ]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def tensor_bytes(cache) -> int:
    """Bytes of the keys and values that the device's layers hold, from the tensors themselves."""
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@pytest.mark.parametrize("case", STRATEGIES)
@pytest.mark.parametrize("family", KINDS)
def test_bytes_are_as_predicted(family, case):
    model, strategy = wrapped(family), strategy_of(case)
    for protocol, generated, chunk in (("serve", 0, PROMPT), ("stream", 3, PROMPT), ("context", 5, 8)):
        session = decode(model, strategy, protocol, generated, chunk)
        expected = kv_bytes_of(
            model.model.config, strategy, PROMPT, generated, ROWS, 4, protocol, prefill_chunk=chunk
        )
        assert session.host_bytes() == expected.host
        assert tensor_bytes(session.cache) == expected.device
        # The session counts entries; the tensors can have one slot more, free for the next token.
        reading = Reading(PROMPT, generated, ROWS, protocol, prefill_chunk=chunk)
        free = held_slots(strategy, reading) - kept_entries(strategy, reading)
        acting = [size for size in layer_sizes(model.model.config) if size.kind == "full"]
        unused = free * ROWS * 4 * sum(size.numbers_per_token for size in acting)
        assert session.measured_bytes() == expected.device + expected.summaries - unused
        assert measured_state(session.cache) == expected.state


@pytest.mark.parametrize("chunk", (22, 8, 5, 1))
def test_page_bounds_depend_on_the_last_chunk(chunk):
    model, strategy = wrapped("llama"), strategy_of("quest")
    session = decode(model, strategy, "serve", 0, chunk)
    expected = kv_bytes_of(model.model.config, strategy, PROMPT, 0, ROWS, 4, prefill_chunk=chunk)
    assert session.measured_bytes() == expected.device + expected.summaries


def test_a_simulation_frees_nothing():
    model = wrapped("llama")
    strategy = make_strategy("h2o", 0.3, scores="full_row")
    session = decode(model, strategy, "stream", 2)
    expected = kv_bytes_of(model.model.config, strategy, PROMPT, 2, ROWS, 4, "stream")
    assert expected == kv_bytes_of(model.model.config, make_strategy("full"), PROMPT, 2, ROWS, 4, "stream")
    assert tensor_bytes(session.cache) == expected.device


def test_union_of_columns_is_bounded():
    model, strategy = wrapped("llama"), make_strategy("infinigen", 0.3, columns="union")
    session = decode(model, strategy, "serve", 1)
    most = kv_bytes_of(model.model.config, strategy, PROMPT, 1, ROWS, 4)
    paper = kv_bytes_of(model.model.config, make_strategy("infinigen", 0.3), PROMPT, 1, ROWS, 4)
    assert paper.device + paper.summaries <= session.measured_bytes() <= most.device + most.summaries


def test_all_layers_slide():
    from kvacc.engine.wrapped import WrappedModel

    settings = {"sliding_window": 24, "head_dim": 8}
    model = WrappedModel(tiny_model("mistral", **settings))
    full, h2o = make_strategy("full"), make_strategy("h2o", 0.25)
    for generated, kept in ((0, 22), (1, 23), (2, 23), (6, 23)):
        expected = kv_bytes_of(model.model.config, full, PROMPT, generated, ROWS, 4)
        assert expected.device == ROWS * 2 * kept * 2 * 16 * 4  # layers, KV heads, key and value, bytes
        assert decode(model, full, "serve", generated).measured_bytes() == expected.device
    expected = kv_bytes_of(model.model.config, h2o, PROMPT, 2, ROWS, 4)
    assert expected.device == ROWS * 2 * 7 * 2 * 16 * 4  # 6 entries, and a free slot
    assert tensor_bytes(decode(model, h2o, "serve", 2).cache) == expected.device
    with pytest.raises(KvaccError, match="25 tokens exceed the model's sliding window of 24"):
        kv_bytes_of(model.model.config, h2o, PROMPT, 3, ROWS, 4)


MAMBA2 = {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "expand": 2}
BAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2,
}  # fmt: skip
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 4, "head_dim": 8, **MIXED,
}  # fmt: skip
RECURRENT = {
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "mamba2": MAMBA2,
    "jamba": {
        "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False,
    },
    "bamba": {**BAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **BAMBA, **MIXED, "num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 16,
    },
    "falcon_h1": {**BAMBA, "mamba_d_ssm": 64},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16,
        "ssm_state_size": 8, "n_groups": 1, "head_dim": 8,
    },
    "zamba2": {
        "mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 4, "mamba_headdim": 16,
        "num_mem_blocks": 1, "layers_block_type": ["mamba", "hybrid"],
    },
    "qwen3_5_text": DELTA,
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 32},
}  # fmt: skip


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_states_are_as_predicted(family, dtype):
    config = AutoConfig.for_model(family, **{**BASE, **RECURRENT[family]})
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    cache = DynamicCache(config=config)
    with torch.inference_mode():
        for tokens in (PROMPT, 1):
            text = torch.randint(3, 90, (ROWS, tokens))
            model(input_ids=text, cache=cache, use_cache=True)
    expected = kv_bytes_of(config, make_strategy("full"), PROMPT, 1, ROWS, dtype.itemsize)
    assert (tensor_bytes(cache), measured_state(cache)) == (expected.device, expected.state)
    longer = kv_bytes_of(config, make_strategy("full"), 10 * PROMPT, 1, ROWS, dtype.itemsize)
    assert longer.state == expected.state > 0


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_rwkv_state_is_as_predicted(dtype):
    config = AutoConfig.for_model("rwkv", **{**BASE, "attention_hidden_size": 32})
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.inference_mode():
        state = model(input_ids=torch.randint(3, 90, (ROWS, 9)), use_cache=True).state
    expected = kv_bytes_of(config, make_strategy("full"), 9, 0, ROWS, dtype.itemsize)
    assert expected == KVBytes(state=sum(tensor.nbytes for tensor in state))


def test_published_sizes():
    opt = AutoConfig.for_model(
        "opt", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=4
    )
    full = make_strategy("full")
    # OPT-6.7B, 2,048 tokens, FP16: 2 x 32 layers x 4,096 x 2,048 x 2 bytes. It ignores num_key_value_heads.
    assert kv_bytes_of(opt, full, 2048).device == 1_073_741_824
    llama2 = AutoConfig.for_model(
        "llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32
    )
    assert kv_bytes_of(llama2, full, 4096).device == 2 * 2**30
    llama3 = AutoConfig.for_model(
        "llama", hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
    )
    assert kv_bytes_of(llama3, full, 131_072).device == 40 * 2**30
    deepseek = AutoConfig.for_model("deepseek_v3")
    # DeepSeek-V3 keeps (512 + 64) numbers a token and layer; of 128 heads it would be 40,960.
    assert kv_bytes_of(deepseek, full, 1).device == 61 * 576 * 2
    assert layer_sizes(deepseek)[0].expanded_numbers_per_token == 128 * (128 + 64 + 128)


def test_tensor_parallelism_divides_heads_and_repeats_the_last_ones():
    size = layer_sizes(build("llama").config)[0]
    assert [size.shared_among(n).heads for n in (1, 2, 4)] == [2, 1, 1]
    latent = layer_sizes(build("deepseek_v3").config)[0]
    assert latent.shared_among(4).numbers_per_token == latent.numbers_per_token == 12


@pytest.mark.parametrize(
    ("budget", "of", "protocol", "generated", "kept"),
    [
        (0.2, "prompt", "serve", 0, 20),
        (0.2, "prompt", "stream", 50, 20),
        (0.2, "prompt", "context", 10, 14),  # a fifth of the context segment of 100 - 32 tokens
        (0.2, "seen", "serve", 50, 30),
        (300, "prompt", "serve", 50, 150),
        (1.0, "prompt", "stream", 50, 150),
        (0.201, "prompt", "stream", 0, 21),
    ],
)
def test_kept_entries(budget, of, protocol, generated, kept):
    strategy = make_strategy("h2o", budget, of)
    assert kept_entries(strategy, Reading(100, generated, protocol=protocol)) == kept


def test_a_free_slot_is_held_while_decoding():
    h2o, cached = make_strategy("h2o", 0.2), make_strategy("streaming_llm", 20)
    assert [held_slots(h2o, Reading(100, generated)) for generated in (0, 1, 9)] == [20, 21, 21]
    assert held_slots(make_strategy("h2o", 99), Reading(100)) == 100  # one evicted, and its slot is free
    assert held_slots(cached, Reading(100, 9)) == 20  # ranks in the cache matter, so slots stay in order
    assert held_slots(make_strategy("h2o", 300), Reading(100, 9)) == 109


def test_a_strategy_that_acts_at_prefill_only_lets_later_tokens_join():
    from kvacc.strategy import EvictStrategy

    class AtPrefill(EvictStrategy):
        acts_while_decoding = False

    strategy = AtPrefill(budget=0.25)
    assert kept_entries(strategy, Reading(100, 40, protocol="serve")) == 25 + 40
    assert kept_entries(strategy, Reading(100, 40, protocol="context", context_tokens=80)) == 20 + 60
    assert kept_entries(strategy, Reading(100, 40, protocol="stream")) == 25


def test_words():
    text = kv_formula(build("gemma3_text").config, make_strategy("h2o", 0.2), 2)
    assert text == (
        "1 layer, grouped-query attention: 2 KV heads x (8 + 8 numbers) x 2 bytes = 64 bytes a token, "
        "the newest 7 tokens; 1 layer, grouped-query attention: 2 KV heads x (8 + 8 numbers) x 2 bytes = "
        "64 bytes a token, budget 0.2"
    )
    text = kv_formula(build("qwen3_next").config, make_strategy("full"), 2)
    assert text.startswith("1 layer: 1,536 bytes of recurrent state a row; 1 layer, grouped-query attention")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens 0 is too small"),
        ({"generated": -1}, "generated -1 is too small"),
        ({"protocol": "chat"}, "unknown protocol 'chat'"),
        ({"context_tokens": 30}, "context_tokens 30 is more than the prompt's 20"),
    ],
)
def test_bad_numbers(arguments, message):
    with pytest.raises(KvaccError, match=message):
        Reading(**{"prompt_tokens": 20, **arguments})


def test_what_is_not_known_is_refused():
    config = build("llama").config
    with pytest.raises(KvaccError, match="reads future tokens"):
        kv_bytes_of(config, make_strategy("h2o", 0.2, scores="global"), 20, protocol="stream")
    with pytest.raises(KvaccError, match="does not support protocol 'serve'"):
        kv_bytes_of(config, make_strategy("h2o", 0.2, scores="full_row"), 20)
    with pytest.raises(KvaccError, match="recurrent state of model family 'minimax' is not known"):
        layer_sizes(AutoConfig.for_model("minimax"))
