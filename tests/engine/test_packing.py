"""Batches without their padding."""

from __future__ import annotations

import pytest
import torch
from families import NO_ROTATION, build
from naive import sharp

from kvacc.engine import wrapped as wrapped_module
from kvacc.engine.packing import TokenPacking, packing_of
from kvacc.engine.plan import Request, build_rows, make_plan
from kvacc.engine.scoring import batch_sizes, score_documents
from kvacc.engine.wrapped import WrappedModel
from kvacc.strategy import make_strategy

REAL = torch.tensor([[True, True, True], [True, False, False]])


def request(length: int, tail: int = 2) -> Request:
    tokens = tuple(3 + (7 * i) % 90 for i in range(length))
    return Request(tokens, tokens[-tail:], 0, length - tail)


def test_by_hand():
    packing = TokenPacking(REAL)
    assert packing.pack(torch.tensor([[4, 5, 6], [7, 0, 0]])).tolist() == [[4, 5, 6, 7]]
    states = torch.arange(8.0).view(1, 1, 4, 2)
    spread = packing.spread(states)
    assert spread.tolist() == [[[[0, 1], [2, 3], [4, 5]]], [[[6, 7], [0, 0], [0, 0]]]]
    assert torch.equal(packing.gather(spread), states)


def test_heads_stay_apart():
    packing = TokenPacking(REAL)
    states = torch.randn(1, 3, 4, 5)
    spread = packing.spread(states)
    assert spread.shape == (2, 3, 3, 5)
    assert torch.equal(spread[1, :, 0], states[0, :, 3]) and torch.equal(packing.gather(spread), states)


def test_a_batch_with_next_to_no_padding_stays_as_it_is():
    real = torch.ones(4, 32, dtype=torch.bool)
    assert packing_of(real) is None
    real[0, -4:] = False  # 4 of 128
    assert packing_of(real) is None
    real[0, -5:] = False
    assert packing_of(real) is not None


@pytest.fixture
def fed(monkeypatch):
    """Shape of the tokens that a model is given."""
    shapes = []

    def watch(model):
        model.get_input_embeddings().register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
        return shapes

    return watch


def test_the_model_is_given_no_padding(fed):
    model = WrappedModel(build("llama"))
    shapes = fed(model.model)
    rows = build_rows([(0, request(20))]) + build_rows([(1, request(5))])
    model.parallel(make_plan(rows, make_strategy("full")), make_strategy("full"))
    assert shapes == [(1, 25)]


def test_a_model_that_mixes_tokens_elsewhere_keeps_its_rows(fed):
    model = WrappedModel(build("qwen3_next"))
    assert not model.shares_trees
    shapes = fed(model.model)
    rows = build_rows([(0, request(20))]) + build_rows([(1, request(5))])
    model.parallel(make_plan(rows, make_strategy("full")), make_strategy("full"))
    assert shapes == [(2, 20)]


@pytest.mark.parametrize("name", ["full", "h2o", "streaming_llm", "infinigen", "quest"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text", "deepseek_v3", "opt"])
def test_scores_are_those_of_the_rows(name, family, monkeypatch):
    if name == "streaming_llm" and family in NO_ROTATION:
        pytest.skip("its keys cannot be moved")
    strategy = make_strategy(name) if name == "full" else make_strategy(name, 0.4)
    documents = [[request(length)] for length in (31, 6, 17)]
    model = sharp(family)
    packed = score_documents(model, documents, strategy)
    monkeypatch.setattr(wrapped_module, "packing_of", lambda real: None)
    plain = score_documents(model, documents, strategy)
    for (one,), (other,) in zip(packed, plain, strict=True):
        assert one.loglikelihood == pytest.approx(other.loglikelihood, abs=1e-3)
        assert one.kept_fraction == pytest.approx(other.kept_fraction, abs=1e-12)
        assert one.moved_bytes == other.moved_bytes


def test_a_family_that_does_not_survive_packing_is_scored_row_by_row(monkeypatch):
    """The check at load tries branches and packed tokens together."""
    original = TokenPacking.pack
    monkeypatch.setattr(TokenPacking, "pack", lambda self, values: original(self, values).flip(1))
    assert not WrappedModel(build("llama")).shares_trees


def test_batches_of_packed_rows():
    # Long rows of like lengths, and short ones that only attention sees padded: one pass.
    assert batch_sizes([100, 90, 20, 10], 1000, 48) == [2, 2]
    assert batch_sizes([100, 90, 20, 10], 1000, 48, packs=True) == [4]
    # The limit is on what is read, and on twice as many places.
    assert batch_sizes([50, 50, 50], 100, 48, packs=True) == [1, 2]
    assert batch_sizes([100] + [1] * 60, 100, 1, packs=True)[0] == 1
    # Where rows are wide, attention costs what the rest does.
    assert batch_sizes([2000, 100, 100], 4000, 48, packs=True) == [1, 2]
