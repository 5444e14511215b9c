"""Parallel path = step path, for every strategy on every supported family."""

from __future__ import annotations

import random

import pytest
import torch
from families import FAMILIES, NO_ROTATION, REFUSED, build, wrapped

from kvacc.engine.plan import Request
from kvacc.engine.scoring import score_by_steps, score_documents
from kvacc.engine.wrapped import WrappedModel
from kvacc.errors import KvaccError
from kvacc.strategy import make_strategy

pytestmark = pytest.mark.usefixtures("skewing_folder")
TOLERANCE = 1e-3


def documents(protocol: str) -> list[list[Request]]:
    """Three documents of different lengths; options that share tokens and that do not."""
    draw = random.Random(7)
    out = []
    for length in (22, 9, 15):
        context = [draw.randrange(3, 128) for _ in range(length)]
        dense = {"stream": 0, "context": length - 4, "serve": length}[protocol]
        options = [[5, 6, 7], [5, 8, 9, 10], [11]]
        out.append([Request((*context, *o[:-1]), tuple(o), dense, dense or length) for o in options])
    return out


def strategies(family: str):
    positions = "original" if family in NO_ROTATION else "cache"
    distance = "original" if family in NO_ROTATION else "fixed"
    return [
        make_strategy("full"),
        make_strategy("h2o", 0.4),
        make_strategy("streaming_llm", 0.4, sinks=2, positions=positions),
        make_strategy("recent", 5),
        make_strategy("random", 0.4),
        make_strategy("infinigen", 0.4, partial_ratio=0.5),
        make_strategy(
            "infinigen", 0.4, speculate_from="current", dense_layers=0, pool=0.5, pool_policy="lru"
        ),
        make_strategy("quest", 0.5, dense_layers=0, page_size=4),
        make_strategy("infllm", 0.6, block=2, init=1, representatives=1, positions=distance),
    ]


def assert_paths_agree(model: WrappedModel, protocol: str, strategy) -> None:
    docs = documents(protocol)
    parallel = [score for answers in score_documents(model, docs, strategy) for score in answers]
    steps, _ = score_by_steps(model, [request for doc in docs for request in doc], strategy)
    for one, other in zip(parallel, steps, strict=True):
        assert one.loglikelihood == pytest.approx(other.loglikelihood, abs=TOLERANCE)
        assert one.kept_fraction == pytest.approx(other.kept_fraction, abs=1e-9)
        assert one.hidden == other.hidden
        assert (one.moved_bytes or 0) == pytest.approx(other.moved_bytes or 0, abs=1e-6)
    if strategy.has_budget:
        assert all(score.hidden for score in steps if protocol == "stream")


@pytest.mark.parametrize("family", FAMILIES)
def test_parallel_path_equals_step_path_in_stream(family):
    for strategy in strategies(family):
        assert_paths_agree(wrapped(family), "stream", strategy)


@pytest.mark.parametrize("protocol", ["context", "serve"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "opt", "deepseek_v3", "qwen3_next"])
def test_parallel_path_equals_step_path_after_a_dense_prefill(family, protocol):
    for strategy in strategies(family):
        assert_paths_agree(wrapped(family), protocol, strategy)


@pytest.mark.parametrize("family", REFUSED)
def test_families_outside_the_attention_interface_are_refused_by_name(family):
    with pytest.raises(KvaccError, match=rf"{family!r} does not call attention through"):
        WrappedModel(build(family))


@pytest.mark.parametrize("family", sorted(NO_ROTATION))
def test_cache_positions_are_refused_where_there_is_no_rotation(family):
    with pytest.raises(KvaccError, match="positions=original"):
        score_documents(wrapped(family), documents("stream"), make_strategy("streaming_llm", 8))


def test_a_model_that_slides_everywhere_is_full_up_to_its_window():
    model = WrappedModel(build("mistral", sliding_window=32))
    assert_paths_agree(model, "stream", make_strategy("h2o", 0.4))
    long = Request(tuple(range(3, 43)), (5,), 0, 40)
    with pytest.raises(KvaccError, match="40 tokens exceed the model's sliding window of 32"):
        score_documents(model, [[long]], make_strategy("h2o", 0.4))
    score_documents(model, [[long]], make_strategy("full"))


def test_a_model_that_computes_something_else_is_refused():
    model = build("llama")
    # A family that ignores the interface in one layer, as a remote-code model may.
    attention = model.model.layers[1].self_attn
    original = attention.forward
    attention.forward = lambda *a, **k: tuple(2 * x if torch.is_tensor(x) else x for x in original(*a, **k))
    WrappedModel(model)  # scaled in both ways: the same function, accepted
    attention.forward = lambda *a, **k: tuple(
        (2 if model.config._attn_implementation == "kvacc" else 1) * x if torch.is_tensor(x) else x
        for x in original(*a, **k)
    )
    with pytest.raises(KvaccError, match="computes something else"):
        WrappedModel(model)
