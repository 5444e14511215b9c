"""The contract of strategies that select: its helpers, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch

from kvacc import compiled_choice
from kvacc.errors import KvaccError
from kvacc.select_strategy import (
    Asked,
    LayerContext,
    Selector,
    SelectStrategy,
    best_of_group,
    count_true,
    dots,
    highest,
)
from kvacc.strategy import make_strategy

SELECTING = ("infinigen", "quest", "infllm")
INFINITY = float("inf")


# --- highest ------------------------------------------------------------------------------


@pytest.fixture(params=["compiled", "reference"])
def kernel(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setattr(compiled_choice, "available", lambda scores: False)
    elif not compiled_choice.available(torch.zeros(1)):
        pytest.skip("numba is not installed")
    return request.param


def chosen(scores, count, allowed=None):
    scores = torch.tensor(scores, dtype=torch.float32).view(1, 1, 1, -1)
    allowed = (
        torch.ones_like(scores).bool() if allowed is None else torch.tensor(allowed).bool().view_as(scores)
    )
    return highest(scores, torch.tensor([[[count]]]), allowed)[0, 0, 0].nonzero()[:, 0].tolist()


def test_the_highest_are_chosen(kernel):
    assert chosen([1, 5, 3, 4], 2) == [1, 3]
    assert chosen([1, 5, 3, 4], 0) == [] and chosen([1, 5, 3, 4], -2) == []
    assert chosen([1, 5, 3, 4], 4) == chosen([1, 5, 3, 4], 9) == [0, 1, 2, 3]


def test_of_equal_scores_the_lower_column_is_chosen(kernel):
    assert chosen([2, 7, 2, 2, 7], 3) == [0, 1, 4]
    assert chosen([0, 0, 0], 1) == [0] and chosen([-INFINITY, -INFINITY], 1) == [0]
    # 0.0 and -0.0 are equal.
    assert chosen([-0.0, 0.0, -1], 1) == [0]


def test_only_what_is_allowed_is_chosen(kernel):
    assert chosen([9, 5, 8, 4], 2, [0, 1, 0, 1]) == [1, 3]
    assert chosen([9, 5, 8, 4], 3, [0, 1, 0, 1]) == [1, 3]
    assert chosen([9, 5], 1, [0, 0]) == []
    # An allowed entry may score nothing at all: it still comes before one that is not allowed.
    assert chosen([-INFINITY, -INFINITY, 1], 2, [0, 1, 1]) == [1, 2]


def test_no_entries(kernel):
    empty = highest(torch.zeros(1, 2, 3, 0), torch.ones(1, 2, 3).long(), torch.zeros(1, 1, 3, 0).bool())
    assert empty.shape == (1, 2, 3, 0)


def by_sorting(scores, count, allowed):
    columns = sorted((j for j in range(len(scores)) if allowed[j]), key=lambda j: (-scores[j], j))
    return sorted(columns[: max(0, count)])


@pytest.mark.parametrize("seed", range(6))
def test_compiled_and_reference_agree_with_a_sort(monkeypatch, seed):
    draw = torch.Generator().manual_seed(seed)
    shape = (2, 3, 5, [1, 2, 7, 30, 64, 33][seed])
    scores = torch.randint(-2, 3, shape, generator=draw).float() / 2  # many ties
    scores[torch.rand(shape, generator=draw) < 0.2] = -INFINITY
    count = torch.randint(-1, shape[3] + 3, shape[:3], generator=draw)
    allowed = torch.rand(shape, generator=draw) < 0.7
    narrow = (count[:, :1], allowed[:, :1])  # shared by the heads
    for counts, allows in ((count, allowed), narrow):
        found = []
        if compiled_choice.available(scores):
            found.append(highest(scores, counts, allows))
        with monkeypatch.context() as patch:
            patch.setattr(compiled_choice, "available", lambda scores: False)
            found.append(highest(scores, counts, allows))
        wide = counts.expand(shape[:3]), allows.expand(shape)
        for b, h, i in torch.cartesian_prod(*map(torch.arange, shape[:3])).tolist():
            expected = by_sorting(scores[b, h, i].tolist(), int(wide[0][b, h, i]), wide[1][b, h, i].tolist())
            for mask in found:
                assert mask[b, h, i].nonzero()[:, 0].tolist() == expected


def test_the_compiled_choice_is_left_out_where_it_cannot_be(monkeypatch):
    assert not compiled_choice.available(torch.zeros(2, dtype=torch.float64))
    assert not compiled_choice.available(torch.zeros(2, device="meta"))
    monkeypatch.setattr(compiled_choice, "numba_is_here", lambda: False)
    assert not compiled_choice.available(torch.zeros(2))


# --- scores of a group --------------------------------------------------------------------


def test_the_query_head_that_wants_an_entry_most_counts():
    # Below the highest of each query head: 0 4 5 and 1 0 7; of the two the nearer.
    logits = torch.tensor([[5.0, 1.0, 0.0], [6.0, 7.0, 0.0]]).view(1, 2, 1, 3)
    every = torch.ones(1, 1, 1, 3, dtype=torch.bool)
    assert best_of_group(logits, 1, every).tolist() == [[[[0, 0, -5]]]]
    # One query head per KV head: the order of the logits.
    assert best_of_group(logits, 2, every).tolist() == [[[[0, -4, -5]], [[-1, 0, -7]]]]


def test_entries_that_are_no_candidates_set_no_mark():
    logits = torch.tensor([[5.0, 1.0, 0.0], [6.0, 7.0, 0.0]]).view(1, 2, 1, 3)
    candidates = torch.tensor([False, True, True]).view(1, 1, 1, 3)
    assert best_of_group(logits, 1, candidates).tolist() == [[[[-INFINITY, 0, -1]]]]
    nothing = torch.zeros(1, 1, 1, 3, dtype=torch.bool)
    assert best_of_group(logits, 1, nothing).tolist() == [[[[-INFINITY] * 3]]]
    assert best_of_group(logits[..., :0], 1, nothing[..., :0]).shape == (1, 1, 1, 0)


def test_products_group_query_heads_by_kv_head():
    torch.manual_seed(0)
    query, key = torch.randn(2, 6, 4, 5), torch.randn(2, 3, 7, 5)
    expected = torch.einsum("bqnc,bqwc->bqnw", query, key.repeat_interleave(2, 1))
    torch.testing.assert_close(dots(query, key), expected)
    assert dots(query.bfloat16(), key.bfloat16()).dtype == torch.float32


# --- selectors ----------------------------------------------------------------------------


def test_a_selector_copies_what_it_keeps():
    # It may write into its state: the model's keys must not change.
    selector = Selector(LayerContext(0, 1, torch.tensor([4])))
    key = torch.ones(1, 1, 2, 3)
    selector.append("key", key, dim=2)
    selector.state["key"].zero_()
    assert (key == 1).all()
    selector.append("key", key, dim=2)
    assert selector.state["key"].shape == (1, 1, 4, 3)
    assert selector.measured_bytes() == 12 * 4


def test_a_selector_follows_the_rows():
    selector = Selector(LayerContext(0, 1, torch.tensor([4, 4, 4])))
    selector.append("key", torch.arange(3.0).view(3, 1), dim=1)
    selector.reorder(torch.tensor([2, 2, 0, 1]))
    assert selector.state["key"].flatten().tolist() == [2, 2, 0, 1]


def asked_of(count, width):
    place = torch.arange(width)[None]
    new = place[:, width - count :]
    return Asked(
        torch.zeros(1, 2, count, 3), torch.zeros(1, 2, count, 1), new, new + 1, new >= 0, new < 0,
        place[:, None] <= new[..., None], place, new[0], lambda query, key: None,
    )  # fmt: skip


def test_a_query_knows_itself():
    asked = asked_of(2, 4)
    assert asked.itself().tolist() == [[False, False, True, False], [False, False, False, True]]
    ahead = dataclasses.replace(asked, own=None)
    assert not ahead.itself().any() and ahead.itself().shape == (2, 4)


def test_one_query_sees_the_entries_up_to_its_own():
    one = asked_of(3, 5).part(1)
    assert one.readable.tolist() == [[[True] * 4]] and one.own.tolist() == [3]
    assert one.position.tolist() == [[3]] and one.entry_position.tolist() == [[0, 1, 2, 3]]
    assert one.query.shape == (1, 2, 1, 3) and one.speculated.shape == (1, 2, 1, 1)
    assert one.budget.tolist() == [[4]] and one.acts.shape == one.compresses.shape == (1, 1)


# --- strategies ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", SELECTING)
def test_strategies_that_select_say_so(name):
    strategy = make_strategy(name, 0.2)
    assert isinstance(strategy, SelectStrategy) and strategy.offloads and not strategy.physical_eviction
    assert (
        strategy.causal and strategy.acts_while_decoding and strategy.has_budget and not strategy.is_control
    )
    assert strategy.supported_protocols() == ("stream", "context", "serve")
    assert make_strategy(name, "1/3", **strategy.options()).budget != strategy.budget
    assert make_strategy(name, 0.2, **strategy.options()) == strategy


@pytest.mark.parametrize("name", SELECTING)
def test_dense_layers_are_a_count(name):
    for bad in (-1, 1.0, "2", True, None):
        with pytest.raises(
            KvaccError, match=f"{name}: dense_layers {bad!r} is not a whole number of at least 0"
        ):
            make_strategy(name, 0.2, dense_layers=bad)


def test_a_strategy_without_a_selector_says_so():
    class Unfinished(SelectStrategy):
        name: ClassVar[str] = "unfinished"

    with pytest.raises(NotImplementedError, match="Unfinished does not say how it selects"):
        Unfinished().selector(LayerContext(0, 1, torch.tensor([4])))
    with pytest.raises(NotImplementedError):
        Selector(LayerContext(0, 1, torch.tensor([4]))).select(asked_of(1, 1))


# --- choosing by intervals, and counting --------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        lambda x: x,
        lambda x: x.exp() ** 9,  # nearly all in one interval
        lambda x: x * 1e38,  # their distance overflows
        lambda x: x * 1e-44,  # numbers without full precision
        lambda x: 7 + 0 * x,
        lambda x: x.where(x > -0.5, -INFINITY),
        lambda x: x.where(x < 1, INFINITY),
    ],
)
def test_scores_of_any_distribution(kernel, shape):
    draw = torch.Generator().manual_seed(1)
    scores = shape(torch.randn(1, 2, 20, 700, generator=draw))
    count = torch.randint(0, 710, (1, 2, 20), generator=draw)
    allowed = torch.rand(1, 1, 20, 700, generator=draw) < 0.6
    found = highest(scores, count, allowed)
    for h in range(2):
        for i in range(20):
            expected = by_sorting(scores[0, h, i].tolist(), int(count[0, h, i]), allowed[0, 0, i].tolist())
            assert found[0, h, i].nonzero()[:, 0].tolist() == sorted(expected)


def test_counting(monkeypatch):
    draw = torch.Generator().manual_seed(2)
    mask = torch.rand(2, 3, 5, 33, generator=draw) < 0.5
    parts = [mask, mask[:, :, ::2], mask.transpose(1, 2), mask[..., :0]]
    expected = [part.sum(-1).tolist() for part in parts]
    assert [count_true(part).tolist() for part in parts] == expected
    assert count_true(mask).dtype == torch.int32 and count_true(mask).shape == (2, 3, 5)
    monkeypatch.setattr(compiled_choice, "numba_is_here", lambda: False)
    assert [count_true(part).tolist() for part in parts] == expected
    assert count_true(mask).dtype == torch.int32
