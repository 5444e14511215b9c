"""Keys moved to other positions, in the convention of each family."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, NO_ROTATION, build, wrapped

from kvacc.engine import attention
from kvacc.engine.attention import dense_attention
from kvacc.engine.plan import Request
from kvacc.engine.rotary import Rotation, find_rotation
from kvacc.engine.scoring import score_by_steps, score_documents
from kvacc.engine.wrapped import WrappedModel
from kvacc.errors import KvaccError
from kvacc.strategy import make_strategy

ROTARY = sorted(set(FAMILIES) - NO_ROTATION)
MIXES_POSITIONS = {"gpt_oss", "qwen3_next"}
"""Sink logits and recurrent layers: one token repeated is not read alike at all positions."""


class Keys:
    """A session with full attention that keeps the keys of every layer."""

    def __init__(self):
        self.of: dict[int, torch.Tensor] = {}

    def attend(self, call):
        self.of[call.layer] = call.key
        return dense_attention(call, None)


def keys_of_one_repeated_token(model: WrappedModel, length: int = 14) -> dict[int, torch.Tensor]:
    """With one token everywhere every value is the same, so is every attention output, and
    so is what each layer reads: keys of a layer differ by their rotation alone."""
    session = Keys()
    with attention.active(session), torch.inference_mode():
        model.model(input_ids=torch.full((1, length), 9), use_cache=False)
    return session.of


def full_layers(model: WrappedModel) -> list[int]:
    return [i for i, kind in enumerate(model.kinds) if kind.name == "full"]


@pytest.mark.parametrize("family", ROTARY)
def test_every_rotary_family_is_explained(family):
    model = wrapped(family)
    rotation = find_rotation(model.model, full_layers(model), model.latent)
    assert list(rotation.layers) == full_layers(model)
    if family in MIXES_POSITIONS:
        assert all(known is not None for known in rotation.layers.values())
        return
    keys = keys_of_one_repeated_token(model)
    for layer in rotation.layers:
        key = keys[layer]
        scale = float(key.abs().max())
        for place in (1, 5, 13):
            by = torch.full((1, 1, 1), place)
            moved = rotation.rotate(layer, key[:, :, :1], by)
            assert torch.allclose(moved, key[:, :, place : place + 1], atol=2e-4 * scale), (layer, place)
            back = rotation.rotate(layer, key[:, :, place : place + 1], -by)
            assert torch.allclose(back, key[:, :, :1], atol=2e-4 * scale)
        if rotation.layers[layer] is not None:
            assert not torch.allclose(key[:, :, :1], key[:, :, 5:6], atol=1e-2 * scale)


@pytest.mark.parametrize("family", sorted(NO_ROTATION))
def test_families_that_cannot_be_rotated_are_refused(family):
    model = wrapped(family)
    with pytest.raises(KvaccError, match=r"has no rotary positions .*; use positions=original") as raised:
        find_rotation(model.model, full_layers(model), model.latent)
    assert repr(model.family) in str(raised.value) and "\n" not in str(raised.value)


def test_keys_that_follow_another_rule_are_refused(monkeypatch):
    """Frequencies that the model says it uses, but does not."""
    model = wrapped("llama")
    from kvacc.engine import rotary

    real = rotary._frequencies(model.model)
    monkeypatch.setattr(rotary, "_frequencies", lambda _: [f * 1.3 for f in real])
    with pytest.raises(KvaccError, match="positions=original"):
        find_rotation(model.model, [0, 1])


@pytest.mark.parametrize("family", ["llama4_text", "cohere2", "smollm3"])
def test_layers_without_positions_move_nothing(family):
    model = wrapped(family)
    rotation = find_rotation(model.model, full_layers(model))
    unrotated = [layer for layer, known in rotation.layers.items() if known is None]
    assert unrotated
    x = torch.randn(1, 2, 3, 8)
    assert rotation.rotate(unrotated[0], x, torch.full((1, 1, 3), 7)) is x


def test_the_model_is_left_as_it_was():
    model = wrapped("llama")
    tokens = [[Request(tuple(range(3, 15)), (5,), 0, 12)]]
    before = score_documents(model, tokens, make_strategy("full"))
    hooks = [len(m._forward_pre_hooks) for m in model.model.modules()]
    find_rotation(model.model, [0, 1])
    assert [len(m._forward_pre_hooks) for m in model.model.modules()] == hooks
    assert score_documents(model, tokens, make_strategy("full")) == before


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("turned", [8, 4])
class TestRotate:
    """Eight dimensions, of which ``turned`` are rotated."""

    def rotation(self, pairing, turned):
        frequencies = 10_000.0 ** -(torch.arange(0, turned, 2).float() / turned)
        return Rotation({0: (pairing, frequencies)})

    def test_two_moves_are_one(self, pairing, turned):
        rotation = self.rotation(pairing, turned)
        x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(1))
        a = torch.tensor([[[0, 1, 5, 900, -3]], [[2, 2, 2, -700, 40]]])
        b = torch.tensor([[[7, -1, 0, 100, 3]], [[1, -2, 9, 701, 4000]]])
        twice = rotation.rotate(0, rotation.rotate(0, x, a), b)
        assert torch.allclose(twice, rotation.rotate(0, x, a + b), atol=1e-5)
        assert not torch.allclose(twice, x, atol=1e-2)

    def test_no_move_is_nothing_and_length_stays(self, pairing, turned):
        rotation = self.rotation(pairing, turned)
        x = torch.randn(1, 2, 4, 8)
        assert torch.equal(rotation.rotate(0, x, torch.zeros(1, 1, 4, dtype=torch.long)), x)
        moved = rotation.rotate(0, x, torch.full((1, 2, 4), 11))
        assert torch.allclose(moved.norm(dim=-1), x.norm(dim=-1), atol=1e-5)
        assert torch.equal(moved[..., turned:], x[..., turned:])

    def test_heads_may_move_by_different_amounts(self, pairing, turned):
        rotation = self.rotation(pairing, turned)
        x = torch.randn(1, 2, 1, 8)
        both = rotation.rotate(0, x, torch.tensor([[[3], [5]]]))
        for head, by in enumerate((3, 5)):
            one = rotation.rotate(0, x[:, head : head + 1], torch.full((1, 1, 1), by))
            assert torch.equal(both[:, head : head + 1], one)

    def test_by_hand(self, pairing, turned):
        """The slot of frequency 1 turns by one radian per position."""
        x = torch.zeros(1, 1, 1, 8)
        x[..., 0] = 1
        partner = turned // 2 if pairing == "half" else 1
        moved = self.rotation(pairing, turned).rotate(0, x, torch.ones(1, 1, 1, dtype=torch.long))[0, 0, 0]
        expected = torch.zeros(8)
        expected[0], expected[partner] = torch.tensor(1.0).cos(), torch.tensor(1.0).sin()
        assert torch.allclose(moved, expected, atol=1e-6)


def test_bfloat16_stays_bfloat16():
    rotation = Rotation({0: ("half", torch.ones(2))})
    x = torch.randn(1, 1, 2, 4).bfloat16()
    assert rotation.rotate(0, x, torch.ones(1, 1, 2, dtype=torch.long)).dtype == torch.bfloat16


SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32, "rope_theta": 10_000.0,
    },  # fmt: skip
    "yarn": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10_000.0,
    },  # fmt: skip
}  # fmt: skip


@pytest.mark.parametrize("scaling", SCALED)
def test_scaled_rotary_embeddings(scaling):
    model = WrappedModel(build("llama", rope_parameters=SCALED[scaling]))
    strategy = make_strategy("streaming_llm", 8, sinks=2)
    request = Request(tuple(range(3, 43)), (50, 51, 52), 0, 37)
    [[parallel]] = score_documents(model, [[request]], strategy)
    [step], _ = score_by_steps(model, [request], strategy)
    assert parallel.loglikelihood == pytest.approx(step.loglikelihood, abs=1e-3)
    keys = keys_of_one_repeated_token(model)[0]
    moved = model.rotation_for(strategy).rotate(0, keys[:, :, :1], torch.full((1, 1, 1), 13))
    assert torch.allclose(moved, keys[:, :, 13:14], atol=1e-3 * float(keys.abs().max()))
