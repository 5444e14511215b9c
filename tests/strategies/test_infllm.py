"""InfLLM against an oracle that shares no code with it, and by hand."""

from __future__ import annotations

import pytest
import torch
from families import NO_ROTATION, wrapped
from naive import draw_tokens, sharp
from naive_select import DECODERS, NaiveInfLLM, assert_both_paths, read_at_once, read_by_steps, select

from kvacc.errors import KvaccError
from kvacc.select_strategy import Asked, LayerContext, NewEntries
from kvacc.strategy import make_strategy

TOKENS = draw_tokens(36, seed=6)


def oracle(family, rule, dense_layers=0, dense=0):
    return select(
        DECODERS[family](sharp(family, num_hidden_layers=3).model), TOKENS, rule, dense_layers, dense
    )


# --- the whole strategy against the oracle -----------------------------------------------


# options, budget; and by hand: first tokens, local window, block, blocks, representatives
CASES = {
    # 14: init 2; local at least 0.5 x 14 = 7; 14 - 2 - 7 = 5 is one block of 3; local gets the rest: 9.
    "one block": (dict(init=2, local_fraction=0.5, block=3, representatives=1), 14, (2, 9, 3, 1, 1)),
    # 12: init 1; local 4; 7 left are three blocks of 2; local 12 - 1 - 6 = 5.
    "three blocks": (dict(init=1, local_fraction=0.3, block=2, representatives=1), 12, (1, 5, 2, 3, 1)),
    "two representatives": (dict(init=1, local_fraction=0.3, block=4, representatives=2), 12, (1, 7, 4, 1, 2)),
    "more representatives than keys": (dict(init=0, local_fraction=0.25, block=2, representatives=5), 8, (0, 2, 2, 3, 5)),
    "no first tokens": (dict(init=0, local_fraction=0.4, block=3, representatives=2), 10, (0, 4, 3, 2, 2)),
    # At most a quarter of the budget for the first tokens; no block fits.
    "no block": (dict(), 12, (3, 9, 128, 0, 4)),
    "blocks of one": (dict(init=1, local_fraction=0.3, block=1, representatives=1), 8, (1, 3, 1, 4, 1)),
    "one entry": (dict(init=4), 1, (0, 1, 128, 0, 4)),
}  # fmt: skip


@pytest.mark.parametrize("dense", [0, 17], ids=["stream", "context"])
@pytest.mark.parametrize("where", ["llama fixed", "llama original", "opt original"])
@pytest.mark.parametrize("case", CASES)
def test_both_paths_read_what_the_paper_says(case, where, dense):
    family, positions = where.split()
    options, budget, (init, local, block, blocks, representatives) = CASES[case]
    strategy = make_strategy("infllm", budget, positions=positions, **options)
    assert strategy.parts(budget) == (init, local, blocks)
    rule = NaiveInfLLM(budget, init, local, block, blocks, representatives, positions == "fixed")
    expected = oracle(family, rule, strategy.dense_layers, dense)
    assert_both_paths(sharp(family, num_hidden_layers=3), strategy, TOKENS, expected, dense)


def test_a_dense_layer_reads_everything():
    strategy = make_strategy(
        "infllm", 14, init=2, local_fraction=0.5, block=3, representatives=1, dense_layers=1
    )
    expected = oracle("llama", NaiveInfLLM(14, 2, 9, 3, 1, 1), 1)
    assert_both_paths(sharp("llama", num_hidden_layers=3), strategy, TOKENS, expected)


def test_a_fraction_refers_to_what_is_compressed():
    # 0.4 of 30 are 12.
    strategy = make_strategy("infllm", 0.4, init=1, local_fraction=0.3, block=2, representatives=1)
    expected = oracle("llama", NaiveInfLLM(12, 1, 5, 2, 3, 1), 0, 30)
    assert_both_paths(sharp("llama", num_hidden_layers=3), strategy, TOKENS, expected, 30, compressed=30)


def test_the_cases_above_can_tell_rules_apart():
    plain, reads = oracle("llama", NaiveInfLLM(12, 1, 5, 2, 3, 1))
    chosen = {tuple(row.nonzero()[:, 0].tolist()) for row in reads[1][0, 24:, 1:19]}
    assert len(chosen) >= 4  # queries retrieve different blocks
    for other in (NaiveInfLLM(12, 1, 5, 2, 3, 2), NaiveInfLLM(12, 1, 4, 2, 3, 1)):
        assert not torch.equal(oracle("llama", other)[1][1], reads[1])
    original, _ = oracle("llama", NaiveInfLLM(12, 1, 5, 2, 3, 1, fixed=False))
    assert (original - plain).abs().max() > 0.1


@pytest.mark.parametrize("budget", [1.0, 36, 100])
def test_without_a_limit_it_is_full(budget):
    model = sharp("llama", num_hidden_layers=3)
    full, _, _ = read_at_once(model, make_strategy("full"), TOKENS)
    for read in (read_at_once, read_by_steps):
        logits, reads, _ = read(model, make_strategy("infllm", budget, block=4, init=2), TOKENS)
        assert all(torch.equal(mask, torch.ones_like(mask).tril()) for mask in reads.values())
        torch.testing.assert_close(logits, full, atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunks", [[36], [1, 7, 13, 15], [13, 1, 1, 21]])
@pytest.mark.parametrize("padding", [0, 3])
def test_it_does_not_depend_on_chunks_or_padding(chunks, padding):
    model = sharp("llama", num_hidden_layers=3)
    strategy = make_strategy("infllm", 12, init=1, local_fraction=0.3, block=2, representatives=1)
    for dense in (0, 11):
        logits, reads, _ = read_by_steps(model, strategy, TOKENS, dense=dense)
        sizes = [chunks[0] + padding, *chunks[1:]]
        found, chosen, _ = read_by_steps(model, strategy, TOKENS, sizes, dense=dense, padding=padding)
        assert all(torch.equal(reads[layer], chosen[layer]) for layer in reads)
        torch.testing.assert_close(found, logits, atol=1e-3, rtol=0)


# --- by hand -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "parts"),
    [
        # The paper's 6,272 tokens: 128, at least 0.65 x 6,272 = 4,077 -> 16 blocks of 128, 4,096.
        (6272, (128, 4096, 16)),
        # 512: a quarter is 128; 333; 51 left are no block: they join the window.
        (512, (128, 384, 0)),
        # 800: 128; 520; 152 left are one block.
        (800, (128, 544, 1)),
        # 100: a quarter; 65; nothing left for a block.
        (100, (25, 75, 0)),
        (3, (0, 3, 0)),
        (1, (0, 1, 0)),
    ],
)
def test_parts_of_a_budget(budget, parts):
    strategy = make_strategy("infllm", budget)
    init, local, blocks = strategy.parts(budget)
    assert (init, local, blocks) == parts
    assert init + local + blocks * 128 == budget and local >= 0.65 * budget


def test_a_share_is_taken_exactly():
    # 0.07 x 100 is 7.000000000000001 in floats, which would be rounded up to 8.
    assert make_strategy("infllm", 100, init=0, local_fraction=0.07, block=93).parts(100) == (0, 7, 1)


def by_hand(keys, queries, budget, chunks=None, rotate=None, **options):
    """reads[head][t] and far[t] of all queries, for keys [H][T][D] and queries [Q][T][D]."""
    keys, queries = torch.tensor(keys).float()[None], torch.tensor(queries).float()[None]
    _, heads, count, _ = keys.shape
    strategy = make_strategy("infllm", budget, **options)
    selector = strategy.selector(LayerContext(0, heads, torch.tensor([count]), rotate=rotate))
    reads, far, first = [[] for _ in range(heads)], [], 0
    for size in chunks or [count]:
        end = first + size
        place = torch.arange(end)[None]
        new = place[:, first:]
        selector.extend(
            NewEntries(keys[:, :, first:end], new, new - 1, torch.ones(1, size, dtype=torch.bool))
        )
        asked = Asked(
            query=queries[:, :, first:end], speculated=None, position=new,
            budget=torch.full((1, size), strategy.budget.entries(count)), acts=torch.ones(1, size, dtype=torch.bool),
            compresses=torch.zeros(1, size, dtype=torch.bool), readable=(place[:, None] <= new[..., None]),
            entry_position=place, own=new[0], logits=None,
        )  # fmt: skip
        chosen = selector.select(asked)
        for head in range(heads):
            reads[head] += [row.nonzero()[:, 0].tolist() for row in chosen.visible[0, head]]
        if chosen.far is not None:
            assert (chosen.distance == selector.local).all()
            far += [row.nonzero()[:, 0].tolist() for row in (chosen.far & chosen.visible)[0, 0]]
        first = end
    return reads, far, selector


SMALL = dict(init=1, local_fraction=0.5, block=2, representatives=1)
# Budget 6: init 1, local 3, and one block of 2. Blocks: tokens 1-2, 3-4, 5-6, ...


@pytest.mark.parametrize("chunks", [[10], [1] * 10, [4, 1, 5]])
def test_a_block_exists_once_its_tokens_have_left_the_window(chunks):
    # Every product is 1: the first of equal blocks is read.
    ones = [[[1.0]] * 10]
    reads, _, selector = by_hand(ones, ones, 6, chunks, positions="original", **SMALL)
    assert make_strategy("infllm", 6, **SMALL).parts(6) == (1, 3, 1)
    assert reads[0] == [
        [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5],  # all fits in 6
        [0, 1, 2, 4, 5, 6], [0, 1, 2, 5, 6, 7], [0, 1, 2, 6, 7, 8], [0, 1, 2, 7, 8, 9],
    ]  # fmt: skip
    # Each entry was wanted by the three queries after it, as far as there are three.
    assert selector.state["wanted"][0, 0].tolist() == [3, 3, 3, 3, 3, 3, 3, 2, 1, 0]


def test_an_incomplete_block_is_never_read():
    # Keys grow, so the newest complete block wins. Query 6: block 1-2 has left the window (4-6),
    # of block 3-4 only token 3. Query 7: 3-4 has left (5-7). Query 8: of 5-6 only token 5. Query 9: 5-6.
    keys = [[[float(j)] for j in range(10)]]
    reads, _, _ = by_hand(keys, [[[1.0]] * 10], 6, positions="original", **SMALL)
    assert reads[0][6:] == [[0, 1, 2, 4, 5, 6], [0, 3, 4, 5, 6, 7], [0, 3, 4, 6, 7, 8], [0, 5, 6, 7, 8, 9]]


@pytest.mark.parametrize("chunks", [[8], [1] * 8, [6, 2]])
def test_a_block_is_represented_by_what_its_local_queries_wanted(chunks):
    # Blocks 1-2 (x: 1 and y: 1) and 3-4 (x: 2 and y: 3). Window of 3.
    keys = [[[0, 0], [1, 0], [0, 1], [2, 0], [0, 3], [0, 0], [0, 0], [0, 0]]]
    # Token 1 is followed by queries 2-4, token 2 by 3-5, token 3 by 4-6, token 4 by 5-7.
    # All of these look at x: tokens 1 and 3 are wanted (products 3 and 6), 2 and 4 get nothing.
    queries = [[[1, 0]] * 7 + [[1, 1]]]
    # The last query (1, 1), its own share included: token 4 gets 3 from it, token 3 has 6.
    reads, _, selector = by_hand(keys, queries, 6, chunks, positions="original", **SMALL)
    assert selector.state["wanted"][0, 0].tolist() == [0, 3, 0, 6, 3, 0, 0, 0]
    # Representatives (1, 0) and (2, 0) give 1 and 2: block 3-4.
    assert reads[0][7] == [0, 3, 4, 5, 6, 7]
    # A last query (-1, 1): representatives give -1 and -2, so block 1-2, although y would say 3-4.
    # Token 4: 0 + 0 + 3 from the last query; token 3: 2 + 2 + 2.
    queries[0][7] = [-1, 1]
    assert by_hand(keys, queries, 6, chunks, positions="original", **SMALL)[0][0][7] == [0, 1, 2, 5, 6, 7]
    # With two representatives the block's keys add up: -1 + 1 = 0 and -2 + 3 = 1: block 3-4.
    two = {**SMALL, "representatives": 2}
    assert by_hand(keys, queries, 6, chunks, positions="original", **two)[0][0][7] == [0, 3, 4, 5, 6, 7]


def test_heads_vote_and_share_what_is_read():
    # Three heads, keys of their own: blocks 1-2 and 3-4 give the last query (3, 0), (0, 1), (0, 1): 3 to 2.
    def head(first, second):
        return [[0.0], [first], [first], [second], [second], [0.0], [0.0], [0.0]]

    reads, _, _ = by_hand(
        [head(3, 0), head(0, 1), head(0, 1)], [[[1.0]] * 8] * 3, 6, positions="original", **SMALL
    )
    assert [of_head[7] for of_head in reads] == [[0, 1, 2, 5, 6, 7]] * 3
    # Two query heads of one KV head: 3 x 1 against 1 x 4.
    reads, _, _ = by_hand([head(3, 0), head(0, 4)], [[[1.0]] * 8] * 4, 6, positions="original", **SMALL)
    assert [of_head[7] for of_head in reads] == [[0, 3, 4, 5, 6, 7]] * 2


def test_sinks_and_blocks_are_far_and_the_window_is_not():
    rotations = []

    def rotate(x, by):
        rotations.append((tuple(x.shape), by.flatten().tolist()))
        return x

    ones = [[[1.0]] * 8]
    reads, far, _ = by_hand(ones, ones, 6, rotate=rotate, **SMALL)
    # While all fits, all is near.
    assert far == [[], [], [], [], [], [], [0, 1, 2], [0, 1, 2]]
    assert reads[0][6:] == [[0, 1, 2, 4, 5, 6], [0, 1, 2, 5, 6, 7]]
    # Blocks are judged where they are read: queries at 3, the window's end; keys at 0.
    assert rotations == [((1, 1, 8, 1), [3 - t for t in range(8)]), ((1, 1, 8, 1), [-t for t in range(8)])]


# --- options -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(positions="fix"), "unknown infllm positions 'fix' (did you mean 'fixed'?); known: fixed, original"),
        (dict(block=0), "infllm: block 0 is not a whole number of at least 1"),
        (dict(block=1.0), "infllm: block 1.0 is not a whole number of at least 1"),
        (dict(init=-1), "infllm: init -1 is not a whole number of at least 0"),
        (dict(representatives=0), "infllm: representatives 0 is not a whole number of at least 1"),
        (dict(local_fraction=0), "infllm: local_fraction 0 is not in (0, 1]"),
        (dict(local_fraction=1.5), "infllm: local_fraction 1.5 is not in (0, 1]"),
        (dict(local_fraction=float("nan")), "infllm: local_fraction nan is not in (0, 1]"),
        (dict(local_fraction=True), "infllm: local_fraction True is not in (0, 1]"),
        (dict(dense_layers=-1), "infllm: dense_layers -1 is not a whole number of at least 0"),
        (dict(budget_of="seen"), "infllm: its window has one length per request; use budget_of=prompt or a count of entries"),
        (dict(blocks=4), "strategy 'infllm' has no option 'blocks' (did you mean 'block'?)"),
    ],
)  # fmt: skip
def test_a_bad_option_says_what_is_right(options, message):
    with pytest.raises(KvaccError) as raised:
        make_strategy("infllm", 0.2, **options)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("family", sorted(NO_ROTATION))
def test_a_fixed_distance_needs_rotary_positions(family):
    with pytest.raises(KvaccError, match="use positions=original"):
        read_at_once(wrapped(family), make_strategy("infllm", 8), TOKENS)


def test_options_make_the_same_strategy_again():
    defaults = dict(
        dense_layers=0, init=128, local_fraction=0.65, block=128, representatives=4, positions="fixed"
    )
    assert make_strategy("infllm", 0.2).options() == defaults
    for options in ({}, dict(positions="original", block=4, local_fraction=1, init=0, representatives=1)):
        strategy = make_strategy("infllm", 0.2, **options)
        assert make_strategy("infllm", 0.2, **strategy.options()) == strategy
