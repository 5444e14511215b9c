"""Documents that begin alike are read from one prefix, and nothing changes but the time."""

from __future__ import annotations

import random

import pytest
import torch
from families import build

from kvacc.engine import prefix as prefix_module
from kvacc.engine.fidelity import Meter, References
from kvacc.engine.plan import Request
from kvacc.engine.prefix import group_by_prefix
from kvacc.engine.scoring import score_by_steps, score_documents
from kvacc.engine.wrapped import WrappedModel
from kvacc.strategy import make_strategy

FULL = make_strategy("full")
SHARING = ["llama", "qwen3", "gemma3_text", "gpt_oss", "opt", "deepseek_v3"]
STRATEGIES = [
    ("full", None, {}),
    ("h2o", 7, {}),
    ("h2o", 0.3, {}),
    ("h2o", 7, {"scores": "averaged"}),
    ("h2o", 7, {"scores": "full_row"}),
    ("streaming_llm", 8, {"sinks": 2}),
    ("recent", 7, {}),
    ("random", 7, {}),
    ("quest", 8, {"page_size": 4, "dense_layers": 0}),
    ("infinigen", 8, {"dense_layers": 1}),
]


def draws(seed: int, count: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(3, 97) for _ in range(count))


def questions(shared: int, lengths: list[int], dense: str = "", seed: int = 0) -> list[list[Request]]:
    """Documents with ``shared`` tokens in common and two options each."""
    common, documents = draws(seed, shared), []
    for number, length in enumerate(lengths):
        prompt = (*common, *draws(100 + 10 * seed + number, length))
        read = {"": 0, "context": shared, "serve": len(prompt)}[dense]
        documents.append(
            [
                Request((*prompt, *option[:-1]), tuple(option), read, read or len(prompt))
                for option in ([5, 6, 7], [5, 8])
            ]
        )
    return documents


@pytest.fixture
def always(monkeypatch):
    """Share however little it saves, so that small texts will do."""
    monkeypatch.setattr(prefix_module, "LEAST_SAVED", 1)


@pytest.fixture
def passes(monkeypatch):
    """(rows, width, tokens of the prefix) of every forward pass."""
    shapes = []
    original = WrappedModel.parallel

    def parallel(self, plan, *args, prefix=None, **kwargs):
        shapes.append((*plan.tokens.shape, prefix.tokens if prefix else 0))
        return original(self, plan, *args, prefix=prefix, **kwargs)

    monkeypatch.setattr(WrappedModel, "parallel", parallel)
    return shapes


# Which documents share


def test_fixed_examples_are_one_group():
    documents = questions(70, [4, 9, 6])
    (group,) = group_by_prefix(documents, FULL)
    assert (group.tokens, sorted(group.documents)) == (70, [0, 1, 2])


def test_each_haystack_is_a_group_and_the_rest_stay_alone():
    documents = [
        *questions(80, [4, 5], seed=1),
        *questions(90, [6, 3, 2], seed=2),
        *questions(5, [9], seed=3),
    ]
    found = {(g.tokens, *sorted(g.documents)) for g in group_by_prefix(documents, FULL)}
    assert found == {(0, 5), (80, 0, 1), (90, 2, 3, 4)}


def test_a_longer_prefix_of_fewer_wins_only_where_it_saves_more():
    # Ten tokens in common for all, a hundred for two pairs: 2 x 100 > 3 x 10.
    first = draws(0, 10)

    def with_start(documents):
        return [
            [Request(first + r.tokens, r.targets, 0, r.compressed + 10) for r in document]
            for document in documents
        ]

    documents = with_start([*questions(90, [4, 5], seed=1), *questions(90, [6, 3], seed=2)])
    found = {(g.tokens, *sorted(g.documents)) for g in group_by_prefix(documents, FULL)}
    assert found == {(100, 0, 1), (100, 2, 3)}
    # Thirty-one for all and thirty-two for a pair: 3 x 31 > 2 x 32.
    first = draws(0, 31)
    documents = with_start([*questions(1, [4, 5], seed=1), *questions(1, [6, 3], seed=2)])
    found = {g.tokens for g in group_by_prefix(documents, FULL)}
    assert found <= {41, 31} and len(group_by_prefix(documents, FULL)) == 1


def test_a_prefix_that_saves_little_is_not_worth_a_pass():
    assert [g.tokens for g in group_by_prefix(questions(63, [4, 5]), FULL)] == [0]
    assert [g.tokens for g in group_by_prefix(questions(64, [4, 5]), FULL)] == [64]


def test_unequal_budgets_do_not_share():
    # 0.1 of 70 + 4 + 6 tokens: 8, 8 and 10 entries.
    documents = questions(70, [4, 6, 21])
    found = {(g.tokens, *sorted(g.documents)) for g in group_by_prefix(documents, make_strategy("h2o", 0.1))}
    assert found == {(70, 0, 1), (0, 2)}
    counted = group_by_prefix(documents, make_strategy("h2o", 8))
    assert [(g.tokens, sorted(g.documents)) for g in counted] == [(70, [0, 1, 2])]


def test_budgets_of_a_dense_context_are_equal_and_those_of_serve_do_not_matter():
    for dense in ("context", "serve"):
        found = group_by_prefix(questions(70, [4, 6, 21], dense), make_strategy("h2o", 0.1))
        assert [(g.tokens, sorted(g.documents)) for g in found] == [(70, [0, 1, 2])]


def test_a_scored_token_is_never_in_a_prefix():
    # The second text is the beginning of the first.
    long, short = draws(0, 100), draws(0, 80)
    documents = [[Request(long, long[-1:], 0, 100)], [Request(short, short[-1:], 0, 80)]]
    assert [g.tokens for g in group_by_prefix(documents, FULL)] == [79]


def test_nothing_and_documents_without_requests():
    assert group_by_prefix([], FULL) == []
    assert group_by_prefix([[], []], FULL) == []


# What they get


def assert_same(found, expected, tolerance=2e-4):
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.loglikelihood == pytest.approx(other.loglikelihood, abs=tolerance)
            assert one.kept_fraction == pytest.approx(other.kept_fraction, abs=1e-9)
            assert (one.hidden, one.moved_bytes) == (other.hidden, other.moved_bytes)
            assert one.attention_mass == pytest.approx(other.attention_mass, abs=1e-4)


EVERY_WAY = [
    ("llama", protocol, *strategy) for protocol in ("", "context", "serve") for strategy in STRATEGIES
]
SOME_WAYS = [
    (family, protocol, *strategy)
    for family in SHARING[1:]
    for protocol, strategy in [("", STRATEGIES[2]), ("", STRATEGIES[5]), ("context", STRATEGIES[-1])]
]


@pytest.mark.parametrize("family, protocol, name, budget, options", EVERY_WAY + SOME_WAYS)
def test_a_prefix_changes_no_answer(always, passes, family, protocol, name, budget, options):
    if name == "streaming_llm" and family in ("opt", "deepseek_v3"):
        options = {**options, "positions": "original"}
    strategy = make_strategy(name, budget, **options)
    wrapped = WrappedModel(build(family), calibration=lambda source: list(draws(9, 40)))
    documents = [*questions(12, [4, 6, 5], protocol, seed=1), *questions(9, [3, 7], protocol, seed=2)]
    together = score_documents(wrapped, documents, strategy)
    assert any(shared for *_, shared in passes)
    apart = [score_documents(wrapped, [document], strategy)[0] for document in documents]
    assert_same(together, apart)


@pytest.mark.parametrize("name, budget, options", [s for s in STRATEGIES if s[0] != "infinigen"])
def test_the_reference_scan_and_the_step_path_agree(always, name, budget, options):
    strategy = make_strategy(name, budget, **options)
    wrapped = WrappedModel(build("llama"))
    documents = questions(12, [4, 6, 5], seed=3)
    together = score_documents(wrapped, documents, strategy)
    assert_same(score_documents(wrapped, documents, strategy, reference=True), together)
    for document, answers in zip(documents, together, strict=True):
        steps, _ = score_by_steps(wrapped, document, strategy)
        for one, other in zip(answers, steps, strict=True):
            assert one.loglikelihood == pytest.approx(other.loglikelihood, abs=1e-3)


def test_a_prefix_is_read_once(passes):
    wrapped = WrappedModel(build("llama"))
    passes.clear()
    score_documents(wrapped, questions(80, [4, 6, 5, 7]), make_strategy("h2o", 20), batch_tokens=20)
    assert passes[0] == (1, 80, 0)
    assert len(passes) > 2 and all(shared == 80 and width < 12 for _, width, shared in passes[1:])


@pytest.mark.parametrize("known", [True, False])
def test_fidelity_is_the_same_behind_a_prefix(always, known):
    wrapped = WrappedModel(build("llama"))
    documents = questions(12, [4, 6, 5])
    strategy = make_strategy("h2o", 7)
    together, apart = Meter(References()), Meter(References())
    if known:
        score_documents(wrapped, documents, FULL, meter=together)
    found = score_documents(wrapped, documents, strategy, meter=together)
    for document, answers in zip(documents, found, strict=True):
        alone = score_documents(wrapped, [document], strategy, meter=apart)[0]
        for one, other in zip(answers, alone, strict=True):
            assert one.kl == pytest.approx(other.kl, abs=1e-6) and one.kl > 1e-4
            assert one.attention_mass == pytest.approx(other.attention_mass, abs=1e-6)
            assert one.agreement == other.agreement
    assert together.references.passes == (0 if known else 1)
    tables = (together.mass_table(2), apart.mass_table(2))
    assert tables[0] == [pytest.approx(layer, abs=1e-6) for layer in tables[1]]


def test_order_does_not_matter_and_nothing_leaks(always):
    wrapped = WrappedModel(build("llama"))
    strategy = make_strategy("h2o", 7)
    documents = questions(12, [4, 6, 5, 3])
    forward = score_documents(wrapped, documents, strategy)
    backward = score_documents(wrapped, documents[::-1], strategy)[::-1]
    assert_same(forward, backward, tolerance=1e-5)


def test_models_that_cannot_share_rows_share_no_prefix(always, passes):
    wrapped = WrappedModel(build("qwen3_next"))
    passes.clear()
    score_documents(wrapped, questions(80, [4, 6]), FULL)
    assert all(shared == 0 for *_, shared in passes)


def test_a_prefix_that_does_not_fit_is_read_by_each_document(monkeypatch):
    wrapped = WrappedModel(build("llama"))
    documents = questions(80, [4, 6])
    expected = score_documents(wrapped, documents, FULL)

    def too_long(*args, **kwargs):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(WrappedModel, "read_prefix", too_long)
    assert_same(score_documents(wrapped, documents, FULL), expected)
