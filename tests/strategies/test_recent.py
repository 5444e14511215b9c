"""Recent tokens only: exact kept sets."""

from __future__ import annotations

import pytest
import torch
from naive import flat_plan, new_scan, scan_by_hand, sharp, step_through

from kvacc.compiled_choice import numba_is_here
from kvacc.engine import compiled
from kvacc.engine.scan import scan_block
from kvacc.strategy import make_strategy, strategy_classes


def visible(strategy, count, dense=0, use_compiled=False):
    """bool [T, T]: what each query reads; the rule is the same for all layers and heads."""
    plan = flat_plan(strategy, count, dense, dense or count)
    scan = new_scan(plan, strategy, heads=1)
    if use_compiled:
        return compiled.static(scan, 0, count, count)[0][0, 0]
    return scan_block(scan, torch.zeros(1, 1, 1, count, count), 0, count, None)[0][0, 0]


def reads(mask):
    return [row.nonzero()[:, 0].tolist() for row in mask]


@pytest.mark.parametrize("use_compiled", [False, True])
def test_each_query_reads_itself_and_the_budget_before_it(use_compiled):
    if use_compiled and not numba_is_here():
        pytest.skip("numba is not installed")
    mask = visible(make_strategy("recent", 3), 7, use_compiled=use_compiled)
    # A token joins, reads, and only then does the oldest go: one more than the budget is read.
    assert reads(mask) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]


@pytest.mark.parametrize("use_compiled", [False, True])
def test_a_dense_prompt_is_read_in_full_and_then_cut(use_compiled):
    if use_compiled and not numba_is_here():
        pytest.skip("numba is not installed")
    mask = visible(make_strategy("recent", 2), 7, dense=5, use_compiled=use_compiled)
    assert reads(mask) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [3, 4, 5], [4, 5, 6]]


def test_budget_one_keeps_the_last_token():
    assert reads(visible(make_strategy("recent", 1), 4)) == [[0], [0, 1], [1, 2], [2, 3]]


def test_a_share_of_what_was_seen_keeps_a_growing_window():
    # ceil(0.5 * seen) = 1 1 2 2 3 3: once gone, an entry does not come back.
    mask = visible(make_strategy("recent", 0.5, "seen"), 6)
    assert reads(mask) == [[0], [0, 1], [1, 2], [1, 2, 3], [2, 3, 4], [2, 3, 4, 5]]


def test_scores_are_not_asked_for():
    strategy = make_strategy("recent", 3)
    assert not strategy.needs_attention and strategy.is_control and strategy.options() == {}
    assert strategy_classes()["recent"] is type(strategy)
    one, _, _ = scan_by_hand(strategy, torch.zeros(1, 1, 1, 9, 9), use_compiled=False)
    other, _, _ = scan_by_hand(strategy, torch.randn(1, 1, 1, 9, 9) * 9, use_compiled=False)
    assert torch.equal(one, other)


def test_the_cache_holds_the_newest_tokens():
    _, after, _ = step_through(sharp("llama"), make_strategy("recent", 4), range(3, 15))
    for t, kept in enumerate(after):
        assert set(map(tuple, kept.values())) == {tuple(range(max(0, t - 3), t + 1))}
