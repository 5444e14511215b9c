"""Kept sets and logits against strategies written the slow, obvious way (tests/naive.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from naive import (
    NaiveH2O,
    NaiveRecent,
    NaiveStreaming,
    as_mask,
    draw_tokens,
    llama,
    one_request,
    sharp,
    step_through,
)

from kvacc.engine.plan import build_rows, make_plan
from kvacc.strategy import Strategy, make_strategy

TOKENS = draw_tokens(26, seed=4)


@dataclass
class Case:
    strategy: Strategy
    rule: object
    entries: object
    """an int, or tokens seen -> entries allowed"""
    how: str = "mean"
    cache_positions: bool = False


def half(budget):
    return math.ceil(budget / 2)


CASES = {
    "h2o": Case(make_strategy("h2o", 8), NaiveH2O(half), 8),
    "h2o odd": Case(make_strategy("h2o", 5), NaiveH2O(half), 5),
    "h2o one": Case(make_strategy("h2o", 1), NaiveH2O(half), 1),
    "h2o heavy": Case(make_strategy("h2o", 6, recent_fraction=0), NaiveH2O(lambda budget: 0), 6),
    "h2o recent": Case(make_strategy("h2o", 6, recent_fraction=1), NaiveH2O(lambda budget: budget), 6),
    "h2o max": Case(make_strategy("h2o", 8, aggregate="max"), NaiveH2O(half), 8, how="max"),
    "h2o fraction": Case(make_strategy("h2o", 0.3), NaiveH2O(half), 8),  # ceil(7.8)
    "h2o seen": Case(make_strategy("h2o", 0.3, "seen"), NaiveH2O(half), lambda seen: -(-3 * seen // 10)),
    "recent": Case(make_strategy("recent", 7), NaiveRecent(), 7),
    "recent seen": Case(make_strategy("recent", "1/4", "seen"), NaiveRecent(), lambda seen: -(-seen // 4)),
    "streaming original": Case(make_strategy("streaming_llm", 7, sinks=2, positions="original"), NaiveStreaming(2), 7),
    "streaming cache": Case(make_strategy("streaming_llm", 7, sinks=2), NaiveStreaming(2), 7, cache_positions=True),
    "streaming few": Case(make_strategy("streaming_llm", 0.1), NaiveStreaming(4), 3, cache_positions=True),
}
every_case = pytest.mark.parametrize("name", CASES)
every_boundary = pytest.mark.parametrize("dense", [0, 15], ids=["stream", "context"])


def oracle(case: Case, dense: int):
    model = sharp("llama").model
    return llama(model, TOKENS, case.rule, case.entries, dense, case.cache_positions, case.how)


def test_heads_of_the_oracle_keep_different_entries():
    # Otherwise no comparison below could tell one head, or one score, from another.
    _, _, after = oracle(CASES["h2o heavy"], 0)
    last = {tuple(kept[-1]) for kept in after.values()}
    assert len(after) == 4 and len(last) >= 3
    assert tuple(range(6)) not in last


@every_boundary
@every_case
@pytest.mark.parametrize("reference", [True, False], ids=["reference", "compiled"])
def test_parallel_path(name, dense, reference):
    case = CASES[name]
    logits, reads, _ = oracle(case, dense)
    plan = make_plan(build_rows([(0, one_request(TOKENS, dense))]), case.strategy)
    found, session = sharp("llama").parallel(plan, case.strategy, record=True, reference=reference)
    for (layer, head), places in reads.items():
        assert torch.equal(session.decisions[layer][0, head], as_mask(places)), (layer, head)
    torch.testing.assert_close(found, logits, atol=1e-3, rtol=0)


@every_boundary
@every_case
def test_step_path(name, dense):
    case = CASES[name]
    logits, _, after = oracle(case, dense)
    found, kept, _ = step_through(sharp("llama"), case.strategy, TOKENS, dense=dense)
    for t in range(len(TOKENS)):
        assert kept[t] == {at: places[t] for at, places in after.items()}
    torch.testing.assert_close(found, logits, atol=1e-3, rtol=0)


def test_the_oracle_without_a_limit_is_the_model_itself():
    # The oracle recomputes a Llama from its projections: that must be the same Llama.
    import copy

    model = copy.deepcopy(sharp("llama").model)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        own = model(input_ids=torch.tensor([TOKENS])).logits[0]
    logits, _, _ = llama(model, TOKENS, NaiveRecent(), len(TOKENS))
    torch.testing.assert_close(logits, own, atol=1e-4, rtol=0)
