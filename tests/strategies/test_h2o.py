"""H2O: hand-worked numbers, the authors' simulations transcribed, and its options."""

from __future__ import annotations

import math

import pytest
import torch
from naive import draw_tokens, flat_plan, one_request, scan_by_hand, sharp, step_through

from kvacc.compiled_choice import numba_is_here
from kvacc.engine.plan import build_rows, make_plan
from kvacc.engine.scoring import score_documents
from kvacc.errors import KvaccError
from kvacc.strategy import make_strategy, strategy_classes

BOTH_SCANS = pytest.mark.parametrize("use_compiled", [False, True], ids=["reference", "compiled"])

# Attention weights before normalisation, w[t][j], chosen so that every row's sum is round.
SIX_TOKENS = [
    [1],
    [1, 3],
    [2, 1, 1],
    [1, 1, 2, 6],
    [1, 2, 1, 5, 1],
    [1, 1, 90, 6, 1, 1],
]


@pytest.fixture(autouse=True)
def needs_numba(request):
    if "use_compiled" in request.fixturenames and request.getfixturevalue("use_compiled") and not numba_is_here():
        pytest.skip("numba is not installed")


def logits_of(*weights) -> torch.Tensor:
    """Logits [1, 1, G, T, T] whose softmax weights are ``weights``, one table per query head."""
    tables = [[[math.log(w) for w in row] + [0.0] * (len(table) - len(row)) for row in table] for table in weights]
    return torch.tensor(tables, dtype=torch.float32)[None, None]


def reads(visible: torch.Tensor) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in visible[0, 0]]


def kept(scan) -> list[int]:
    return scan.current.alive[0, 0].nonzero()[:, 0].tolist()


# --- the paper's algorithm ---------------------------------------------------------------


@BOTH_SCANS
def test_six_tokens_by_hand(use_compiled):
    # Budget 4: recent = ceil(0.5 * 4) = 2, heavy = 2. Scores are sums of attention over the kept set.
    #
    #       attention of query t                    scores afterwards                    evicted
    # t=0   1                                       1
    # t=1   .25 .75                                 1.25 .75
    # t=2   .50 .25 .25                             1.75 1.00 .25
    # t=3   .10 .10 .20 .60                         1.85 1.10 .45 .60
    # t=4   .10 .20 .10 .50 .10                     1.95 1.30 .55 1.10 .10               2: lowest of 0, 1, 2
    #       (4 has .10, but 3 and 4 are recent)
    # t=5   over {0, 1, 3, 4, 5}, sum 10:           2.05 1.40  -  1.70 .20 .10           1: lowest of 0, 1, 3
    #       .10 .10  -  .60 .10 .10                 (4 and 5 are recent)
    # Without renormalising (sum 100, entry 2's 90 included) 1 would hold 1.31 and 3 only
    # 1.16, and 3 would go: the renormalised row decides.
    strategy = make_strategy("h2o", 4, recent_fraction=0.5)
    visible, seen_by, scan = scan_by_hand(strategy, logits_of(SIX_TOKENS), use_compiled)
    assert reads(visible) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 3, 4, 5]]
    assert seen_by[0, 0].tolist() == [1, 2, 3, 4, 5, 5]
    assert kept(scan) == [0, 3, 4, 5]
    expected = {0: 2.05, 3: 1.70, 4: 0.20, 5: 0.10}
    for place, score in expected.items():
        assert float(scan.current.score[0, 0, place]) == pytest.approx(score, abs=1e-5)


@BOTH_SCANS
def test_the_query_scores_before_anything_is_evicted(use_compiled):
    # Budget 2, recent 1. After t=1: .40+1 = 1.40 and .60. Query 2 gives entry 0 .05 and entry 1 .90:
    # 1.45 < 1.50, so 0 goes. Evicting before the query's own attention counts would take 1.
    strategy = make_strategy("h2o", 2)
    logits = logits_of([[1], [2, 3], [1, 18, 1]])
    assert kept(scan_by_hand(strategy, logits, use_compiled)[2]) == [1, 2]


@BOTH_SCANS
def test_all_heavy_lets_the_newest_token_go(use_compiled):
    # Budget 2, no recent window. Scores after t=2: 1.5 + .4, .5 + .4, .2: the newest is the lowest.
    logits = logits_of([[1], [1, 1], [2, 2, 1]])
    assert kept(scan_by_hand(make_strategy("h2o", 2, recent_fraction=0), logits, use_compiled)[2]) == [0, 1]
    assert kept(scan_by_hand(make_strategy("h2o", 2, recent_fraction=0.5), logits, use_compiled)[2]) == [0, 2]


@BOTH_SCANS
def test_all_recent_is_a_window(use_compiled):
    torch.manual_seed(3)
    logits = torch.randn(1, 2, 2, 12, 12) * 3
    visible, _, scan = scan_by_hand(make_strategy("h2o", 4, recent_fraction=1), logits, use_compiled)
    window, _, _ = scan_by_hand(make_strategy("recent", 4), logits, use_compiled)
    assert torch.equal(visible, window)
    assert kept(scan) == [8, 9, 10, 11]


@BOTH_SCANS
def test_two_query_heads_share_one_kept_set_by_mean_or_max(use_compiled):
    # Budget 2, recent 1. Both query heads until t=1: .10 and .90, so scores 1.10 and 0.90.
    # t=2, first head .20 .60 .20, second .20 .10 .70
    #   mean: .20 and .35 -> 1.30 and 1.25: entry 1 goes
    #   max:  .20 and .60 -> 1.30 and 1.50: entry 0 goes
    logits = logits_of([[1], [1, 9], [2, 6, 2]], [[1], [1, 9], [2, 1, 7]])
    mean = scan_by_hand(make_strategy("h2o", 2, aggregate="mean"), logits, use_compiled)[2]
    most = scan_by_hand(make_strategy("h2o", 2, aggregate="max"), logits, use_compiled)[2]
    assert kept(mean) == [0, 2]
    assert kept(most) == [1, 2]
    assert mean.current.score[0, 0, 0].item() == pytest.approx(1.30, abs=1e-5)
    assert most.current.score[0, 0, 1].item() == pytest.approx(1.50, abs=1e-5)


@BOTH_SCANS
def test_of_equal_scores_the_lower_position_stays(use_compiled):
    # Entries 1, 2 and 3 receive (almost) nothing: exactly 0 in float32, so they tie.
    none = 1e-80
    rows = [[1, *[none] * t] for t in range(5)]
    strategy = make_strategy("h2o", 3, recent_fraction=0)
    scan = scan_by_hand(strategy, logits_of(rows), use_compiled)[2]
    assert scan.current.score[0, 0, :4].tolist() == [5.0, 0.0, 0.0, 0.0]
    assert kept(scan) == [0, 1, 2]


@BOTH_SCANS
def test_sums_favour_early_tokens(use_compiled):
    # With uniform attention nothing distinguishes tokens but how long they have been there:
    # the first ones are never replaced. The module's docstring names the sum as the paper's choice.
    logits = torch.zeros(1, 1, 1, 12, 12)
    visible, _, _ = scan_by_hand(make_strategy("h2o", 4, recent_fraction=0.25), logits, use_compiled)
    for t in range(5, 12):
        assert visible[0, 0, t].nonzero()[:, 0].tolist() == [0, 1, 2, t - 1, t]


def test_averages_do_not_favour_early_tokens_as_sums_do():
    # Budget 3, no recent tokens. Attention received, summed and divided by the queries that saw it:
    #   t=0   1                        t=2   .25 .25 .50
    #   t=1   .50 .50                  t=3   .20 .20 .20 .40
    #   sums      1.95  .95  .70  .40     the newest goes
    #   averages   .49  .32  .35  .40     the second goes
    table = [[1], [1, 1], [1, 1, 2], [1, 1, 1, 2]]
    for scores, left in (("renormalised", [0, 1, 2]), ("averaged", [0, 2, 3])):
        strategy = make_strategy("h2o", 3, recent_fraction=0, scores=scores)
        scan = scan_by_hand(strategy, logits_of(table), use_compiled=False)[2]
        assert kept(scan) == left
        assert scan.current.score[0, 0, 0] == pytest.approx(1.95)


# --- the authors' simulations ------------------------------------------------------------


def causal_softmax(logits: torch.Tensor) -> torch.Tensor:
    """[..., T, T] -> rows of attention over all earlier tokens."""
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, float("-inf")).softmax(-1)


def opt_simulation(attention: torch.Tensor, h: int, r: int) -> torch.Tensor:
    """FMInference/H2O, utils_lm_eval/modify_opt.py, "local": a transcription.

    attention [T, T], full causal rows; the mask of what each query reads, bool [T, T].
    """
    size = attention.shape[0]
    acc = attention[:h].sum(0)
    acc[h:] = 0
    mask = torch.zeros(size, size, dtype=torch.bool)
    mask[:h, :h] = True
    for t in range(h, size):
        keep = torch.zeros(size, dtype=torch.bool)
        if h > 1:
            keep[acc.topk(h - 1).indices] = True
        keep[t] = h > 0
        mask[t] = keep
        acc = (acc + attention[t]) * keep
    mask = mask.tril()
    distance = torch.arange(size)[:, None] - torch.arange(size)
    return mask | ((distance >= 0) & (distance <= r))


def llama_simulation(attention: torch.Tensor, h: int, r: int) -> torch.Tensor:
    """FMInference/H2O, utils_lm_eval/modify_llama.py, "global": a transcription."""
    size = attention.shape[0]
    keep = torch.zeros(size, dtype=torch.bool)
    if h:
        keep[attention.sum(0).topk(h).indices] = True
    distance = torch.arange(size)[:, None] - torch.arange(size)
    return (keep | (distance.abs() <= r)) & (distance >= 0)


def visible_globally(strategy, logits):
    """The product's ``scores=global`` mask for logits [1, H, G, T, T]: bool [1, H, T, T]."""
    size = logits.shape[-1]
    causal = torch.ones(1, size, size, dtype=torch.bool).tril()
    plan = flat_plan(strategy, size)
    return strategy.visible_from_all_queries(
        causal_softmax(logits), plan.position, causal, plan.budget[:, 0].long()
    )


def test_six_tokens_by_hand_in_the_authors_opt_simulation():
    # Budget 4: r = 2, h = 2; scores from rows over *all* earlier tokens.
    # acc over the first h = 2 rows: 1.25 .75
    # t=2: heavy {0}, arriving 2; acc 0: 1.75, 2: .25; band 0..2   reads 0 1 2
    # t=3: heavy {0}, arriving 3; acc 0: 1.85, 3: .60; band 1..3   reads 0 1 2 3
    # t=4: heavy {0}, arriving 4; acc 0: 1.95, 4: .10; band 2..4   reads 0 2 3 4
    # t=5: heavy {0}, arriving 5;                      band 3..5   reads 0 3 4 5
    strategy = make_strategy("h2o", 4, scores="full_row")
    visible, _, _ = scan_by_hand(strategy, logits_of(SIX_TOKENS), use_compiled=False)
    assert reads(visible) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 2, 3, 4], [0, 3, 4, 5]]


def test_six_tokens_by_hand_in_the_authors_llama_simulation():
    # Column sums over all six queries: 1.96 1.31 1.45 1.16 .11 .01, so the heavy set of every
    # query is {0, 2}: query 5's weight of .90 keeps entry 2 even for queries before it.
    strategy = make_strategy("h2o", 4, scores="global")
    visible = visible_globally(strategy, logits_of(SIX_TOKENS))
    assert reads(visible) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 2, 3, 4], [0, 2, 3, 4, 5]]


@pytest.mark.parametrize("budget", [1, 2, 5, 9, 23, 40])
@pytest.mark.parametrize("recent_fraction", [0.0, 0.25, 0.5, 1.0])
def test_full_row_is_the_authors_opt_simulation(budget, recent_fraction):
    torch.manual_seed(budget)
    logits = torch.randn(1, 3, 1, 24, 24) * 3
    recent = math.ceil(recent_fraction * budget)
    strategy = make_strategy("h2o", budget, recent_fraction=recent_fraction, scores="full_row")
    visible, _, _ = scan_by_hand(strategy, logits, use_compiled=False)
    for head in range(3):
        expected = opt_simulation(causal_softmax(logits[0, head, 0]), min(budget - recent, 24), recent)
        assert torch.equal(visible[0, head], expected)


@pytest.mark.parametrize("budget", [1, 2, 5, 9, 23])
@pytest.mark.parametrize("recent_fraction", [0.0, 0.25, 0.5, 1.0])
def test_global_is_the_authors_llama_simulation(budget, recent_fraction):
    torch.manual_seed(budget)
    logits = torch.randn(1, 3, 1, 24, 24) * 3
    recent = math.ceil(recent_fraction * budget)
    strategy = make_strategy("h2o", budget, recent_fraction=recent_fraction, scores="global")
    visible = visible_globally(strategy, logits)
    for head in range(3):
        expected = llama_simulation(causal_softmax(logits[0, head, 0]), budget - recent, recent)
        assert torch.equal(visible[0, head], expected)


def decisions(strategy, tokens) -> dict[int, torch.Tensor]:
    plan = make_plan(build_rows([(0, one_request(tokens))]), strategy)
    return sharp("llama").parallel(plan, strategy, record=True)[1].decisions


def test_global_scores_read_the_future():
    # Only query 11 changes, and with it what queries 5 to 10 read.
    torch.manual_seed(0)
    strategy = make_strategy("h2o", 5, recent_fraction=0.2, scores="global")
    logits = torch.randn(1, 1, 1, 12, 12)
    before = visible_globally(strategy, logits)
    logits[..., 11, :] = -9.0
    logits[..., 11, 7] = 9.0
    after = visible_globally(strategy, logits)
    assert not before[0, 0, 9, 7] and after[0, 0, 9, 7]
    assert not torch.equal(before[..., :11, :], after[..., :11, :])


@pytest.mark.parametrize("scores", ["renormalised", "full_row", "global"])
def test_a_strategy_is_marked_causal_only_if_it_is(scores):
    strategy = make_strategy("h2o", 10, recent_fraction=0.2, scores=scores)
    one = draw_tokens(30)
    other = one[:14] + draw_tokens(16, seed=1)
    first, second = decisions(strategy, one), decisions(strategy, other)
    same = all(torch.equal(first[layer][:, :, :14, :14], second[layer][:, :, :14, :14]) for layer in first)
    assert strategy.causal == same == (scores != "global")


def test_global_scores_are_refused_where_they_cannot_exist():
    strategy = make_strategy("h2o", 0.3, scores="global")
    strategy.require_protocol("stream")
    for protocol in ("context", "serve"):
        with pytest.raises(KvaccError, match=rf"'{protocol}'; it supports: stream"):
            strategy.require_protocol(protocol)
    with pytest.raises(KvaccError, match="reads future tokens, so it cannot decode"):
        step_through(sharp("llama"), strategy, [5, 6, 7])
    with pytest.raises(KvaccError, match="use budget_of=prompt"):
        make_strategy("h2o", 0.3, "seen", scores="global")


def test_global_scores_do_not_depend_on_the_neighbours_in_the_batch():
    strategy = make_strategy("h2o", 0.3, scores="global")
    requests = [one_request(draw_tokens(n, seed=n), scored=3) for n in (25, 9, 17)]
    together = score_documents(sharp("llama"), [[r] for r in requests], strategy)
    for request, (score,) in zip(requests, together, strict=True):
        ((alone,),) = score_documents(sharp("llama"), [[request]], strategy)
        assert alone.loglikelihood == pytest.approx(score.loglikelihood, abs=1e-4)
        assert alone.kept_fraction == score.kept_fraction


def test_simulations_free_no_memory_and_say_so():
    assert make_strategy("h2o", 0.2).physical_eviction
    for scores in ("full_row", "global"):
        assert not make_strategy("h2o", 0.2, scores=scores).physical_eviction


def test_full_row_agrees_on_both_paths():
    tokens = draw_tokens(20)
    strategy = make_strategy("h2o", 6, scores="full_row")
    masks = decisions(strategy, tokens)
    _, after, _ = step_through(sharp("llama"), strategy, tokens)
    for layer, mask in masks.items():
        for head in range(mask.shape[1]):
            for t in range(len(tokens) - 1):
                read_next = mask[0, head, t + 1].nonzero()[:, 0].tolist()
                assert [*after[t][layer, head], t + 1] == read_next


# --- options -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "budget", "recent"), [(0.5, 5, 3), (0.1, 30, 3), (0.9, 1000, 900), (0.0, 7, 0), (1.0, 7, 7), (0.5, 1, 1)]
)
def test_the_recent_share_is_rounded_up_exactly(fraction, budget, recent):
    assert make_strategy("h2o", 0.5, recent_fraction=fraction).recent_count(budget) == recent


def test_its_description_is_the_constructor_call():
    strategy = make_strategy("h2o", "20%", recent_fraction=0.25, aggregate="max")
    assert strategy.options() == {"recent_fraction": 0.25, "scores": "renormalised", "aggregate": "max"}
    rebuilt = make_strategy("h2o", strategy.budget, **strategy.options())
    assert rebuilt == strategy and repr(rebuilt) == repr(strategy)
    assert not strategy_classes()["h2o"].is_control


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recent_fraction": 1.5}, "recent_fraction 1.5 is not between 0 and 1"),
        ({"recent_fraction": -0.1}, "recent_fraction -0.1 is not between 0 and 1"),
        ({"recent_fraction": float("nan")}, "recent_fraction nan is not between 0 and 1"),
        ({"recent_fraction": True}, "recent_fraction True is not between 0 and 1"),
        ({"recent_fraction": "half"}, "recent_fraction 'half' is not between 0 and 1"),
        ({"scores": "full_rows"}, r"unknown h2o scores 'full_rows' \(did you mean 'full_row'\?\)"),
        ({"aggregate": "sum"}, "unknown h2o aggregate 'sum'.*known: max, mean"),
        ({"recent": 3}, r"no option 'recent' \(did you mean 'recent_fraction'\?\)"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(KvaccError, match=message):
        make_strategy("h2o", 0.2, **options)


def test_a_budget_is_needed():
    with pytest.raises(KvaccError, match="'h2o' needs a budget"):
        make_strategy("h2o")
