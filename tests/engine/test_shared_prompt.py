"""Prompts that begin alike: generated as if each had been read by itself."""

from __future__ import annotations

import pytest
import torch
from families import NO_ROTATION
from families import wrapped as wrapped_family

from kvacc.engine import prefix, shared_prompt
from kvacc.engine.generation import generate
from kvacc.engine.plan import Request
from kvacc.engine.shared_prompt import Beginning, PromptBatch, can_share, plan_batches
from kvacc.engine.stepping import RowReading
from kvacc.strategy import make_strategy

HAYSTACK = tuple(3 + (7 * i * i + i) % 90 for i in range(40))
TAILS = ((5, 6, 7), (8, 9, 10), (11, 12))


def prompts(dense: int, tails=TAILS) -> list[Request]:
    return [Request(HAYSTACK + tail, tail[-1:], dense, dense or len(HAYSTACK + tail)) for tail in tails]


@pytest.fixture
def cheap(monkeypatch):
    """The short prompts of these tests are worth sharing."""
    monkeypatch.setattr(prefix, "LEAST_SAVED", 1)
    monkeypatch.setattr(shared_prompt, "PASS_WORTH", 0)


def test_batches_behind_a_shared_beginning_hold_prompts_of_one_length(cheap):
    batches = plan_batches(prompts(40), make_strategy("h2o", 0.5), True, lambda n: 16, 4)
    assert batches == [PromptBatch([0, 1], 40, 0), PromptBatch([2], 40, 0)]
    small = plan_batches(prompts(40), make_strategy("h2o", 0.5), True, lambda n: 1, 4)
    assert [batch.prompts for batch in small] == [[0], [1], [2]]


def test_nothing_is_shared_where_it_cannot_or_costs_more(monkeypatch):
    monkeypatch.setattr(prefix, "LEAST_SAVED", 1)
    # 80 tokens saved against one more batch of 8 decoding passes, each worth 64 tokens.
    alone = [PromptBatch([0, 1, 2])]
    assert plan_batches(prompts(40), make_strategy("h2o", 0.5), True, lambda n: 16, 8) == alone
    assert plan_batches(prompts(40), make_strategy("h2o", 0.5), False, lambda n: 16, 8) == alone
    # Of one length they make no more batches than before.
    equal = prompts(40, ((5, 6), (7, 8), (9, 4)))
    assert plan_batches(equal, make_strategy("h2o", 0.5), True, lambda n: 16, 8) == [
        PromptBatch([0, 1, 2], 40, 0)
    ]


def test_every_prompt_is_in_one_batch(cheap):
    mixed = [*prompts(40), Request((1, 2, 3), (3,), 3, 3), Request(HAYSTACK[:9], (1,), 9, 9)]
    batches = plan_batches(mixed, make_strategy("h2o", 0.5), True, lambda n: 2, 4)
    assert sorted(n for batch in batches for n in batch.prompts) == [0, 1, 2, 3, 4]


def test_budgets_that_differ_are_not_shared_in_stream(cheap):
    # Half of 42 and of 43 entries round to 21 and 22.
    batches = plan_batches(prompts(0), make_strategy("h2o", 0.5), True, lambda n: 16, 4)
    assert {batch.group for batch in batches if 2 in batch.prompts} == {None}
    assert next(batch for batch in batches if 0 in batch.prompts).shared == 40


@pytest.mark.parametrize(("dense", "chunk"), [(0, 7), (30, None), (40, None)])
@pytest.mark.parametrize(
    ("name", "budget"), [("full", None), ("h2o", 0.5), ("streaming_llm", 12), ("random", 0.4)]
)
@pytest.mark.parametrize("family", ["llama", "opt", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_continuing_a_beginning_changes_no_answer(family, name, budget, dense, chunk):
    wrapped = wrapped_family(family)
    strategy = make_strategy(name, budget)
    if name == "streaming_llm" and family in NO_ROTATION:
        strategy = make_strategy(name, budget, positions="original")
    for tail in ((5, 6, 7), (8,)):
        request = prompts(dense, (tail,))[0]
        row = RowReading(0, request.dense, request.compressed)
        tokens = torch.tensor([request.tokens])

        def run(cache, tokens=tokens):
            return wrapped.model.generate(
                input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6,
                do_sample=False, eos_token_id=None, pad_token_id=0, cache=cache,
            )  # fmt: skip

        expected, [measured] = generate(wrapped, strategy, [row], run, len(request.tokens))
        beginning = Beginning(wrapped, strategy, request, 40, chunk)
        for _ in range(2):  # the beginning is as it was
            made, [found] = generate(wrapped, strategy, [row], run, len(request.tokens), beginning=beginning)
            assert made.tolist() == expected.tolist()
            assert found.hidden == measured.hidden
            assert found.kept_fraction == pytest.approx(measured.kept_fraction)
            assert found.tokens == measured.tokens


def test_what_cannot_be_copied_is_not_shared():
    wrapped = wrapped_family("llama")
    assert can_share(wrapped, make_strategy("h2o", 0.5))
    assert not can_share(wrapped, make_strategy("quest", 0.5))


def test_long_prompts_are_better_alone_where_little_is_generated():
    from kvacc.engine.shared_prompt import alone_is_faster

    assert alone_is_faster(2000, 8, 4)  # 384 tokens' worth of passes against 800 of padding
    assert not alone_is_faster(2000, 256, 4)
    assert not alone_is_faster(500, 8, 16)
    assert alone_is_faster(10, 8, 1)  # there are no others
