"""StreamingLLM: kept sets, and positions counted in the cache."""

from __future__ import annotations

import pytest
import torch
from naive import NaiveStreaming, draw_tokens, flat_plan, llama, new_scan, one_request, sharp, step_through

from kvacc.compiled_choice import numba_is_here
from kvacc.engine import compiled
from kvacc.engine.plan import build_rows, make_plan
from kvacc.engine.scan import scan_block
from kvacc.errors import KvaccError
from kvacc.strategy import make_strategy

TOKENS = draw_tokens(24)


def reads(strategy, count, dense=0, use_compiled=False):
    if use_compiled and not numba_is_here():
        pytest.skip("numba is not installed")
    scan = new_scan(flat_plan(strategy, count, dense, dense or count), strategy, heads=1)
    if use_compiled:
        mask = compiled.static(scan, 0, count, count)[0]
    else:
        mask = scan_block(scan, torch.zeros(1, 1, 1, count, count), 0, count, None)[0]
    return [row.nonzero()[:, 0].tolist() for row in mask[0, 0]]


def parallel_logits(strategy, tokens, dense=0, compressed=None):
    plan = make_plan(build_rows([(0, one_request(tokens, dense, compressed))]), strategy)
    return sharp("llama").parallel(plan, strategy)[0]


# --- kept sets ---------------------------------------------------------------------------


@pytest.mark.parametrize("use_compiled", [False, True])
def test_sinks_and_the_newest_stay(use_compiled):
    # Budget 4 = 2 sinks + 2 recent; the query's own entry is read before the oldest goes.
    expected = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 3, 4, 5], [0, 1, 4, 5, 6]]
    assert reads(make_strategy("streaming_llm", 4, sinks=2), 7, use_compiled=use_compiled) == expected


@pytest.mark.parametrize("use_compiled", [False, True])
def test_a_dense_prompt_is_read_in_full_and_then_cut(use_compiled):
    expected = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 3, 4, 5], [0, 4, 5, 6]]
    strategy = make_strategy("streaming_llm", 3, sinks=1)
    assert reads(strategy, 7, dense=5, use_compiled=use_compiled) == expected


def test_without_sinks_it_is_a_window():
    streaming = reads(make_strategy("streaming_llm", 3, sinks=0), 9)
    assert streaming == reads(make_strategy("recent", 3), 9)


def test_the_paper_keeps_four_sinks():
    assert make_strategy("streaming_llm", 16).options() == {"sinks": 4, "positions": "cache"}
    assert reads(make_strategy("streaming_llm", 6), 12)[11] == [0, 1, 2, 3, 9, 10, 11]


def test_sinks_stay_in_every_layer_and_head_of_the_cache():
    strategy = make_strategy("streaming_llm", 7, sinks=3)
    _, after, _ = step_through(sharp("llama"), strategy, TOKENS)
    for t, kept in enumerate(after):
        expected = range(t + 1) if t < 7 else [0, 1, 2, *range(t - 3, t + 1)]
        assert set(map(tuple, kept.values())) == {tuple(expected)}


# --- budgets that leave no room ------------------------------------------------------------


@pytest.mark.parametrize(("budget", "sinks"), [(4, 4), (1, 1), (3, 8)])
def test_a_count_without_room_for_a_recent_token_is_refused(budget, sinks):
    with pytest.raises(KvaccError, match=f"budget {budget} is fewer than {sinks} sinks .* give at least {sinks + 1}"):
        make_strategy("streaming_llm", budget, sinks=sinks)
    make_strategy("streaming_llm", sinks + 1, sinks=sinks)


@pytest.mark.parametrize(("fraction", "sinks", "recents"), [(0.05, 0, 1), (0.1, 1, 1), (0.2, 3, 1), (0.25, 4, 1), (0.5, 4, 6)])
def test_a_fraction_of_a_short_prompt_keeps_fewer_sinks(fraction, sinks, recents):
    strategy = make_strategy("streaming_llm", fraction)
    budget = strategy.budget.entries(20)
    assert (strategy.sink_count(budget), strategy.recent_count(budget)) == (sinks, recents)
    last = reads(strategy, 20)[-1]
    assert last == [*range(sinks), *range(19 - recents, 20)]


def test_a_share_of_what_was_seen_is_refused():
    with pytest.raises(KvaccError, match="budget_of=seen would evict the sinks .* use budget_of=prompt"):
        make_strategy("streaming_llm", 0.2, "seen")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sinks": -1}, "sinks -1 is not a whole number of at least 0"),
        ({"sinks": 1.5}, "sinks 1.5 is not a whole number"),
        ({"positions": "cached"}, r"unknown streaming_llm positions 'cached' \(did you mean 'cache'\?\)"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(KvaccError, match=message):
        make_strategy("streaming_llm", 16, **options)


# --- positions ---------------------------------------------------------------------------


@pytest.mark.parametrize("dense", [0, 14])
@pytest.mark.parametrize("positions", ["cache", "original"])
def test_logits_are_those_of_keys_rotated_anew(positions, dense):
    # The oracle holds keys before rotation and rotates each to its place in the cache
    # (0..n-1, the query n-1) or in the text, with the model's own tables.
    strategy = make_strategy("streaming_llm", 7, sinks=3, positions=positions)
    expected, _, _ = llama(
        sharp("llama").model, TOKENS, NaiveStreaming(3), 7, dense, cache_positions=positions == "cache"
    )
    torch.testing.assert_close(parallel_logits(strategy, TOKENS, dense), expected, atol=1e-3, rtol=0)
    stepped, _, _ = step_through(sharp("llama"), strategy, TOKENS, dense=dense)
    torch.testing.assert_close(stepped, expected, atol=1e-3, rtol=0)


def test_the_two_kinds_of_positions_differ_only_once_something_is_gone():
    cache, original = (
        parallel_logits(make_strategy("streaming_llm", 7, sinks=3, positions=p), TOKENS) for p in ("cache", "original")
    )
    # Query 7 is the last to read everything: 8 entries, one more than stays.
    torch.testing.assert_close(cache[:8], original[:8], atol=1e-4, rtol=0)
    assert (cache[8:] - original[8:]).abs().max() > 1e-2


def test_relative_distances_by_hand():
    # One rotation, one head of dimension 2 with frequency 1: a key at place p has angle p, and the
    # logit of equal unit vectors is cos(distance). Query 5 of budget 3 with 1 sink reads entries
    # 0, 3, 4, 5, which lie at places 0, 1, 2, 3 of the cache: distances 3, 2, 1, 0, where the text
    # has 5, 2, 1, 0. Only the sink is nearer.
    from kvacc.engine.rotary import Rotation

    rotation = Rotation({0: ("half", torch.tensor([1.0]))})
    place = torch.tensor([0, 3, 4, 5])
    key = torch.stack([place.float().cos(), place.float().sin()], -1)[None, None]
    moved = rotation.rotate(0, key, (torch.arange(4) - place)[None, None])
    query = rotation.rotate(0, key[:, :, 3:], torch.tensor([[[3 - 5]]]))
    logits = (query @ moved.transpose(-1, -2))[0, 0, 0]
    torch.testing.assert_close(logits, torch.tensor([3.0, 2.0, 1.0, 0.0]).cos(), atol=1e-6, rtol=0)


def test_shifting_the_text_changes_nothing_that_is_read():
    # With cache positions the logits depend on the kept tokens only. Layer 1's entries carry what
    # their queries had read, so a one-layer view: two texts that end alike, one longer in the middle.
    model = sharp("llama", num_hidden_layers=1)
    short = [5, 6, *TOKENS[:10]]
    longer = [5, 6, 90, 91, 92, *TOKENS[:10]]
    for positions, equal in (("cache", True), ("original", False)):
        strategy = make_strategy("streaming_llm", 6, sinks=2, positions=positions)
        one, two = (step_through(model, strategy, tokens)[0][-1] for tokens in (short, longer))
        assert ((one - two).abs().max() < 1e-4) == equal
