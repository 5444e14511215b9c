"""Decoders: the step path by itself, with transformers' own kernels beside it."""

from __future__ import annotations

import copy

import pytest
import torch
from families import build
from naive import draw_tokens, sharp

from kvacc.engine.plan import make_plan
from kvacc.engine.scoring import step_forward
from kvacc.engine.stepping import KeptLayer, RowReading
from kvacc.engine.wrapped import WrappedModel
from kvacc.errors import KvaccError
from kvacc.kv_size import kv_bytes_of
from kvacc.probes.decoder import make_decoder, step_path_only
from kvacc.strategy import make_strategy

PROMPT, BATCH = 20, 2
PROMPTS = torch.tensor([draw_tokens(PROMPT), draw_tokens(PROMPT, seed=1)])
ANSWER = torch.tensor([[5, 6, 7], [8, 9, 10]])
FULL = make_strategy("full")


def decoded(decoder, chunk=None, prompts=PROMPTS):
    """Logits [steps, B, V] after the prompt and after each token of the answer."""
    rows = prompts.shape[0]
    return torch.stack([decoder.prefill(prompts, chunk), *(decoder.step(token) for token in ANSWER[:rows].T)])


def whole(model, prompts=PROMPTS):
    """The same by one pass of the model without any cache."""
    tokens = torch.cat([prompts, ANSWER[: prompts.shape[0]]], 1)
    with torch.inference_mode():
        return model(input_ids=tokens, use_cache=False).logits[:, PROMPT - 1 :].transpose(0, 1)


# Logits


@pytest.mark.parametrize("family", ["llama", "opt", "gemma2", "gpt_oss", "deepseek_v3", "biogpt", "gpt_neox"])
def test_kernels_agree_with_a_pass_without_cache(family):
    model = sharp(family).model
    oracle = copy.deepcopy(model)
    oracle.set_attn_implementation("eager")
    expected = whole(oracle)
    for kernel in ("kvacc", "eager"):
        decoder = make_decoder(sharp(family), FULL, PROMPT, BATCH, kernel=kernel)
        found = decoded(decoder)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
        assert found.shape == (4, BATCH, 128) and decoder.passes == 4 and decoder.moved_bytes == [0] * 4
    if family not in ("gemma2", "gpt_oss"):
        found = decoded(make_decoder(model, FULL, PROMPT, BATCH, kernel="sdpa"), chunk=7)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("protocol,dense", [("stream", 0), ("context", 10), ("serve", PROMPT)])
@pytest.mark.parametrize("name", ["h2o", "streaming_llm", "quest"])
def test_a_strategy_is_decoded_as_by_steps_of_one_token(name, protocol, dense):
    strategy = make_strategy(name, 6, **({"dense_layers": 0, "page_size": 2} if name == "quest" else {}))
    wrapped = sharp()
    found = decoded(make_decoder(wrapped, strategy, PROMPT, BATCH, protocol, tail_tokens=32), chunk=6)
    from kvacc.engine import attention

    session = wrapped.step(strategy, [RowReading(0, dense, dense or PROMPT)] * BATCH)
    tokens = torch.cat([PROMPTS, ANSWER], 1)
    with attention.active(session), torch.inference_mode():
        logits = [step_forward(wrapped, session, tokens[:, i : i + 1], i)[:, -1] for i in range(PROMPT + 3)]
    torch.testing.assert_close(found, torch.stack(logits[PROMPT - 1 :]), atol=1e-4, rtol=0)


def test_only_the_last_position_becomes_logits():
    """With families that can be told so, and with those that cannot."""
    for family in ("llama", "biogpt"):
        seen = []
        model = sharp(family).model
        handle = model.get_output_embeddings().register_forward_hook(
            lambda module, given, out, seen=seen: seen.append(out.shape)
        )
        try:
            decoded(make_decoder(sharp(family), FULL, PROMPT, BATCH), chunk=8)
        finally:
            handle.remove()
        assert seen == [(BATCH, 1, 128)] * 6


# The parallel path


def test_the_parallel_path_cannot_be_measured():
    wrapped = sharp()
    from naive import one_request

    from kvacc.engine.plan import build_rows

    plan = make_plan(build_rows([(0, one_request(draw_tokens(9)))]), FULL)
    wrapped.parallel(plan, FULL)
    with step_path_only():
        with pytest.raises(KvaccError, match="no latency or memory figure may come from it"):
            wrapped.parallel(plan, FULL)
        decoded(make_decoder(wrapped, FULL, PROMPT, BATCH))
    wrapped.parallel(plan, FULL)


@pytest.mark.usefixtures("skewing_folder")
def test_what_a_strategy_prepares_is_prepared_before():
    """InfiniGen's columns come from a pass of the parallel path, which is no measurement."""
    from naive import calibration

    wrapped = WrappedModel(build("llama"), calibration=calibration)
    strategy = make_strategy("infinigen", 6)
    with step_path_only():
        decoder = make_decoder(wrapped, strategy, PROMPT, BATCH)
        decoded(decoder)
    # One of two layers is offloaded; a prompt in one pass brings nothing.
    first, *others = decoder.moved_bytes
    per_entry = 2 * 8 * 4
    assert first == 0 and all(0 < moved <= BATCH * 2 * 6 * per_entry for moved in others)


# Bytes


def test_bytes_by_hand():
    """Llama: 2 layers, 2 KV heads of 8 numbers, keys and values in float32."""
    per_entry = 2 * 2 * 8 * 2 * 4
    for kernel in ("kvacc", "eager"):
        decoder = make_decoder(sharp(), FULL, PROMPT, BATCH, kernel=kernel)
        assert decoder.kv_bytes().device == 0
        decoder.prefill(PROMPTS)
        assert decoder.kv_bytes().device == BATCH * PROMPT * per_entry
        decoder.step(ANSWER[:, 0])
        held = decoder.kv_bytes()
        assert held.device == BATCH * (PROMPT + 1) * per_entry and held.host == held.state == 0
    decoder = make_decoder(sharp(), make_strategy("h2o", 0.2), PROMPT, BATCH)
    decoder.prefill(PROMPTS)
    assert decoder.kv_bytes().device == BATCH * 4 * per_entry
    # For each KV head, and slot: a position, a flag and a score.
    assert decoder.bookkeeping_bytes() == BATCH * 2 * 2 * 4 * (8 + 1 + 4)


@pytest.mark.parametrize("family", ["llama", "opt", "gemma3_text", "deepseek_v3", "qwen3_next"])
def test_bytes_are_those_of_the_formula(family):
    """Of transformers' own cache, which nobody here wrote."""
    model = sharp(family).model
    decoder = make_decoder(model, FULL, PROMPT, BATCH, kernel="eager")
    decoded(decoder)
    assert decoder.kv_bytes() == kv_bytes_of(model.config, FULL, PROMPT, 3, BATCH, 4)


def test_hidden_entries_that_are_not_freed_count():
    decoder = make_decoder(sharp(), make_strategy("h2o", 4, scores="full_row"), PROMPT, BATCH, "stream")
    decoder.prefill(PROMPTS)
    assert decoder.kv_bytes().device == BATCH * PROMPT * 256
    assert decoder.session.measured_bytes() < decoder.kv_bytes().device


def test_offloaded_entries_are_in_host_memory():
    strategy = make_strategy("quest", 8, page_size=4, dense_layers=1)
    decoder = make_decoder(sharp(), strategy, PROMPT, BATCH)
    decoder.prefill(PROMPTS)
    held = decoder.kv_bytes()
    assert held.device == held.host == BATCH * PROMPT * 128 and held.summaries > 0


# Recurrent models, and others in which no strategy can act


def recurrent(family):
    import transformers as t

    torch.manual_seed(0)
    small = {"vocab_size": 128, "hidden_size": 16, "num_hidden_layers": 2}
    if family == "mamba":
        model = t.MambaForCausalLM(t.MambaConfig(**small, state_size=4))
    elif family == "mamba2":
        heads = {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 8}
        model = t.Mamba2ForCausalLM(t.Mamba2Config(**small, **heads, state_size=4, expand=2))
    else:
        model = t.RwkvForCausalLM(t.RwkvConfig(**small, attention_hidden_size=16, intermediate_size=32))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "A_log" not in name:
                parameter.normal_(0, 0.6)
    return model.eval()


@pytest.mark.parametrize("family,batch", [("mamba", 2), ("mamba2", 2), ("rwkv", 1)])
def test_recurrent_models_hold_a_state(family, batch):
    model, prompts = recurrent(family), PROMPTS[:batch]
    decoder = make_decoder(model, FULL, PROMPT, batch, kernel="eager")
    torch.testing.assert_close(decoded(decoder, prompts=prompts), whole(model, prompts), atol=1e-4, rtol=0)
    held = decoder.kv_bytes()
    assert held.device == held.host == 0 and held.state > 0
    assert held == kv_bytes_of(model.config, FULL, PROMPT, 3, batch, 4)


@pytest.mark.parametrize("family,batch", [("mamba2", 2), ("rwkv", 1)])
def test_recurrent_models_in_chunks(family, batch):
    model, prompts = recurrent(family), PROMPTS[:batch]
    decoder = make_decoder(model, FULL, PROMPT, batch, kernel="eager")
    torch.testing.assert_close(decoded(decoder, 6, prompts), whole(model, prompts), atol=1e-4, rtol=0)


def test_rwkv_in_batches_is_refused():
    with pytest.raises(KvaccError, match="'rwkv' mixes the rows of a batch.*use batch 1"):
        make_decoder(recurrent("rwkv"), FULL, PROMPT, 2, kernel="eager")


@pytest.mark.parametrize("family", ["falcon", "bloom", "mpt", "gpt_neo", "xglm"])
def test_families_without_the_interface_run_their_own_kernel(family):
    model = build(family)
    found = decoded(make_decoder(model, FULL, PROMPT, BATCH, kernel="eager"))
    torch.testing.assert_close(found, whole(model), atol=1e-4, rtol=0)
    with pytest.raises(
        KvaccError, match="cannot change its kernel after loading: it runs 'eager', and 'sdpa'"
    ):
        make_decoder(model, FULL, PROMPT, BATCH, kernel="sdpa")


# Kernels


def test_the_models_kernel_is_put_back():
    model = sharp().model
    decoder = make_decoder(sharp(), FULL, PROMPT, BATCH, kernel="sdpa")
    assert model.config._attn_implementation == "kvacc"
    used = []
    handle = model.register_forward_pre_hook(lambda *_: used.append(model.config._attn_implementation))
    try:
        decoder.prefill(PROMPTS)
        assert used == ["sdpa"] and model.config._attn_implementation == "kvacc"
        with pytest.raises(IndexError):
            decoder.step(torch.tensor([5, 10_000]))  # no such token
    finally:
        handle.remove()
    assert model.config._attn_implementation == "kvacc"


def test_a_kernel_that_is_not_there_is_one_clear_line():
    if not torch.cuda.is_available():
        with pytest.raises(KvaccError, match="kernel 'flash_attention_2' ") as raised:
            make_decoder(sharp(), FULL, PROMPT, BATCH, kernel="flash_attention_2")
        assert "\n" not in str(raised.value)
    with pytest.raises(KvaccError, match="kernel 'sdpa' is not available for this model here: Gemma2"):
        make_decoder(sharp("gemma2"), FULL, PROMPT, BATCH, kernel="sdpa")
    assert sharp("gemma2").model.config._attn_implementation == "kvacc"
    with pytest.raises(KvaccError, match="no kernel 'sdpa' of it; use kernel=eager"):
        make_decoder(recurrent("mamba"), FULL, PROMPT, BATCH, kernel="sdpa")


@pytest.mark.gpu
def test_flash_attention_on_a_gpu():
    pytest.importorskip("flash_attn")
    model = copy.deepcopy(sharp().model).to("cuda", torch.bfloat16)
    expected = decoded(make_decoder(model, FULL, PROMPT, BATCH, kernel="eager"), prompts=PROMPTS.cuda())
    found = decoded(make_decoder(model, FULL, PROMPT, BATCH, kernel="flash_attention_2"), 7, PROMPTS.cuda())
    assert float((found - expected).square().mean().sqrt()) < 0.1 * float(expected.std())


# Mistakes


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"kernel": "spda"}, r"unknown kernel 'spda' \(did you mean 'sdpa'\?\)"),
        ({"strategy": make_strategy("h2o", 4), "kernel": "sdpa"}, "strategy 'h2o' cannot act in it"),
        ({"strategy": make_strategy("h2o", 4), "protocol": "sreve"}, "unknown protocol"),
        ({"prompt_tokens": 0}, "give at least one of each"),
    ],
)
def test_mistakes(arguments, message):
    asked = {"strategy": FULL, "prompt_tokens": PROMPT, "batch": BATCH, **arguments}
    with pytest.raises(KvaccError, match=message):
        make_decoder(sharp(), **asked)


def test_calls_out_of_order():
    decoder = make_decoder(sharp(), FULL, PROMPT, BATCH)
    with pytest.raises(KvaccError, match="call prefill first"):
        decoder.step(ANSWER[:, 0])
    with pytest.raises(KvaccError, match=r"2 prompts of 20 tokens, and got \(2, 19\)"):
        decoder.prefill(PROMPTS[:, 1:])
    with pytest.raises(KvaccError, match="prefill_chunk 0"):
        decoder.prefill(PROMPTS, 0)
    decoder.prefill(PROMPTS)
    with pytest.raises(KvaccError, match="make another one"):
        decoder.prefill(PROMPTS)
    with pytest.raises(KvaccError, match="one token for each of 2 rows"):
        decoder.step(ANSWER[0, :1])
    assert all(layer.seen == PROMPT for layer in decoder.cache.layers if isinstance(layer, KeptLayer))
