"""The random control: uniform, and without any state."""

from __future__ import annotations

import random

import pytest
import torch
from naive import draw_tokens, flat_plan, new_scan, one_request, sharp, step_through
from scipy import stats

from kvacc.compiled_choice import numba_is_here
from kvacc.engine import compiled
from kvacc.engine.plan import build_rows, make_plan
from kvacc.engine.scan import scan_block
from kvacc.errors import KvaccError
from kvacc.strategy import make_strategy


def visible(strategy, count, heads=1, layer=0, use_compiled=False):
    """bool [H, T, T]: what each query reads."""
    scan = new_scan(flat_plan(strategy, count), strategy, heads, layer)
    if use_compiled:
        return compiled.static(scan, 0, count, count)[0][0]
    return scan_block(scan, torch.zeros(1, heads, 1, count, count), 0, count, None)[0][0]


def draws(seed=0, layer=0, heads=4, count=4096):
    return make_strategy("random", 0.5, seed=seed).initial_score(torch.arange(count), layer, heads)


@pytest.mark.parametrize("use_compiled", [False, True])
def test_the_highest_draws_of_what_was_seen_stay(use_compiled):
    if use_compiled and not numba_is_here():
        pytest.skip("numba is not installed")
    strategy = make_strategy("random", 5)
    score = strategy.initial_score(torch.arange(30), 0, 2)  # [T, H]
    mask = visible(strategy, 30, heads=2, use_compiled=use_compiled)
    for head in range(2):
        for t in range(1, 30):
            best = sorted(range(t), key=lambda place: -float(score[place, head]))[:5]
            assert mask[head, t].nonzero()[:, 0].tolist() == sorted([*best, t])


def test_every_place_in_the_text_is_as_likely_as_another():
    # Share of (layer, head, seed) in which each of 40 positions is among the 10 kept at the end.
    length, budget, repeats = 40, 10, 0
    count = torch.zeros(length)
    for seed in range(25):
        for layer in range(4):
            score = draws(seed, layer, heads=8, count=length)
            count += torch.zeros(length, 8).scatter(0, score.topk(budget, 0).indices, 1.0).sum(1)
            repeats += 8
    assert count.sum() == repeats * budget
    # Positions compete for places, so counts vary by (1 - share) of independent draws.
    expected = repeats * budget / length
    statistic = float(((count - expected) ** 2 / expected).sum()) / (1 - budget / length) * (length - 1) / length
    assert stats.chi2.sf(statistic, length - 1) > 1e-3


def test_draws_are_uniform_over_their_range():
    every = torch.cat([draws(seed, layer).flatten() for seed in range(3) for layer in range(3)])
    assert every.dtype == torch.float32
    assert 0 <= every.min() and every.max() < 2**24
    assert torch.equal(every, every.round())  # whole numbers that a float32 holds exactly
    histogram = torch.histc(every, bins=64, min=0, max=2**24)
    assert stats.chisquare(histogram.numpy()).pvalue > 1e-3
    assert every.unique().numel() > 0.99 * every.numel()


def test_neighbours_are_unrelated():
    score = draws(heads=2, count=8192)
    for one, other in ((score[:-1, 0], score[1:, 0]), (score[:, 0], score[:, 1])):
        assert abs(stats.spearmanr(one.numpy(), other.numpy()).statistic) < 0.05


@pytest.mark.parametrize("other", [{"seed": 1}, {"layer": 1}], ids=["seed", "layer"])
def test_another_seed_or_layer_draws_otherwise(other):
    one, two = draws(), draws(**other)
    assert (one == two).double().mean() < 0.01
    assert abs(stats.spearmanr(one[:, 0].numpy(), two[:, 0].numpy()).statistic) < 0.05


def test_heads_keep_different_subsets():
    mask = visible(make_strategy("random", 6), 40, heads=3)
    assert not torch.equal(mask[0, -1], mask[1, -1]) and not torch.equal(mask[1, -1], mask[2, -1])


def test_the_same_everywhere_and_every_time():
    # Written down once: another platform, or another version, must draw the same.
    score = make_strategy("random", 0.5, seed=7).initial_score(torch.tensor([0, 1, 2, 1000]), 3, 2)
    again = make_strategy("random", 0.5, seed=7).initial_score(torch.tensor([[0, 1], [2, 1000]]), 3, 2)
    assert torch.equal(score, again.view(4, 2))

    def draw(position, head, layer, seed):
        prime = 2**31 - 1
        value = position * 1_000_003 + head * 7_919 + layer * 104_729 + seed * 15_485_863 + 12_345
        for multiplier in (48_271, 69_621, 16_807):
            value = value % prime * multiplier % prime
            value ^= value >> 13
        return value % 2**24

    for row, position in enumerate((0, 1, 2, 1000)):
        assert score[row].tolist() == [draw(position, head, 3, 7) for head in range(2)]


def test_no_state_and_no_random_generator():
    strategy = make_strategy("random", 4, seed=3)
    tokens = draw_tokens(16)
    plan = make_plan(build_rows([(0, one_request(tokens))]), strategy)
    before, python = torch.get_rng_state(), random.getstate()
    first, _ = sharp("llama").parallel(plan, strategy)
    torch.manual_seed(99)
    random.seed(99)
    sharp("llama").parallel(plan, make_strategy("random", 4, seed=4))
    second, _ = sharp("llama").parallel(plan, strategy)
    assert torch.equal(first, second)
    torch.set_rng_state(before)
    sharp("llama").parallel(plan, strategy)
    assert torch.equal(torch.get_rng_state(), before)
    random.setstate(python)


def test_the_kept_set_depends_on_positions_only():
    strategy = make_strategy("random", 4)
    one = step_through(sharp("llama"), strategy, range(3, 20))[1]
    other = step_through(sharp("llama"), strategy, range(40, 57))[1]
    assert one == other


@pytest.mark.parametrize("seed", [-1, 0.5, "x"])
def test_bad_seeds_are_refused(seed):
    with pytest.raises(KvaccError, match="seed .* is not a whole number of at least 0"):
        make_strategy("random", 0.5, seed=seed)


def test_it_is_marked_as_a_control():
    assert make_strategy("random", 0.5).is_control
