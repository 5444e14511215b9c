"""InfiniGen against an oracle that shares no code with it, and by hand."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from naive import calibration, draw_tokens, sharp
from naive_select import (
    DECODERS,
    NaiveInfiniGen,
    NaiveTop,
    assert_both_paths,
    queries_and_keys,
    read_at_once,
    read_by_steps,
    select,
    skewed_columns,
)

from kvacc.budget import EVERYTHING
from kvacc.calibration import calibration_digest
from kvacc.errors import KvaccError
from kvacc.select_strategy import Asked, LayerContext, NewEntries
from kvacc.strategy import make_strategy

pytestmark = pytest.mark.usefixtures("skewing_folder")
TOKENS = draw_tokens(30, seed=4)
INFINITY = math.inf
families = pytest.mark.parametrize("family", ["llama", "opt"])
SPREAD = {"llama": 1.0, "opt": 0.3}
"""How far guessed logits lie apart, roughly: thresholds are in these units."""


def model_of(family):
    return sharp(family, num_hidden_layers=3)


@functools.cache
def bases(family, ratio):
    return skewed_columns(DECODERS[family](model_of(family).model), calibration(), ratio)


def oracle(family, rule, dense_layers, dense=0):
    return select(DECODERS[family](model_of(family).model), TOKENS, rule, dense_layers, dense)


# --- the whole strategy against the oracle -----------------------------------------------


def sixth(seen):
    return -(-seen // 6)


CASES = {
    "paper": (dict(alpha=4.0), 8, 8),
    "own counts": (dict(alpha=3.0, counts="own"), 12, 12),
    "ranked": (dict(alpha=3.0, current_token="ranked"), 8, 8),
    "ranked own counts": (dict(alpha=1.0, current_token="ranked", counts="own"), 12, 12),
    "one entry": (dict(alpha=4.0), 1, 1),
    "one entry ranked": (dict(alpha=4.0, current_token="ranked"), 1, 1),
    "no alpha": (dict(alpha=INFINITY), 5, 5),
    "narrow": (dict(alpha=0.0, counts="own"), 9, 9),
    "all columns": (dict(alpha=2.0, partial_ratio=1), 10, 10),
    "few columns": (dict(alpha=2.0, partial_ratio=0.1), 10, 10),
    "two dense layers": (dict(alpha=3.0, dense_layers=2), 8, 8),
    "current": (dict(alpha=3.0, speculate_from="current", dense_layers=0), 8, 8),
    "fraction": (dict(alpha=5.0), 0.4, 12),
    "of seen": (dict(alpha=5.0), ("1/6", "seen"), sixth),
}


@families
@pytest.mark.parametrize("dense", [0, 13], ids=["stream", "context"])
@pytest.mark.parametrize("case", CASES)
def test_both_paths_read_what_the_paper_says(family, case, dense):
    options, budget, entries = CASES[case]
    options = {**options, "alpha": options["alpha"] * SPREAD[family]}
    strategy = make_strategy("infinigen", *(budget if isinstance(budget, tuple) else (budget,)), **options)
    rule = NaiveInfiniGen(
        entries, bases(family, strategy.partial_ratio), strategy.alpha, strategy.counts,
        strategy.current_token == "always", strategy.speculate_from == "current",
    )  # fmt: skip
    expected = oracle(family, rule, strategy.dense_layers, dense)
    assert_both_paths(model_of(family), strategy, TOKENS, expected, dense)


@families
def test_the_cases_above_can_tell_rules_apart(family):
    # Otherwise a comparison with the oracle would pass whatever the rule.
    cap = {"llama": 12, "opt": 8}[family]

    def reads(alpha=3.0, **changes):
        alpha *= SPREAD[family]
        rule = NaiveInfiniGen(**{"entries": cap, "bases": bases(family, 0.3), "alpha": alpha, **changes})
        return oracle(family, rule, 1)[1][2]

    plain = reads()
    for changes in (
        dict(counts="own"), dict(always=False), dict(current=True), dict(alpha=2.0), dict(entries=cap - 1),
        dict(bases=bases(family, 0.2)),
    ):  # fmt: skip
        assert not torch.equal(plain, reads(**changes)), changes
    # Heads read different entries, the cap binds at some queries and the threshold at others.
    assert not torch.equal(plain[0], plain[1])
    counts = plain[:, cap:].sum(-1)
    assert (counts == cap).any() and (counts < cap).any()


# --- an exact top-n oracle ----------------------------------------------------------------


@families
@pytest.mark.parametrize("current_token", ["always", "ranked"])
@pytest.mark.parametrize("counts", ["mean", "own"])
def test_with_all_columns_of_its_own_query_it_is_exact_top_n(family, current_token, counts):
    strategy = make_strategy(
        "infinigen", 7, partial_ratio=1, speculate_from="current", dense_layers=0, alpha=INFINITY,
        counts=counts, current_token=current_token,
    )  # fmt: skip
    expected = oracle(family, NaiveTop(7, current_token == "always"), 0)
    assert_both_paths(model_of(family), strategy, TOKENS, expected)


@families
@pytest.mark.parametrize("dense_layers", [0, 1])
def test_without_a_limit_it_is_full(family, dense_layers):
    model = model_of(family)
    source = "previous" if dense_layers else "current"
    for budget in (1.0, 30, 64):
        strategy = make_strategy(
            "infinigen", budget, alpha=INFINITY, dense_layers=dense_layers, speculate_from=source
        )
        full, _, _ = read_at_once(model, make_strategy("full"), TOKENS)
        for read in (read_at_once, read_by_steps):
            logits, reads, _ = read(model, strategy, TOKENS)
            assert sorted(reads)[-1] == 2
            causal = torch.ones(30, 30, dtype=torch.bool).tril()
            assert all(torch.equal(mask, causal.expand_as(mask)) for mask in reads.values())
            torch.testing.assert_close(logits, full, atol=1e-4, rtol=0)


@families
def test_skewed_logits_are_the_logits(family):
    model = model_of(family)
    speculation = model.speculation_for(make_strategy("infinigen", 0.5, partial_ratio=1))
    for layer, (query, key) in queries_and_keys(DECODERS[family](model.model), TOKENS).items():
        query, key = query.transpose(0, 1)[None], key.transpose(0, 1)[None]
        group = query.shape[1] // key.shape[1]
        plain = query @ key.repeat_interleave(group, 1).mT
        skewed = (
            speculation.skewed(layer, query) @ speculation.skewed(layer, key).repeat_interleave(group, 1).mT
        )
        assert plain.abs().max() > 1
        torch.testing.assert_close(skewed, plain, atol=1e-4, rtol=0)


@families
def test_without_skewing_it_guesses_from_other_columns(family):
    # skew=False: the columns of the queries and keys as they are.
    plain = {}
    for layer, (query, key) in queries_and_keys(
        DECODERS[family](model_of(family).model), calibration()
    ).items():
        plain[layer] = []
        for head, of_group in enumerate(query.chunk(key.shape[1], 1)):
            size = of_group.abs().sum((0, 1)) + key[:, head].abs().sum(0)
            index = size.argsort(descending=True)[:3]  # 0.3 of 8 columns, rounded up
            plain[layer].append(torch.eye(query.shape[2])[:, index])
    strategy = make_strategy("infinigen", 8, alpha=3.0, skew=False)
    expected = oracle(family, NaiveInfiniGen(8, plain, 3.0), 1)
    assert_both_paths(model_of(family), strategy, TOKENS, expected)
    skewed = oracle(family, NaiveInfiniGen(8, bases(family, 0.3), 3.0), 1)
    assert not torch.equal(skewed[1][1], expected[1][1])


# --- by hand -------------------------------------------------------------------------------


def by_hand(logits, budget, compressed=None, queries=None, **options):
    """Entries read by the last of n queries, for each KV head.

    Args:
        logits: [Q][n], the speculated logit of each query head at each entry, its own last.
    """
    logits = torch.tensor(logits, dtype=torch.float32)
    heads, count = options.pop("heads", len(logits)), logits.shape[1]
    strategy = make_strategy("infinigen", budget, **options)
    # Key j of a KV head holds the logits of its query heads at j; query head g asks for its own.
    group = len(logits) // heads
    key = logits.view(heads, group, count).transpose(1, 2)[None]
    query = torch.eye(group).repeat(heads, 1)[None, :, None]
    selector = strategy.selector(
        LayerContext(1, heads, torch.tensor([compressed or count]), skewed=lambda x: x)
    )
    place = torch.arange(count)[None]
    selector.extend(NewEntries(key, place, place - 1, torch.ones(1, count, dtype=torch.bool)))
    asked = Asked(
        query=None, speculated=query, position=place[:, -1:], budget=torch.tensor([[strategy.budget.entries(count)]]),
        acts=torch.ones(1, 1, dtype=torch.bool), compresses=torch.zeros(1, 1, dtype=torch.bool),
        readable=torch.ones(1, 1, count, dtype=torch.bool), entry_position=place, own=torch.tensor([count - 1]),
        logits=lambda query, key: query @ key.repeat_interleave(group, 1).mT,
    )  # fmt: skip
    visible = selector.select(asked).visible
    assert visible.shape == (1, heads, 1, count)
    return [mask.nonzero()[:, 0].tolist() for mask in visible[0, :, 0]]


TWO_HEADS = [
    [5.0, 4.0, 1.0, 3.0, 9.0],
    [9.0, 2.0, 1.0, 0.0, 2.0],
]


def test_threshold_and_mean_count():
    # The own entry (last) is no candidate. Head 0: within 2 of 5 are 5, 4 and 3; head 1: 9 alone.
    # On average (3 + 1) / 2 = 2, so each head reads its two highest, and its own.
    assert by_hand(TWO_HEADS, 4, alpha=2) == [[0, 1, 4], [0, 1, 4]]
    # Within 1: 5 and 4; 9 alone: 3 / 2 rounded down is 1.
    assert by_hand(TWO_HEADS, 4, alpha=1) == [[0, 4], [0, 4]]
    # Within 0: the highest of each.
    assert by_hand(TWO_HEADS, 4, alpha=0) == [[0, 4], [0, 4]]


def test_every_head_its_own_count():
    assert by_hand(TWO_HEADS, 4, alpha=2, counts="own") == [[0, 1, 3, 4], [0, 4]]


def test_the_budget_caps_the_count_with_the_own_entry():
    # Budget 3 leaves two beside the own entry.
    assert by_hand(TWO_HEADS, 3, alpha=2, counts="own") == [[0, 1, 4], [0, 4]]
    assert by_hand(TWO_HEADS, 1, alpha=2) == [[4], [4]]
    assert by_hand(TWO_HEADS, 2, alpha=INFINITY) == [[0, 4], [0, 4]]


def test_what_fits_is_all_read():
    assert by_hand(TWO_HEADS, 5, alpha=0) == [[0, 1, 2, 3, 4]] * 2
    assert by_hand(TWO_HEADS, 5, alpha=0, current_token="ranked") == [[0, 1, 2, 3, 4]] * 2


def test_the_own_entry_ranks_with_the_others():
    # Now 9 is head 0's highest, and alone within 2; head 1: 9 alone. Mean 1.
    assert by_hand(TWO_HEADS, 4, alpha=2, current_token="ranked") == [[4], [0]]
    # Within 5 of 9: 9, 5 and 4 of head 0; 9 of head 1. Mean 2. Head 1's 2s tie: the lower is read.
    assert by_hand(TWO_HEADS, 4, alpha=5, current_token="ranked") == [[0, 4], [0, 1]]
    # Budget 2 includes the own entry where it is among them.
    assert by_hand(TWO_HEADS, 2, alpha=INFINITY, current_token="ranked", counts="own") == [[0, 4], [0, 1]]


def test_equal_logits_are_read_from_the_front():
    assert by_hand([[1.0, 1.0, 1.0, 1.0, 0.0]], 3, alpha=0) == [[0, 1, 4]]


def test_query_heads_of_one_kv_head_share_a_selection():
    # Distances below each query head's highest: 0 1 7 9 of [10, 9, 3, 1], 6 5 0 6 of [0, 1, 6, 0].
    # The head that wants an entry most counts: 0 1 0 6. Within 1: entries 0, 1 and 2.
    grouped = [[10.0, 9.0, 3.0, 1.0, 0.0], [0.0, 1.0, 6.0, 0.0, 0.0]]
    assert by_hand(grouped, 4, heads=1, alpha=1) == [[0, 1, 2, 4]]
    # Two beside the own one: 0 and 2 tie at 0, and come before 1.
    assert by_hand(grouped, 3, heads=1, alpha=1) == [[0, 2, 4]]
    # A sum of the logits would have read 0 and 1.


# --- the pool -----------------------------------------------------------------------------


POLICIES = ["fifo", "lru", "counter"]


@families
@pytest.mark.parametrize("dense", [0, 13], ids=["stream", "context"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_limited_pool_reads_what_its_policy_left(family, policy, dense):
    strategy = make_strategy("infinigen", 7, alpha=3.0, pool=10, pool_policy=policy)
    rule = NaiveInfiniGen(7, bases(family, 0.3), 3.0, pool=(10, policy), dense=dense)
    expected = oracle(family, rule, 1, dense)
    assert_both_paths(model_of(family), strategy, TOKENS, expected, dense)
    victims = {tuple(pool.victims) for pools in rule.pools.values() if pools for pool in pools}
    if policy == "fifo":
        assert victims == {tuple(range(20))}
    else:
        assert len(victims) >= 3  # heads forget different entries


@pytest.mark.parametrize("policy", POLICIES)
def test_the_pool_holds_its_capacity_and_never_evicts_an_entry_twice(policy):
    # A third of 30 tokens.
    strategy = make_strategy("infinigen", 0.5, alpha=3.0, pool="1/3", pool_policy=policy)
    model = model_of("llama")
    held, fetched = held_over_time(model, strategy)
    for layer, heads in held.items():
        for head, states in enumerate(heads):
            victims, before = [], set()
            for t, now in enumerate(states):
                assert len(now) == min(t + 1, 10) and t in now
                assert fetched[layer][head][t] <= before | {t}, "reads what was overwritten"
                victims += sorted((before | {t}) - now)
                before = now
            assert len(victims) == len(set(victims)) == 20


def held_over_time(model, strategy, chunks=None, dense=0):
    """layer -> head -> token -> positions that the pool holds after it; and that it read."""
    from kvacc.engine import attention
    from kvacc.engine.scoring import step_forward
    from kvacc.engine.stepping import RowReading

    session = model.step(strategy, [RowReading(0, dense, len(TOKENS))], record=True)
    held, fetched = {}, {}
    with attention.active(session), torch.inference_mode():
        for t, token in enumerate(TOKENS):
            step_forward(model, session, torch.tensor([[token]]), t)
            for number in (1, 2):
                selector = session.cache.layers[number].selector
                for name, mask in (
                    ("held", selector.pool.held[0]),
                    ("read", session.reads[t][number][0, :, 0]),
                ):
                    into = held if name == "held" else fetched
                    heads = into.setdefault(number, [[] for _ in mask])
                    for head, of_head in enumerate(mask):
                        heads[head].append(set(of_head.nonzero()[:, 0].tolist()))
                evicted = selector.pool.evictions[0].tolist()
                assert evicted == [t + 1 - len(heads[-1]) for heads in held[number]]
    return held, fetched


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dense", [13, 30], ids=["context", "serve"])
def test_a_prefill_is_read_whole_and_then_shrinks(policy, dense):
    strategy = make_strategy("infinigen", 5, alpha=3.0, pool=8, pool_policy=policy)
    held, fetched = held_over_time(model_of("llama"), strategy, dense=dense)
    for layer in held:
        for states, reads in zip(held[layer], fetched[layer], strict=True):
            assert [len(now) for now in states] == [*range(1, dense), *[8] * (31 - dense)]
            # Nothing was chosen in the prefill, so the newest are left.
            assert states[dense - 1] == set(range(dense - 8, dense))
            assert all(reads[t] == set(range(t + 1)) for t in range(dense))
            assert all(len(reads[t]) <= 5 for t in range(dense, 30))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunks", [[30], [1, 7, 13, 9], [13, 1, 1, 15]])
def test_a_limited_pool_does_not_depend_on_chunks(policy, chunks):
    model = model_of("llama")
    for dense in (0, 17):
        strategy = make_strategy("infinigen", 7, alpha=3.0, pool=10, pool_policy=policy)
        logits, reads, _ = read_by_steps(model, strategy, TOKENS, dense=dense)
        found, chosen, _ = read_by_steps(model, strategy, TOKENS, chunks, dense=dense)
        assert all(torch.equal(reads[layer], chosen[layer]) for layer in (1, 2))
        torch.testing.assert_close(found, logits, atol=1e-3, rtol=0)


def test_a_pool_for_everything_is_no_limit():
    model = model_of("llama")
    unlimited = make_strategy("infinigen", 7, alpha=3.0)
    assert not unlimited.is_pool_limited and unlimited.shares_trees and unlimited.selects_ahead
    logits, reads, _ = read_at_once(model, unlimited, TOKENS)
    for pool in (30, 99):
        limited = make_strategy("infinigen", 7, alpha=3.0, pool=pool)
        assert limited.is_pool_limited and not limited.shares_trees and not limited.selects_ahead
        found, chosen, _ = read_at_once(model, limited, TOKENS)
        assert all(torch.equal(reads[layer], chosen[layer]) for layer in reads)
        assert torch.equal(logits, found)


# --- options -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(columns="papers"), "unknown infinigen columns 'papers' (did you mean 'paper'?); known: paper, query, union"),
        (dict(speculate_from="next"), "unknown infinigen speculate_from 'next'; known: current, previous"),
        (dict(counts="means"), "unknown infinigen counts 'means' (did you mean 'mean'?); known: mean, own"),
        (dict(current_token="rank"), "unknown infinigen current_token 'rank' (did you mean 'ranked'?); known: always, ranked"),
        (dict(pool_policy="lfu"), "unknown infinigen pool_policy 'lfu' (did you mean 'lru'?); known: counter, fifo, lru"),
        (dict(alpha=-1), "infinigen: alpha -1 is not a number of at least 0 (or inf)"),
        (dict(alpha=math.nan), "infinigen: alpha nan is not a number of at least 0 (or inf)"),
        (dict(alpha="4"), "infinigen: alpha '4' is not a number of at least 0 (or inf)"),
        (dict(alpha=True), "infinigen: alpha True is not a number of at least 0 (or inf)"),
        (dict(partial_ratio=0), "infinigen: partial_ratio 0 is not in (0, 1]"),
        (dict(partial_ratio=1.5), "infinigen: partial_ratio 1.5 is not in (0, 1]"),
        (dict(partial_ratio=math.nan), "infinigen: partial_ratio nan is not in (0, 1]"),
        (dict(skew="no"), "infinigen: skew 'no' is neither true nor false"),
        (dict(dense_layers=0), "infinigen: dense_layers 0 leaves layer 0 no layer before it to guess from; give 1 or more, or speculate_from=current"),
        (dict(dense_layers=-1, speculate_from="current"), "infinigen: dense_layers -1 is not a whole number of at least 0"),
        (dict(dense_layers=1.5), "infinigen: dense_layers 1.5 is not a whole number of at least 0"),
        (dict(dense_layers=True), "infinigen: dense_layers True is not a whole number of at least 0"),
        (dict(calibration="/none/such.txt"), "calibration text '/none/such.txt' does not exist; give the path of a UTF-8 text file, or 'prose'"),
        (dict(calibration_digest="0123456789abcdef"), "leave calibration_digest out to use it so"),
        (dict(pool=0), "budget 0 keeps nothing"),
        (dict(pool=1.5), "budget 1.5 as a fraction is above 1"),
        (dict(alhpa=4), "strategy 'infinigen' has no option 'alhpa' (did you mean 'alpha'?)"),
    ],
)  # fmt: skip
def test_a_bad_option_says_what_is_right(options, message):
    with pytest.raises(KvaccError) as raised:
        make_strategy("infinigen", 0.2, **options)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_calibration_text_that_was_edited_is_another(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one two three")
    before = make_strategy("infinigen", 0.2, calibration=str(text))
    assert before.calibration_digest == calibration_digest(str(text))
    assert make_strategy("infinigen", 0.2, **before.options()) == before
    text.write_text("one two four")
    with pytest.raises(
        KvaccError, match=f"digest [0-9a-f]{{16}}, not {before.calibration_digest}: it was edited"
    ):
        make_strategy("infinigen", 0.2, **before.options())
    assert make_strategy("infinigen", 0.2, calibration=str(text)) != before


def test_options_make_the_same_strategy_again():
    for options in (
        {}, dict(alpha=INFINITY), dict(alpha=3), dict(pool=0.8, pool_policy="lru"), dict(pool=7), dict(pool="80%"),
        dict(speculate_from="current", dense_layers=0, skew=False, partial_ratio=1, columns="union"),
    ):  # fmt: skip
        strategy = make_strategy("infinigen", 0.2, **options)
        assert make_strategy("infinigen", 0.2, **strategy.options()) == strategy
    assert make_strategy("infinigen", 0.2, pool="80%") == make_strategy("infinigen", 0.2, pool=0.8)
    assert make_strategy("infinigen", 0.2, pool=1) != make_strategy("infinigen", 0.2, pool=1.0)


def test_defaults_are_the_papers():
    strategy = make_strategy("infinigen", 0.2)
    assert (strategy.alpha, strategy.partial_ratio, strategy.columns, strategy.dense_layers) == (
        4.0,
        0.3,
        "paper",
        1,
    )
    assert (strategy.speculate_from, strategy.counts, strategy.pool, strategy.pool_policy) == (
        "previous", "mean", "1.0", "counter",
    )  # fmt: skip
    assert (
        strategy.budget.entries(100) == 20 and make_strategy("infinigen", 1.0).budget.entries(9) == EVERYTHING
    )


def test_without_calibration_tokens_a_model_says_what_to_give():
    from kvacc.engine.wrapped import WrappedModel

    bare = WrappedModel(model_of("llama").model)
    with pytest.raises(KvaccError, match="give WrappedModel calibration="):
        read_at_once(bare, make_strategy("infinigen", 0.2), TOKENS)
