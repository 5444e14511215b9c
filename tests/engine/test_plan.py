"""Trees of tokens: layout, ancestors, and where a strategy compresses."""

from __future__ import annotations

import random

import pytest
import torch

from kvacc.engine.plan import NO_LIMIT, Request, build_rows, limits_for, make_plan
from kvacc.strategy import make_strategy

STRATEGY = make_strategy("recent", 0.5)


def plan_of(requests, share=True, strategy=STRATEGY):
    rows = build_rows(list(enumerate(requests)), share)
    return rows, make_plan(rows, strategy)


def check_every_request(requests, rows, plan):
    """Each request can be read back from its last query's ancestors, in the right way."""
    ancestors = plan.ancestors
    found = set()
    for b, row in enumerate(rows):
        for number, queries in row.queries.items():
            request = requests[number]
            found.add(number)
            assert len(queries) == len(request.targets)
            assert all(plan.counted[b, query] for query in queries)
            path = ancestors[b, queries[-1]].nonzero()[:, 0]
            assert plan.tokens[b, path].tolist() == list(request.tokens)
            assert plan.position[b, path].tolist() == list(range(len(request.tokens)))
            assert path.tolist()[request.first_scored :] == queries
            segment = plan.segment[b, path].long()
            dense = [row.segments[s].dense for s in segment]
            assert dense == [i < request.dense for i in range(len(request.tokens))]
            compressed_after = [
                i
                for i, (column, s) in enumerate(zip(path.tolist(), segment.tolist(), strict=True))
                if row.segments[s].compress and row.segments[s].stop == column + 1
            ]
            assert compressed_after == ([request.dense - 1] if 0 < request.dense <= len(request.tokens) else [])
    assert found == set(range(len(requests)))


def test_the_example_of_the_documentation():
    # The sky is | blue | green and red | wet, and one target more each
    sky = (10, 11, 12)
    requests = [
        Request((*sky, 20), (20, 90), 0, 3),
        Request((*sky, 30, 31, 32), (30, 31, 32, 90), 0, 3),
        Request((*sky, 40), (40, 90), 0, 3),
    ]
    (row,), plan = plan_of(requests)
    assert row.tokens == [10, 11, 12, 20, 30, 31, 32, 40]
    assert row.segment == [0, 0, 0, 1, 2, 2, 2, 3]
    assert row.position == [0, 1, 2, 3, 3, 4, 5, 3]
    assert [s.parent for s in row.segments] == [-1, 0, 0, 0]
    assert [(s.start, s.stop) for s in row.segments] == [(0, 3), (3, 4), (4, 7), (7, 8)]
    # Target i is predicted where the token before it is read: the first of each option after "is".
    assert row.queries == {0: [2, 3], 1: [2, 4, 5, 6], 2: [2, 7]}
    assert plan.counted[0].tolist() == [False, False, True, True, True, True, True, True]
    assert [a.nonzero()[:, 0].tolist() for a in plan.ancestors[0]] == [
        [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 4, 5], [0, 1, 2, 4, 5, 6], [0, 1, 2, 7]
    ]  # fmt: skip
    # budget_of=prompt: ceil(0.5 * 3) after every token, the options' too
    assert set(plan.budget[0].tolist()) == {2}
    check_every_request(requests, [row], plan)


def test_one_token_options_cost_nothing_more():
    # BoolQ: " yes" and " no" are predicted by one and the same query.
    requests = [Request((7, 8, 9), (20,), 0, 3), Request((7, 8, 9), (21,), 0, 3)]
    (row,), plan = plan_of(requests)
    assert row.tokens == [7, 8, 9]
    assert row.queries == {0: [2], 1: [2]}
    assert torch.equal(plan.ancestors[0], torch.ones_like(plan.ancestors[0]).tril())


def test_equal_requests_share_every_token():
    requests = [Request((7, 8, 9, 10), (9, 10, 11), 0, 2)] * 3
    (row,), plan = plan_of(requests)
    assert row.tokens == [7, 8, 9, 10]
    assert row.queries == {n: [1, 2, 3] for n in range(3)}
    check_every_request(requests, [row], plan)


def test_a_request_that_begins_another_is_a_part_of_it():
    requests = [Request((7, 8, 9), (9, 5), 0, 2), Request((7, 8, 9, 10, 11), (10, 11, 5), 0, 2)]
    (row,), plan = plan_of(requests)
    assert row.tokens == [7, 8, 9, 10, 11] and len(row.segments) == 1
    check_every_request(requests, [row], plan)


@pytest.mark.parametrize("dense", [0, 2, 4, 6])
def test_winogrande_options_stand_inside_the_context(dense):
    # The trophy | it / she | is too big: the scored words are the same, their contexts are not.
    requests = [
        Request((10, 11, 12, option, 20, 21, 22), (20, 21, 22, 23), dense, 5) for option in (30, 31)
    ]
    (row,), plan = plan_of(requests)
    assert row.tokens == [10, 11, 12, 30, 20, 21, 22, 31, 20, 21, 22]
    assert set(row.queries[0]).isdisjoint(row.queries[1])
    check_every_request(requests, [row], plan)


def test_options_of_different_lengths_compress_where_each_context_ends():
    requests = [
        Request((10, 11, 30, 20, 21), (20, 21, 22), 3, 3),
        Request((10, 11, 31, 32, 20, 21), (20, 21, 22), 4, 3),
    ]
    (row,), plan = plan_of(requests)
    check_every_request(requests, [row], plan)


def test_tokens_are_shared_only_where_they_are_read_in_the_same_way():
    # Equal tokens; in one request they are read densely, in the other they are not.
    requests = [Request((7, 8, 9, 10), (10, 11), 3, 3), Request((7, 8, 9, 10), (10, 11), 2, 3)]
    rows, plan = plan_of(requests)
    # 8 is dense in both, but in the second the context ends there: it is not shared either.
    assert rows[0].tokens == [7, 8, 9, 10, 8, 9, 10]
    check_every_request(requests, rows, plan)


def test_texts_that_begin_differently_get_rows_of_their_own():
    requests = [Request((7, 8), (8, 9), 0, 2), Request((6, 8), (8, 9), 0, 2)]
    rows, plan = plan_of(requests)
    assert [row.tokens for row in rows] == [[7, 8], [6, 8]]
    check_every_request(requests, rows, plan)


def test_without_sharing_each_request_is_a_row():
    requests = [Request((7, 8, t), (t, 9), 0, 2) for t in (20, 21, 22)]
    rows, plan = plan_of(requests, share=False)
    assert [row.tokens for row in rows] == [[7, 8, 20], [7, 8, 21], [7, 8, 22]]
    assert torch.equal(plan.ancestors[0], torch.ones_like(plan.ancestors[0]).tril())
    check_every_request(requests, rows, plan)


@pytest.mark.parametrize("seed", range(12))
def test_random_documents_read_back(seed):
    draw = random.Random(seed)
    requests = []
    for _ in range(draw.randrange(1, 7)):
        prompt = [draw.choice((7, 8)) for _ in range(draw.randrange(1, 9))]
        option = [draw.choice((7, 8)) for _ in range(draw.randrange(1, 5))]
        dense = draw.choice((0, draw.randrange(len(prompt) + 1), len(prompt)))
        requests.append(Request((*prompt, *option[:-1]), tuple(option), dense, 6))
    rows, plan = plan_of(requests)
    check_every_request(requests, rows, plan)
    # No token is computed twice: of one parent no two children are the same token read alike.
    for b in range(len(rows)):
        ancestors = plan.ancestors[b]
        texts = set()
        for query in range(len(rows[b].tokens)):
            path = ancestors[query].nonzero()[:, 0]
            how = tuple(rows[b].segments[plan.segment[b, i]].dense for i in path)
            ends = tuple(
                rows[b].segments[plan.segment[b, i]].compress
                and rows[b].segments[plan.segment[b, i]].stop == int(i) + 1
                for i in path
            )
            texts.add((tuple(plan.tokens[b, path].tolist()), how, ends))
        assert len(texts) == len(rows[b].tokens)


def test_padding_belongs_to_no_segment_and_reads_itself():
    requests = [Request((7, 8, 9, 10, 11), (11, 5), 0, 4), Request((6, 8), (8, 5), 0, 4)]
    rows, plan = plan_of(requests)
    assert plan.segment.tolist() == [[0] * 5, [0, 0, -1, -1, -1]]
    assert not plan.counted[1, 2:].any()
    ancestors = plan.ancestors
    assert torch.equal(ancestors[1, 2:], torch.eye(5, dtype=torch.bool)[2:])
    assert not ancestors[1, :2, 2:].any()
    assert torch.equal(plan.ancestors[0], torch.ones_like(plan.ancestors[0]).tril())


def test_a_very_long_document_is_laid_out_without_recursion():
    context = tuple(3 + i % 100 for i in range(20_000))
    requests = [Request((*context, 7, 8), (7, 8, 9), 0, 20_000), Request((*context, 6, 8), (6, 8, 9), 0, 20_000)]
    (row,) = build_rows(list(enumerate(requests)))
    assert len(row.tokens) == 20_004
    assert [(s.start, s.stop) for s in row.segments] == [(0, 20_000), (20_000, 20_002), (20_002, 20_004)]


def test_a_deep_tree_knows_its_ancestors():
    # Every token branches: request n leaves the text after n tokens.
    text = list(range(3, 43))
    requests = [Request((*text[:n], 50), (50, 5), 0, 40) for n in range(1, 40)]
    rows, plan = plan_of(requests)
    assert len(rows) == 1 and len(rows[0].segments) > 70
    check_every_request(requests, rows, plan)


# --- limits ------------------------------------------------------------------------------


def test_limits_after_each_token():
    streaming = make_strategy("streaming_llm", 0.5, sinks=2)
    assert limits_for(streaming, 9, [0, 1, 8]) == ([5, 5, 5], [3, 3, 3], [2, 2, 2])
    growing = make_strategy("h2o", 0.5, "seen")
    assert limits_for(growing, 100, [0, 1, 2, 8, 2]) == ([1, 1, 2, 5, 2], [1, 1, 1, 3, 1], [0] * 5)
    assert limits_for(make_strategy("full"), 9, [0, 8]) == ([NO_LIMIT] * 2, [0, 0], [0, 0])


def test_each_row_has_the_budget_of_its_own_document():
    rows = build_rows([(0, Request((7, 8, 9), (5,), 0, 3))]) + build_rows([(1, Request((7,) * 10, (5,), 0, 10))])
    plan = make_plan(rows, STRATEGY)
    assert plan.budget[0].tolist() == [2, 2, 2, *[NO_LIMIT] * 7]
    assert plan.budget[1].tolist() == [5] * 10


def test_a_strategy_that_acts_at_prefill_only_lets_later_tokens_join():
    from dataclasses import dataclass

    from kvacc.strategy import EvictStrategy

    @dataclass(frozen=True)
    class AtPrefill(EvictStrategy):
        acts_while_decoding = False

    request = Request((7, 8, 9, 10, 11), (11, 5), 3, 3)
    acts, joins = make_strategy("recent", 2), AtPrefill(budget=2)
    rows = build_rows([(0, request)])
    assert make_plan(rows, acts).dense[0].tolist() == [True, False]
    assert make_plan(rows, joins).dense[0].tolist() == [True, True]
    assert make_plan(rows, joins).compress[0].tolist() == [True, False]
    # With no dense part it has to act somewhere: after every token.
    streaming = build_rows([(0, Request((7, 8), (5,), 0, 2))])
    assert make_plan(streaming, joins).dense[0].tolist() == [False]


def test_rows_without_branches_are_causal_whatever_their_lengths():
    full = make_strategy("full")

    def causal(*documents):
        rows = [row for document in documents for row in build_rows(list(enumerate(document)))]
        return make_plan(rows, full).is_causal

    chain = Request((1, 2, 3, 4), (4,), dense=0, compressed=4)
    short = Request((5, 6), (7,), dense=0, compressed=2)
    in_parts = Request((1, 2, 3, 4), (4, 5), dense=2, compressed=2)
    assert causal([chain], [short], [in_parts])
    # Two options make a branch, in a row of any batch.
    options = [Request((1, 2, tail), (tail, 9), dense=0, compressed=2) for tail in (3, 4)]
    assert not causal([chain], options)
