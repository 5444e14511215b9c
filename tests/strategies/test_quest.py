"""Quest against an oracle that shares no code with it, and by hand."""

from __future__ import annotations

import pytest
import torch
from naive import draw_tokens, sharp
from naive_select import (
    DECODERS,
    NaiveQuest,
    NaiveTop,
    assert_both_paths,
    read_at_once,
    read_by_steps,
    select,
)

from kvacc.errors import KvaccError
from kvacc.select_strategy import Asked, LayerContext, NewEntries
from kvacc.strategy import make_strategy

TOKENS = draw_tokens(34, seed=5)
families = pytest.mark.parametrize("family", ["llama", "opt"])


def oracle(family, rule, dense_layers, dense=0):
    return select(
        DECODERS[family](sharp(family, num_hidden_layers=3).model), TOKENS, rule, dense_layers, dense
    )


# --- the whole strategy against the oracle -----------------------------------------------


CASES = {
    "two pages of four": (dict(page_size=4), 8),
    "a budget between pages": (dict(page_size=4), 11),
    "pages of five": (dict(page_size=5), 10),
    "sixteen": (dict(), 16),
    "smaller than a page": (dict(page_size=8), 7),
    "one entry": (dict(page_size=4), 1),
    "three pages at least": (dict(page_size=4, min_pages=3), 5),
    "two dense layers": (dict(page_size=4, dense_layers=2), 8),
}


@families
@pytest.mark.parametrize("dense", [0, 13], ids=["stream", "context"])
@pytest.mark.parametrize("case", CASES)
def test_both_paths_read_what_the_paper_says(family, case, dense):
    options, budget = CASES[case]
    options = {"dense_layers": 0, **options}
    strategy = make_strategy("quest", budget, **options)
    rule = NaiveQuest(budget, strategy.page_size, strategy.min_pages)
    expected = oracle(family, rule, strategy.dense_layers, dense)
    assert_both_paths(sharp(family, num_hidden_layers=3), strategy, TOKENS, expected, dense)


def test_a_fraction_of_what_was_seen():
    strategy = make_strategy("quest", "1/3", "seen", page_size=3, dense_layers=1)
    expected = oracle("llama", NaiveQuest(lambda seen: -(-seen // 3), 3), 1)
    assert_both_paths(sharp("llama", num_hidden_layers=3), strategy, TOKENS, expected)


@families
def test_the_cases_above_can_tell_rules_apart(family):
    plain = oracle(family, NaiveQuest(8, 4), 0)[1][1]
    assert not torch.equal(plain[0], plain[1])  # heads choose pages of their own
    for other in (NaiveQuest(12, 4), NaiveQuest(8, 2), NaiveTop(8)):
        assert not torch.equal(plain, oracle(family, other, 0)[1][1])
    last = plain[:, -1].int()
    assert (last.sum(-1) <= 8).all() and (last.sum(-1) > 4).all()
    own_page = plain[:, range(12, 34), range(12, 34)]
    assert own_page.any() and not own_page.all()  # it is not forced


@families
def test_pages_of_one_token_are_exact_top_n(family):
    strategy = make_strategy("quest", 6, page_size=1, dense_layers=0)
    assert_both_paths(
        sharp(family, num_hidden_layers=3), strategy, TOKENS, oracle(family, NaiveTop(6, always=False), 0)
    )


@families
@pytest.mark.parametrize("budget", [1.0, 34, 100])
def test_without_a_limit_it_is_full(family, budget):
    model = sharp(family, num_hidden_layers=3)
    full, _, _ = read_at_once(model, make_strategy("full"), TOKENS)
    for read in (read_at_once, read_by_steps):
        logits, reads, _ = read(model, make_strategy("quest", budget, dense_layers=0), TOKENS)
        assert all(torch.equal(mask, torch.ones_like(mask).tril()) for mask in reads.values())
        torch.testing.assert_close(logits, full, atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunks", [[34], [1, 7, 13, 13], [13, 1, 1, 19], [4, 4, 26]])
@pytest.mark.parametrize("padding", [0, 3])
def test_it_does_not_depend_on_chunks_or_padding(chunks, padding):
    model = sharp("llama", num_hidden_layers=3)
    strategy = make_strategy("quest", 9, page_size=4, dense_layers=0)
    for dense in (0, 11):
        logits, reads, _ = read_by_steps(model, strategy, TOKENS, dense=dense)
        sizes = [chunks[0] + padding, *chunks[1:]]
        found, chosen, _ = read_by_steps(model, strategy, TOKENS, sizes, dense=dense, padding=padding)
        assert all(torch.equal(reads[layer], chosen[layer]) for layer in reads)
        torch.testing.assert_close(found, logits, atol=1e-3, rtol=0)


def test_only_the_bounds_of_pages_stay_on_the_device():
    # 34 tokens in pages of 4: the last entry of each of 8 pages, and the newest; each has a minimum and a maximum of
    # 2 heads x 8 channels in float32, and a place of 8 bytes.
    model = sharp("llama", num_hidden_layers=3)
    _, _, session = read_by_steps(model, make_strategy("quest", 9, page_size=4), TOKENS)
    selector = session.cache.layers[2].selector
    assert selector.columns.tolist() == [3, 7, 11, 15, 19, 23, 27, 31, 33]
    assert selector.measured_bytes() == 9 * (2 * 2 * 8 * 4 + 8)
    assert [getattr(layer, "selector", None) is None for layer in session.cache.layers] == [True, True, False]


# --- by hand -------------------------------------------------------------------------------


def by_hand(keys, query, budget, chunks=None, heads=1, **options):
    """(pages' bounds by entry low/high, entries read by the last query for each KV head).

    Args:
        keys: [n][D] of one KV head, or [H][n][D].
        query: [Q][D].
    """
    keys = torch.tensor(keys, dtype=torch.float32)
    keys = keys[None] if keys.dim() == 2 else keys
    heads, count, _ = keys.shape
    strategy = make_strategy("quest", budget, **{"page_size": 2, **options})
    selector = strategy.selector(LayerContext(2, heads, torch.tensor([count])))
    first = 0
    for size in chunks or [count]:
        place = torch.arange(first, first + size)[None]
        selector.extend(
            NewEntries(
                keys[None, :, first : first + size], place, place - 1, torch.ones(1, size, dtype=torch.bool)
            )
        )
        first += size
    place = torch.arange(count)[None]
    asked = Asked(
        query=torch.tensor(query, dtype=torch.float32)[None, :, None], speculated=None, position=place[:, -1:],
        budget=torch.tensor([[strategy.budget.entries(count)]]), acts=torch.ones(1, 1, dtype=torch.bool),
        compresses=torch.zeros(1, 1, dtype=torch.bool), readable=torch.ones(1, 1, count, dtype=torch.bool),
        entry_position=place, own=torch.tensor([count - 1]), logits=None,
    )  # fmt: skip
    visible = selector.select(asked).visible
    return selector, [mask.nonzero()[:, 0].tolist() for mask in visible[0, :, 0]]


KEYS = [[1, 0], [-1, 2], [3, -1], [0, 0], [2, 2], [0, 1], [1, 1]]
# Pages of 2:   0: x in [-1, 1], y in [0, 2]    1: x in [0, 3], y in [-1, 0]
#               2: x in [0, 2], y in [1, 2]     3 (one token so far): x = y = 1


@pytest.mark.parametrize("chunks", [[7], [1] * 7, [2, 3, 2], [3, 1, 3]])
def test_bounds_are_the_minimum_and_maximum_of_a_page(chunks):
    selector, _ = by_hand(KEYS, [[1, 1]], 2, chunks)
    found = {
        column: (low, high)
        for column, low, high in zip(
            selector.columns.tolist(), selector.state["low"][0, :, 0].tolist(), selector.state["high"][0, :, 0].tolist(), strict=True
        )
    }  # fmt: skip
    assert found[1] == ([-1, 0], [1, 2])
    assert found[3] == ([0, -1], [3, 0])
    assert found[5] == ([0, 1], [2, 2])
    assert found[6] == ([1, 1], [1, 1])


@pytest.mark.parametrize("chunks", [[7], [1] * 7, [2, 3, 2]])
def test_pages_with_the_highest_bounds_are_read(chunks):
    def read(query, budget, **options):
        return by_hand(KEYS, [query], budget, chunks, **options)[1][0]

    # (1, 1): bounds 3, 3, 4, 2. Of the equal ones the lower page.
    assert read([1, 1], 2) == [4, 5]
    assert read([1, 1], 4) == [0, 1, 4, 5]
    # (-1, 0): bounds 1, 0, 0, -1. Page 1 comes before page 2.
    assert read([-1, 0], 4) == [0, 1, 2, 3]
    # (1, -1): bounds max(-1, 1) + max(0, -2) = 1, 3 + 1 = 4, 2 - 1 = 1, 0.
    assert read([1, -1], 2) == [2, 3]
    # (1, -3): 1, 6, -1, 1 - 3 = -2; the own page is last and is not forced.
    assert read([1, -3], 6) == [0, 1, 2, 3, 4, 5]
    # The budget is rounded down to pages: 3 entries are one page.
    assert read([1, 1], 3) == [4, 5]
    # Three pages at least, as in the authors' code.
    assert read([1, 1], 2, min_pages=3) == [0, 1, 2, 3, 4, 5]
    # All that was seen fits.
    assert read([1, 1], 7) == list(range(7))


def test_the_own_page_is_bounded_by_its_tokens_so_far():
    # The seventh key is (9, 9): its page has one token, and bound 18.
    assert by_hand([*KEYS[:6], [9, 9]], [[1, 1]], 2)[1] == [[6]]
    # An eighth key lowers nothing and is read with it.
    assert by_hand([*KEYS[:6], [9, 9], [0, 0]], [[1, 1]], 2)[1] == [[6, 7]]


def test_a_budget_below_a_page_reads_the_newest():
    assert by_hand(KEYS, [[1, 1]], 3, page_size=4)[1] == [[4, 5, 6]]
    assert by_hand(KEYS, [[1, 1]], 1)[1] == [[6]]
    assert by_hand(KEYS, [[1, 1]], 3, page_size=4, min_pages=1)[1] != [[4, 5, 6]]


def test_kv_heads_choose_their_own_pages():
    mirrored = [[-x, -y] for x, y in KEYS]
    # The mirrored head under (1, 1): page 0 at most 1 + 0 = 1, page 1: 0 + 1 = 1, page 2: 0 - 1,
    # page 3: -2.
    assert by_hand([KEYS, mirrored], [[1, 1], [1, 1]], 2)[1] == [[4, 5], [0, 1]]


def test_query_heads_of_one_kv_head_share_pages():
    # (1, 1): 3 3 4 2, so -1 -1 0 -2 below its best. (10, -10): 10 40 10 0, so -30 0 -30 -40.
    # The one that wants a page most counts: -1 0 0 -2. A sum of bounds would rank 1, 2, 0 as well;
    # with one page the lower of the equal ones is read, and a maximum of bounds agrees.
    assert by_hand(KEYS, [[1, 1], [10, -10]], 2)[1] == [[2, 3]]
    assert by_hand(KEYS, [[1, 1], [10, -10]], 4)[1] == [[2, 3, 4, 5]]
    # With (10, 0) beside: 10 30 20 10 -> -20 0 -10 -20 the large query does not silence the small:
    # (-1, 0): 1 0 0 -1 -> 0 -1 -1 -2. Best: 0 0 -1 -2; a sum or maximum would read pages 1 and 2.
    assert by_hand(KEYS, [[10, 0], [-1, 0]], 4)[1] == [[0, 1, 2, 3]]


# --- options -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(page_size=0), "quest: page_size 0 is not a whole number of at least 1"),
        (dict(page_size=2.5), "quest: page_size 2.5 is not a whole number of at least 1"),
        (dict(page_size=True), "quest: page_size True is not a whole number of at least 1"),
        (dict(min_pages=-1), "quest: min_pages -1 is not a whole number of at least 0"),
        (dict(dense_layers=-1), "quest: dense_layers -1 is not a whole number of at least 0"),
        (dict(pagesize=4), "strategy 'quest' has no option 'pagesize' (did you mean 'page_size'?)"),
    ],
)
def test_a_bad_option_says_what_is_right(options, message):
    with pytest.raises(KvaccError) as raised:
        make_strategy("quest", 0.2, **options)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_options_make_the_same_strategy_again():
    assert make_strategy("quest", 0.2).options() == {"dense_layers": 2, "page_size": 16, "min_pages": 0}
    for options in ({}, dict(page_size=4, min_pages=3, dense_layers=0)):
        strategy = make_strategy("quest", 0.2, **options)
        assert make_strategy("quest", 0.2, **strategy.options()) == strategy
