"""Queries guessed from the layer before, against projections computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from families import NO_ROTATION, build
from naive import calibration, draw_tokens, sharp
from naive_select import DECODERS, read_at_once, read_by_steps

from kvacc.engine import attention, speculation
from kvacc.engine.skewing import Skewing
from kvacc.engine.speculation import Inputs, Speculation
from kvacc.engine.wrapped import WrappedModel
from kvacc.strategy import make_strategy

pytestmark = pytest.mark.usefixtures("skewing_folder")
TOKENS = draw_tokens(24, seed=9)
EVERYTHING = make_strategy("infinigen", 1.0, partial_ratio=1)


@pytest.fixture
def guesses(monkeypatch):
    """(layer, speculated queries, the speculation) of every call, in order."""
    made = []
    original = Speculation.queries

    def queries(self, call, packing=None):
        made.append((call.layer, original(self, call, packing), self))
        return made[-1][1]

    monkeypatch.setattr(Speculation, "queries", queries)
    return made


def hidden_states(decoder, tokens):
    """The attention input of every layer under full attention, by the oracle."""
    from naive_select import select

    inputs, original = [], decoder.attention_input
    decoder.attention_input = lambda layer, hidden: inputs.append(original(layer, hidden)) or inputs[-1]
    select(decoder, tokens, None, dense_layers=len(decoder.blocks))
    return inputs


def by_hand(family, model, spec, layer, hidden):
    """Skewed queries [Q, T, C] that a layer makes of an attention input."""
    decoder = DECODERS[family](model)
    query = decoder.turn(decoder.project(layer, hidden)[0], list(range(len(hidden)))).transpose(0, 1)
    group = decoder.query_heads // decoder.kv_heads
    if family == "opt":  # scales its queries before attention instead of in it
        query = query * decoder.dim**-0.5
    return query @ spec.basis[layer].repeat_interleave(group, 0)


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("ratio", [1, 0.3])
def test_a_guess_is_the_layers_own_query_of_the_input_before(family, ratio, guesses):
    model = sharp(family, num_hidden_layers=3)
    strategy = make_strategy("infinigen", 1.0, partial_ratio=ratio)
    with torch.inference_mode():
        inputs = hidden_states(DECODERS[family](model.model), TOKENS)
        read_at_once(model, strategy, TOKENS)
        assert [layer for layer, _, _ in guesses] == [1, 2]
        for layer, query, spec in guesses:
            assert query.shape == (1, 4, 24, math.ceil(8 * ratio))
            expected = by_hand(family, model.model, spec, layer, inputs[layer - 1])
            torch.testing.assert_close(query[0], expected, atol=1e-4, rtol=1e-4)
            own = by_hand(family, model.model, spec, layer, inputs[layer])
            assert (own - expected).abs().max() > 0.2  # a guess, not the layer's own query


def test_the_steps_guess_the_same(guesses, monkeypatch):
    model = sharp("llama", num_hidden_layers=3)
    read_at_once(model, EVERYTHING, TOKENS)
    at_once = {layer: query for layer, query, _ in guesses}
    guesses.clear()
    read_by_steps(model, EVERYTHING, TOKENS, [5, 10, 9])
    for layer, whole in at_once.items():
        parts = [query for number, query, _ in guesses if number == layer]
        assert len(parts) == 3
        torch.testing.assert_close(torch.cat(parts, 2), whole, atol=1e-4, rtol=1e-4)


def test_an_input_changed_in_one_layer_moves_the_guess_of_the_next(guesses):
    model = WrappedModel(build("llama", num_hidden_layers=3), calibration=calibration)
    model.speculation_for(EVERYTHING)  # calibrated before the change
    read_at_once(model, EVERYTHING, TOKENS)
    before = {layer: query for layer, query, _ in guesses}
    guesses.clear()
    # Layer 1 is given another input. Its own guess was made of layer 0's.
    norm = model.model.model.layers[1].input_layernorm
    handle = norm.register_forward_hook(lambda module, inputs, output: 1.5 * output)
    read_at_once(model, EVERYTHING, TOKENS)
    handle.remove()
    after = {layer: query for layer, query, _ in guesses}
    assert torch.equal(before[1], after[1])
    # Projections and rotations are linear (no biases in a Llama).
    torch.testing.assert_close(after[2], 1.5 * before[2], atol=1e-4, rtol=1e-4)


def test_the_current_layers_own_query(guesses):
    model = sharp("llama", num_hidden_layers=3)
    strategy = make_strategy("infinigen", 1.0, partial_ratio=1, speculate_from="current", dense_layers=0)
    with torch.inference_mode():
        inputs = hidden_states(DECODERS["llama"](model.model), TOKENS)
        read_at_once(model, strategy, TOKENS)
        assert [layer for layer, _, _ in guesses] == [0, 1, 2]
        for layer, query, spec in guesses:
            expected = by_hand("llama", model.model, spec, layer, inputs[layer])
            torch.testing.assert_close(query[0], expected, atol=1e-4, rtol=1e-4)


# --- folding ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["opt", "gpt2", "gpt_bigcode", "biogpt"])
def test_a_folded_guess_is_the_same(family, guesses, monkeypatch):
    layers = {"n_layer": 3} if family.startswith("gpt") else {"num_hidden_layers": 3}
    model = WrappedModel(build(family, **layers), calibration=calibration)
    strategy = make_strategy("infinigen", 8, alpha=3.0)
    logits, reads, _ = read_at_once(model, strategy, TOKENS)
    folded = list(guesses)
    assert all(spec.foldable and spec._folded[layer] is not None for layer, _, spec in folded)
    guesses.clear()
    model._speculations.clear()
    monkeypatch.setattr("kvacc.engine.wrapped.has_rotary_positions", lambda model: True)
    plain, chosen, _ = read_at_once(model, strategy, TOKENS)
    assert not any(spec._folded for _, _, spec in guesses)
    for (layer, one, _), (number, other, _) in zip(folded, guesses, strict=True):
        assert layer == number
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(reads[layer], chosen[layer]) for layer in reads)
    torch.testing.assert_close(logits, plain, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gptj", "gpt_neox", "phi", "cohere", "deepseek_v3"])
def test_rotary_positions_are_never_folded(family, guesses, monkeypatch):
    monkeypatch.setattr(Speculation, "_fold", lambda *_: pytest.fail("folded"))
    model = WrappedModel(build(family), calibration=calibration)
    source = dict(speculate_from="current", dense_layers=0) if family == "gemma2" else {}
    read_at_once(model, make_strategy("infinigen", 8, **source), TOKENS)
    assert guesses and not any(spec.foldable for _, _, spec in guesses)


def test_a_query_that_is_not_linear_is_not_folded(guesses):
    # As a family without rotary positions that normalises its queries would have it.
    model = WrappedModel(build("opt", num_hidden_layers=3), calibration=calibration)
    for block in model.model.model.decoder.layers:
        projection = block.self_attn.q_proj
        projection.register_forward_hook(lambda module, inputs, output: output.sin())
    strategy = make_strategy("infinigen", 1.0, partial_ratio=1)
    with torch.inference_mode():
        read_at_once(model, strategy, TOKENS)
    assert [spec._folded[layer] for layer, _, spec in guesses] == [None, None]


# --- what a guess leaves behind -----------------------------------------------------------


def hooks(model):
    return sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.model.modules()
    )


@pytest.mark.parametrize("read", [read_at_once, read_by_steps])
def test_hooks_are_gone_after_a_pass(read):
    model = sharp("llama", num_hidden_layers=3)
    read(model, EVERYTHING, TOKENS)
    assert hooks(model) == 0


@pytest.mark.parametrize("read", [read_at_once, read_by_steps])
def test_hooks_are_gone_after_an_exception(read, monkeypatch):
    model = sharp("llama", num_hidden_layers=3)
    inputs = model.speculation_for(EVERYTHING).inputs

    def fail(*_):
        assert hooks(model) >= 3 and inputs.seen
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(model.model.model.layers[2].mlp, "forward", fail)
        with pytest.raises(RuntimeError, match="broken"):
            read(model, EVERYTHING, TOKENS)
    assert hooks(model) == 0 and not inputs.seen
    assert attention._ACTIVE.get() is None
    read(model, EVERYTHING, TOKENS)


@pytest.mark.parametrize("chunks", [None, [24], [3, 1, 20]])
@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neox", "deepseek_v3"])
def test_a_guess_stores_no_entries(family, chunks):
    # A guess runs the layer's module, which stores its keys where it is given a cache.
    changes = {"num_hidden_layers": 3}
    model = (
        sharp(family, **changes)
        if family != "deepseek_v3"
        else WrappedModel(build(family, **changes), calibration=calibration)
    )
    strategy = make_strategy("infinigen", 1.0)
    full, _, _ = read_at_once(model, make_strategy("full"), TOKENS)
    logits, _, session = read_by_steps(model, strategy, TOKENS, chunks)
    torch.testing.assert_close(logits, full, atol=1e-3, rtol=0)
    dense, *offloaded = session.cache.layers
    assert dense.seen == dense.keys.shape[2] == 24
    assert [layer.seen for layer in offloaded] == [24, 24]
    assert all(layer.selector.state["partial_keys"].shape[2] == 24 for layer in offloaded)


def test_the_layer_before_is_the_one_whose_input_is_known():
    inputs = speculation.Inputs({4: None, 1: None, 2: None})
    assert [inputs.before(layer) for layer in (1, 2, 4)] == [None, 1, None]
    # A recurrent layer has an input too.
    inputs = speculation.Inputs({4: None, 1: None, 2: None}, {0: None, 3: None})
    assert [inputs.before(layer) for layer in (1, 2, 4)] == [0, 1, 3]


def test_a_layer_after_a_recurrent_one_guesses_from_its_input(guesses):
    model = WrappedModel(build("qwen3_next"), calibration=calibration)
    inputs = []
    norms = [layer.input_layernorm for layer in model.model.model.layers]
    handle = norms[0].register_forward_hook(lambda module, arguments, output: inputs.append(output))
    read_at_once(model, EVERYTHING, TOKENS)
    handle.remove()
    [(layer, query, spec)] = guesses
    assert layer == 1 and spec.inputs.before(1) == 0
    # The query's projection (half of it is a gate), its norm, and the model's rotation.
    attention_of = model.model.model.layers[1].self_attn
    with torch.inference_mode():
        hidden = inputs[-1][0]
        made = attention_of.q_proj(hidden).view(len(hidden), 4, 2 * attention_of.head_dim)
        made = attention_of.q_norm(made[..., : attention_of.head_dim])
        cos, sin = model.model.model.rotary_emb(made, torch.arange(len(hidden))[None])
        cos, sin = cos[0, :, None], sin[0, :, None]
        part, rest = made[..., : cos.shape[-1]], made[..., cos.shape[-1] :]
        half = part.shape[-1] // 2
        turned = part * cos + torch.cat([-part[..., half:], part[..., :half]], -1) * sin
        made = torch.cat([turned, rest], -1).transpose(0, 1)
        group = 4 // spec.basis[1].shape[0]
        expected = made @ spec.basis[1].repeat_interleave(group, 0)
    torch.testing.assert_close(query[0], expected, atol=1e-4, rtol=1e-4)


def test_no_rotation_and_rotary_families_are_told_apart():
    from kvacc.engine.rotary import has_rotary_positions

    without = {"opt", "gpt2", "gpt_bigcode", "biogpt"}
    assert without <= NO_ROTATION
    for family in without:
        assert not has_rotary_positions(build(family))
    for family in ("llama", "gptj", "codegen", "gpt_neox", "deepseek_v3", "hunyuan_v1_dense"):
        assert has_rotary_positions(build(family))


def test_layers_of_another_kind_or_on_another_device_are_not_guessed_ahead():
    # What the running layer was given would be of the wrong kind, or in the wrong place, for the next.
    settings = make_strategy("infinigen", 4).speculation
    linear = torch.nn.Linear(2, 2)
    for other in (torch.nn.Linear(2, 2, device="meta"), torch.nn.Bilinear(2, 2, 2)):
        guess = Speculation(Inputs({0: linear, 1: other}), Skewing({}, {}, {}), settings, foldable=False)
        assert guess.queries_ahead(1, 0) is None
