"""Selection on the parallel path: what is measured of it, trees of options, and the step path."""

from __future__ import annotations

import math

import pytest
import torch
from naive import draw_tokens, sharp
from naive_select import DECODERS, NaiveTop, read_at_once, read_by_steps, select

from kvacc.engine.attention import AttentionCall
from kvacc.engine.plan import Request, build_rows, make_plan
from kvacc.engine.scoring import score_by_steps, score_documents
from kvacc.engine.selecting import quality
from kvacc.select_strategy import Selector, SelectStrategy
from kvacc.strategy import make_strategy

pytestmark = pytest.mark.usefixtures("skewing_folder")
TOKENS = draw_tokens(30, seed=4)


def strategies(budget=8):
    return {
        "infinigen": make_strategy("infinigen", budget, alpha=3.0),
        "own query": make_strategy(
            "infinigen",
            budget,
            speculate_from="current",
            dense_layers=0,
            counts="own",
            current_token="ranked",
        ),
        "pool": make_strategy("infinigen", budget, pool=0.5, pool_policy="lru", alpha=3.0),
        "quest": make_strategy("quest", budget, page_size=3, dense_layers=0),
        "infllm": make_strategy("infllm", budget, init=1, local_fraction=0.3, block=2, representatives=1),
    }


every_strategy = pytest.mark.parametrize("name", strategies())


def documents(protocol="stream"):
    out = []
    for seed, length in enumerate((22, 9, 15)):
        context = draw_tokens(length, seed)
        dense = {"stream": 0, "context": length - 4, "serve": length}[protocol]
        options = [[5, 6, 7], [5, 8, 9, 10], [11]]
        out.append([Request((*context, *o[:-1]), tuple(o), dense, dense or length) for o in options])
    return out


def assert_scores_equal(found, expected, exact=False):
    for one, other in zip(found, expected, strict=True):
        assert one.loglikelihood == pytest.approx(other.loglikelihood, abs=1e-3)
        assert one.kept_fraction == pytest.approx(other.kept_fraction, abs=1e-9)
        assert one.moved_bytes == pytest.approx(other.moved_bytes, abs=1e-6)
        assert one.hidden == other.hidden


# --- both paths ---------------------------------------------------------------------------


@every_strategy
@pytest.mark.parametrize("protocol", ["stream", "context", "serve"])
def test_scores_of_both_paths(name, protocol):
    model, strategy = sharp("llama", num_hidden_layers=3), strategies(0.4)[name]
    parallel = [
        score for answers in score_documents(model, documents(protocol), strategy) for score in answers
    ]
    # One left-padded batch of all requests.
    steps, _ = score_by_steps(model, [r for document in documents(protocol) for r in document], strategy)
    assert_scores_equal(steps, parallel)
    assert sum(score.hidden for score in steps) >= 5


@every_strategy
def test_a_document_scores_the_same_alone_in_any_batch_and_order(name):
    model, strategy = sharp("llama", num_hidden_layers=3), strategies(0.4)[name]
    docs = documents()
    together = score_documents(model, docs, strategy)
    backwards = score_documents(model, [document[::-1] for document in docs[::-1]], strategy)
    for document, answers, reverse in zip(docs, together, backwards[::-1], strict=True):
        [alone] = score_documents(model, [document], strategy)
        single = [score_documents(model, [[request]], strategy)[0][0] for request in document]
        for others in (alone, reverse[::-1], single):
            assert_scores_equal(others, answers)
            for one, other in zip(others, answers, strict=True):
                assert one.attention_mass == pytest.approx(other.attention_mass, abs=1e-5)
                assert one.recall == pytest.approx(other.recall, abs=1e-9)


@every_strategy
def test_a_later_token_changes_nothing_before_it(name):
    model, strategy = sharp("llama", num_hidden_layers=3), strategies()[name]
    logits, reads, _ = read_at_once(model, strategy, TOKENS)
    for changed in (12, 29):
        other = [*TOKENS[:changed], TOKENS[changed] - 1, *TOKENS[changed + 1 :]]
        found, chosen, _ = read_at_once(model, strategy, other)
        torch.testing.assert_close(found[:changed], logits[:changed], atol=1e-4, rtol=0)
        assert not torch.equal(found[changed], logits[changed])
        assert all(torch.equal(reads[layer][:, :changed], chosen[layer][:, :changed]) for layer in reads)


@every_strategy
@pytest.mark.parametrize("chunks", [[30], [1, 7, 13, 9], [13, 1, 1, 15]])
def test_the_step_path_does_not_depend_on_chunks(name, chunks):
    model, strategy = sharp("llama", num_hidden_layers=3), strategies()[name]
    logits, reads, _ = read_at_once(model, strategy, TOKENS)
    found, chosen, _ = read_by_steps(model, strategy, TOKENS, chunks)
    assert all(torch.equal(reads[layer], chosen[layer].expand_as(reads[layer])) for layer in reads)
    torch.testing.assert_close(found, logits, atol=1e-3, rtol=0)


@every_strategy
def test_long_rows_are_computed_in_blocks(name, monkeypatch):
    from kvacc.engine import parallel

    model, strategy = sharp("llama", num_hidden_layers=3), strategies()[name]
    plan = make_plan(build_rows(list(enumerate(documents()[0])), strategy.shares_trees), strategy)
    whole, session = model.parallel(plan, strategy, record=True)
    # 4 heads x the row's tokens x 4 bytes, for 7 queries a block.
    monkeypatch.setattr(parallel, "BLOCK_BYTES", 7 * 4 * 4 * plan.tokens.numel())
    blocks, other = model.parallel(plan, strategy, record=True)
    torch.testing.assert_close(blocks, whole, atol=1e-4, rtol=0)
    assert all(torch.equal(other.decisions[layer], mask) for layer, mask in session.decisions.items())
    assert torch.equal(session.moved, other.moved) and torch.equal(session.kept, other.kept)
    for layer in session.mass:
        torch.testing.assert_close(other.mass[layer], session.mass[layer], atol=1e-5, rtol=0)
        assert torch.equal(other.recall[layer], session.recall[layer])


@every_strategy
def test_nothing_is_read_beyond_the_budget(name):
    model, strategy = sharp("llama", num_hidden_layers=3), strategies()[name]
    _, reads, _ = read_at_once(model, strategy, TOKENS)
    for layer, mask in reads.items():
        assert mask.sum(-1).max() <= 8 and layer >= strategy.dense_layers
        assert not (mask & ~torch.ones(30, 30).tril().bool()).any()


# --- bytes --------------------------------------------------------------------------------


@every_strategy
def test_kept_fraction_and_bytes_are_those_of_the_decisions(name):
    # One scored query: the last. D = V = 8 numbers of 4 bytes: 64 bytes an entry of a KV head.
    model, strategy = sharp("llama", num_hidden_layers=3), strategies()[name]
    request = Request(tuple(TOKENS), (5,), 0, 30)
    [[score]] = score_documents(model, [[request]], strategy)
    _, reads, _ = read_at_once(model, strategy, TOKENS)
    own = sum(int(mask[:, 29, 29].sum()) for mask in reads.values())
    read = sum(int(mask[:, 29].sum()) for mask in reads.values())
    assert score.moved_bytes == (read - own) * 64
    dense = 3 - len(reads)
    assert score.kept_fraction == pytest.approx((dense + read / 2 / 30) / 3, abs=1e-12)
    assert score.hidden and 0 < score.kept_fraction < 1


def test_bytes_of_a_dense_prefill_are_not_moved():
    # Its entries are on the device. Serve: the first answer token comes from the prefill.
    model, strategy = sharp("llama", num_hidden_layers=3), strategies()["quest"]
    prompt = TOKENS[:20]
    one = Request(tuple(prompt), (5,), 20, 20)
    two = Request((*prompt, 5), (5, 6), 20, 20)
    [[first]], [[second]] = (score_documents(model, [[r]], strategy) for r in (one, two))
    assert first.moved_bytes == 0 and not first.hidden and first.kept_fraction == 1
    # Two pages of 3 with the budget of 8, in 3 layers and 2 heads; mean of two queries. The own
    # page (18-20) has all three tokens if it was read.
    _, reads, _ = read_at_once(model, strategy, (*prompt, 5), 20, 20)
    read = sum(int(mask[:, 20].sum() - mask[:, 20, 20].sum()) for mask in reads.values())
    assert second.moved_bytes == read * 64 / 2 and read <= 36


# --- quality ------------------------------------------------------------------------------


def hand_made(attention):
    """A call whose query heads have the given attention: [Q][n][W], one KV head per two."""
    logits = torch.tensor(attention).log()
    query_heads, _, width = logits.shape
    heads = query_heads // 2
    key = torch.eye(width).expand(1, heads, -1, -1)
    return AttentionCall(None, 0, logits[None], key, key, 1.0, None, None)


def test_quality_by_hand():
    call = hand_made([[[0.5, 0.3, 0.2]], [[0.1, 0.1, 0.8]]])
    readable = torch.ones(1, 1, 3, dtype=torch.bool)

    def judged(*columns):
        visible = torch.zeros(1, 1, 1, 3, dtype=torch.bool)
        visible[..., list(columns)] = True
        found = quality(call, visible, readable)
        assert found.mass.shape == found.recall.shape == (1, 1)
        return round(float(found.mass), 6), float(found.recall)

    # Mass: 0.5 + 0.3 of one head and 0.1 + 0.1 of the other. Together 0.6, 0.4 and 1.0: the two
    # best are 2 and 0, of which one was read.
    assert judged(0, 1) == (0.5, 0.5)
    assert judged(0, 2) == (0.8, 1.0)
    assert judged(2) == (0.5, 1.0)
    assert judged(1) == (0.2, 0.0)
    assert judged(0, 1, 2) == (1.0, 1.0)
    assert judged() == (0.0, 0.0)


def test_quality_counts_what_can_be_read_only():
    # Entry 2 is later than the query: 0.5 of 0.8 and 0.1 of 0.2 are on entry 0.
    call = hand_made([[[0.5, 0.3, 0.2]], [[0.1, 0.1, 0.8]]])
    visible = torch.tensor([True, False, False]).view(1, 1, 1, 3)
    found = quality(call, visible, torch.tensor([[[True, True, False]]]))
    assert float(found.mass) == pytest.approx((0.5 / 0.8 + 0.1 / 0.2) / 2, abs=1e-6)
    assert float(found.recall) == 1.0


def test_quality_is_the_mean_over_heads():
    call = hand_made([[[0.7, 0.3]], [[0.7, 0.3]], [[0.2, 0.8]], [[0.4, 0.6]]])
    visible = torch.tensor([True, False]).view(1, 1, 1, 2).repeat(1, 2, 1, 1)
    found = quality(call, visible, torch.ones(1, 1, 2, dtype=torch.bool))
    assert float(found.mass) == pytest.approx((0.7 + 0.7 + 0.2 + 0.4) / 4, abs=1e-6)
    assert float(found.recall) == 0.5


def test_quality_of_a_whole_model():
    """Against attention computed from the model's own projections."""
    model = sharp("opt", num_hidden_layers=3)
    strategy = make_strategy(
        "infinigen",
        6,
        speculate_from="current",
        dense_layers=0,
        partial_ratio=1,
        alpha=math.inf,
        current_token="ranked",
    )
    seen = {}

    class Watching(NaiveTop):
        def __call__(self, layer):
            reads = super().__call__(layer)
            logits = torch.einsum("qhd,khd->hqk", layer.query, layer.key)[:, 29, :30] * layer.scaling
            true = logits.softmax(-1)
            seen[layer.number] = [float(true[head, reads[head][29]].sum()) for head in range(4)]
            return reads

    select(DECODERS["opt"](model.model), TOKENS, Watching(6, always=False))
    [[score]] = score_documents(model, [[Request(tuple(TOKENS), (5,), 0, 30)]], strategy)
    masses = [sum(of_layer) / 4 for of_layer in seen.values()]
    assert score.mass_by_layer == pytest.approx(masses, abs=1e-5)
    assert score.attention_mass == pytest.approx(sum(masses) / 3, abs=1e-5)
    # Exact top entries: all of the true ones.
    assert score.recall_by_layer == (1.0, 1.0, 1.0) and score.recall == 1.0
    assert min(masses) < 0.99


@every_strategy
def test_everything_read_is_all_of_the_attention(name):
    strategy = strategies(1.0)[name] if name != "pool" else strategies(64)["infinigen"]
    for answers in score_documents(sharp("llama", num_hidden_layers=3), documents(), strategy):
        for score in answers:
            assert score.attention_mass == pytest.approx(1.0, abs=1e-6) and score.recall == 1.0
            assert not score.hidden and score.kept_fraction == 1.0 and score.moved_bytes > 0


@every_strategy
def test_layers_that_read_everything_have_no_quality(name):
    model, strategy = sharp("llama", num_hidden_layers=3), strategies()[name]
    dense = strategy.dense_layers
    for answers in score_documents(model, documents(), strategy):
        for score in answers:
            for by_layer, mean in (
                (score.mass_by_layer, score.attention_mass),
                (score.recall_by_layer, score.recall),
            ):
                assert by_layer[:dense] == (None,) * dense and None not in by_layer[dense:]
                assert len(by_layer) == 3 and all(0 <= share <= 1 + 1e-6 for share in by_layer[dense:])
                assert mean == pytest.approx(sum(by_layer[dense:]) / (3 - dense))
            assert score.attention_mass < 1


def test_a_model_whose_layers_are_all_dense_has_no_quality():
    strategy = make_strategy("quest", 8, dense_layers=3)
    for answers in score_documents(sharp("llama", num_hidden_layers=3), documents(), strategy):
        for score in answers:
            assert (score.attention_mass, score.recall, score.mass_by_layer) == (None, None, None)
            assert not score.moved_bytes and not score.hidden


@pytest.mark.parametrize("name", ["full", "h2o"])
def test_strategies_that_do_not_select_have_none_of_it(name):
    strategy = make_strategy(name, None if name == "full" else 8)
    model = sharp("llama", num_hidden_layers=3)
    scores = [score for answers in score_documents(model, documents(), strategy) for score in answers]
    scores += score_by_steps(model, documents()[0], strategy)[0]
    for score in scores:
        measured = (
            score.moved_bytes,
            score.attention_mass,
            score.recall,
            score.mass_by_layer,
            score.recall_by_layer,
        )
        assert measured == (None,) * 5


# --- what a strategy cannot do ------------------------------------------------------------


class Greedy(Selector):
    """Asks for everything, later tokens and other rows' padding included."""

    def select(self, asked):
        from kvacc.select_strategy import Selection

        return Selection(torch.ones_like(asked.readable)[:, None].repeat(1, self.layer.heads, 1, 1))


class AsksForEverything(SelectStrategy):
    name = "greedy"

    def selector(self, layer):
        return Greedy(layer)


def test_the_engine_reads_nothing_that_a_query_may_not_read():
    model, strategy = sharp("llama", num_hidden_layers=3), AsksForEverything(budget=4)
    full, _, _ = read_at_once(model, make_strategy("full"), TOKENS)
    for read in (read_at_once, read_by_steps):
        logits, reads, _ = read(model, strategy, TOKENS)
        assert all(torch.equal(mask, torch.ones_like(mask).tril()) for mask in reads.values())
        torch.testing.assert_close(logits, full, atol=1e-4, rtol=0)
    plain = score_documents(model, documents(), make_strategy("full"))
    for answers, expected in zip(score_documents(model, documents(), strategy), plain, strict=True):
        for one, other in zip(answers, expected, strict=True):
            assert one.loglikelihood == pytest.approx(other.loglikelihood, abs=1e-4)


@every_strategy
def test_full_before_and_after_is_bitwise_the_same(name):
    model = sharp("llama", num_hidden_layers=3)
    before, _, _ = read_at_once(model, make_strategy("full"), TOKENS)
    first, _, _ = read_at_once(model, strategies()[name], TOKENS)
    read_by_steps(model, strategies()[name], TOKENS[:20])
    second, _, _ = read_at_once(model, strategies()[name], TOKENS)
    after, _, _ = read_at_once(model, make_strategy("full"), TOKENS)
    assert torch.equal(before, after) and torch.equal(first, second)


# --- the embedded model -------------------------------------------------------------------


SMOLLM2 = {
    "infinigen": ("infinigen", 0.2, {}),
    "quest": ("quest", 0.3, {}),
    "infllm": ("infllm", 0.4, {"block": 8, "init": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOLLM2)
def test_smollm2(smollm2_folder, name):
    from kvacc.calibration import calibration_text
    from kvacc.engine.wrapped import WrappedModel
    from kvacc.models import load_model, load_tokenizer

    prose = load_tokenizer("smollm2-135m")(calibration_text())["input_ids"]
    model = WrappedModel(load_model("smollm2-135m", device="cpu"), calibration=lambda source: prose)
    strategy, budget, options = SMOLLM2[name]
    strategy = make_strategy(strategy, budget, **options)
    agree = []
    for first, length in ((0, 200), (700, 190), (1400, 205)):
        text = prose[first : first + length - 1]
        parallel, reads, _ = read_at_once(model, strategy, text, compressed=length - 20)
        steps, chosen, session = read_by_steps(model, strategy, text, compressed=length - 20)
        differ = torch.stack([(reads[layer] != chosen[layer]).any(-1).any(0) for layer in sorted(reads)])
        # Both paths round alike but for the order of float32 sums. Among some 17,000 choices one can
        # be between entries whose scores are 2e-6 apart, and what follows from it differs too: in later
        # layers, at this query and later ones. A rule that differs would do so in the first layer.
        upstream = torch.nn.functional.pad(differ.cumsum(0).cumsum(1), (0, 0, 1, 0))[:-1] > 0
        assert int((differ & ~upstream).sum()) <= 2
        same = int(differ.any(0).int().argmax()) if differ.any() else len(text)
        assert same > 40
        assert (parallel[:same] - steps[:same]).abs().max() < 1e-3
        agree.append(same == len(text))
        if agree[-1]:
            targets = torch.tensor(text[1:])[:, None]
            found, expected = (x[:-1].log_softmax(-1).gather(1, targets).sum() for x in (parallel, steps))
            assert float(found) == pytest.approx(float(expected), abs=1e-3)
        assert session.passes[-1][1].all()  # it acted
    assert any(agree)
