"""Fidelity as the backend and a cell report it, and log-likelihood by position."""

from __future__ import annotations

import copy
import math

import numpy
import pytest
import torch
from lm_eval.api.instance import Instance

import kvacc
from kvacc import results, task_catalog
from kvacc.config import config_from, plan_cells
from kvacc.engine import attention
from kvacc.engine.fidelity import Bucket, Meter
from kvacc.engine.scoring import step_forward
from kvacc.engine.stepping import RowReading
from kvacc.engine.wrapped import WrappedModel
from kvacc.errors import KvaccError
from kvacc.evaluation import evaluate_cell
from kvacc.fidelity import curve_records, fidelity_record, token_mean
from kvacc.leaderboard import build, to_markdown
from kvacc.records import FIDELITY, RequestRecord
from kvacc.strategy import make_strategy

FULL, H2O = make_strategy("full"), make_strategy("h2o", 0.2)
TEXT = "the quick brown fox jumps over a lazy dog and then it sleeps under some old tree near water"


def ask(context, continuation, doc_id=0, option=0):
    return Instance("loglikelihood", {}, (context, continuation), option, metadata=("task", doc_id, 1))


def complete(prompt, doc_id=0, **arguments):
    return Instance("generate_until", {}, (prompt, arguments), 0, metadata=("task", doc_id, 1))


def roll(words, doc_id=0):
    return Instance("loglikelihood_rolling", {}, (words,), 0, metadata=("task", doc_id, 1))


@pytest.fixture(scope="module")
def parts(tiny_folder):
    """The tiny model with weights so wide that attention is far from uniform, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.35 * torch.randn(parameter.shape, generator=draw))
    return model, AutoTokenizer.from_pretrained(tiny_folder)


@pytest.fixture(scope="module")
def ours(parts):
    def make(**arguments):
        model, tokenizer = copy.deepcopy(parts)
        return kvacc.KvaccLM(pretrained=model, tokenizer=tokenizer, **arguments)

    return make


@pytest.fixture
def passes(monkeypatch):
    """The strategy of every forward pass of the parallel path."""
    names = []
    original = WrappedModel.parallel

    def parallel(self, plan, strategy, *args, **kwargs):
        names.append(strategy.name)
        return original(self, plan, strategy, *args, **kwargs)

    monkeypatch.setattr(WrappedModel, "parallel", parallel)
    return names


def kl_of(theirs: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    p, q = theirs.double().log_softmax(-1), ours.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def test_token_mean_counts_tokens_and_clusters():
    mean, stderr = token_mean([0.1, 0.3, 0.5], [1, 1, 1], ["a", "b", "c"])
    assert mean == pytest.approx(0.3)
    assert stderr == pytest.approx(0.2 / math.sqrt(3))
    mean, stderr = token_mean([0.0, 1.0], [3, 1], ["a", "b"])
    assert mean == pytest.approx(0.25)
    # Linearised: 0.25 + 3 (0 - 0.25) / 2 = -0.125 and 0.25 + 1 (1 - 0.25) / 2 = 0.625.
    assert stderr == pytest.approx(numpy.std([-0.125, 0.625], ddof=1) / math.sqrt(2))
    # Two options of one document say what one of them says.
    one = token_mean([0.1, 0.3, 0.5], [2, 2, 2], ["a", "b", "c"])
    twice = token_mean([0.1, 0.1, 0.3, 0.3, 0.5, 0.5], [1] * 6, ["a", "a", "b", "b", "c", "c"])
    assert twice == pytest.approx(one)


def test_token_mean_is_covered_by_the_jackknife():
    draw = numpy.random.default_rng(0)
    tokens = draw.integers(1, 30, 200)
    values = draw.exponential(1, 200) / tokens**0.5
    clusters = [str(i) for i in range(200)]
    mean, stderr = token_mean(values.tolist(), tokens.tolist(), clusters)
    left_out = [
        (values * tokens).sum() - (values * tokens)[i] for i in range(200)
    ] / (tokens.sum() - tokens)  # fmt: skip
    jackknife = math.sqrt(199 / 200 * ((left_out - left_out.mean()) ** 2).sum())
    assert stderr == pytest.approx(jackknife, rel=0.02)
    assert mean == pytest.approx((values * tokens).sum() / tokens.sum())


def record(kl, agreement, difference, tokens, doc_id=0):
    return RequestRecord(
        "task", doc_id, 0, "loglikelihood", 10, tokens, 0, 4, 0.5, True, 0,
        kl=kl, agreement=agreement, loglikelihood_difference=difference,
        compared_tokens=0 if kl is None else tokens,
    )  # fmt: skip


def test_a_cells_record_is_weighted_by_tokens():
    meter = Meter(buckets={(4, 8): Bucket(4, -8.0, 4, 0.8, 3, -2.0, 4, 3.6), (8, 16): Bucket(1, -1.0, 0)})
    found = fidelity_record(
        [record(0.1, 0.5, -1.0, 2), record(0.4, 1.0, 0.5, 6, 1), record(None, None, None, 9, 2)],
        ["a", "b", "c"], meter, 2,
    )  # fmt: skip
    assert (found.tokens, found.kl) == (8, pytest.approx((0.2 + 2.4) / 8))
    assert found.agreement == pytest.approx(7 / 8)
    assert found.loglikelihood_difference == pytest.approx(-0.5 / 8)
    assert found.kl_stderr > 0 and found.mass_by_layer_and_head is None
    [place] = found.by_position
    assert (place.start, place.end, place.tokens, place.kl, place.agreement) == (4, 8, 4, 0.2, 0.75)
    assert (place.loglikelihood_difference, place.mass) == (-0.5, 0.9)
    assert [(c.start, c.end, c.tokens, c.loglikelihood) for c in curve_records(meter)] == [
        (4, 8, 4, -8.0),
        (8, 16, 1, -1.0),
    ]
    assert fidelity_record([record(None, None, None, 3)], ["a"], meter, 2) is None


def test_requests_are_compared_when_asked_for(ours, passes):
    lm = ours(strategy="h2o", budget=0.2, fidelity=True)
    plain = ours(strategy="h2o", budget=0.2)
    requests = [ask(TEXT, " and so", 0, 0), ask(TEXT, " but", 0, 1), ask(TEXT[:40], " in", 1)]
    passes.clear()
    answers = lm.loglikelihood(requests)
    assert passes == ["h2o", "full"]
    assert answers == plain.loglikelihood(requests)
    own = copy.deepcopy(lm.model)
    own.set_attn_implementation("eager")
    for request, one in zip(requests, lm.records, strict=True):
        context, target = lm._prompts().with_continuation(request)
        with torch.inference_mode():
            logits = own(torch.tensor([(context + target)[:-1]])).logits[0, -len(target) :].double()
        full = float(logits.log_softmax(-1).gather(1, torch.tensor(target)[:, None]).sum())
        assert one.loglikelihood_difference == pytest.approx(one.loglikelihood - full, abs=1e-3)
        assert one.kl > 1e-3 and 0 <= one.agreement <= 1 and one.compared_tokens == len(target)
        assert 0 < one.attention_mass < 1
    assert all(getattr(one, name) is None for one in plain.records for name in FIDELITY)
    info = lm.get_model_info()
    tokens = sum(one.compared_tokens for one in lm.records)
    assert info["kvacc_kl"] == pytest.approx(sum(r.kl * r.compared_tokens for r in lm.records) / tokens)
    assert info["kvacc_loglikelihood_difference"] == pytest.approx(
        sum(r.loglikelihood_difference for r in lm.records) / tokens
    )
    assert "kvacc_kl" not in plain.get_model_info()


def test_full_runs_once_for_all_strategies_of_a_loaded_model(ours, passes):
    lm = ours(fidelity=True)
    requests = [ask(TEXT, " and so", 0, 0), ask(TEXT, " but", 0, 1)]
    lm.loglikelihood(requests)
    passes.clear()
    for budget, protocol in ((0.5, "stream"), (0.2, "stream"), (0.2, "serve"), (0.2, "context")):
        lm.use(make_strategy("h2o", budget), protocol)
        lm.loglikelihood(requests)
        assert all(one.kl is not None for one in lm.records)
    assert passes == ["h2o"] * 4


def test_sums_start_anew_with_every_strategy(ours):
    lm = ours(fidelity=True)
    for _ in range(2):
        lm.use(H2O, "stream")
        lm.loglikelihood([ask(TEXT, " and so"), ask(TEXT, " but", 1)])
        assert sum(b.compared for b in lm.meter.buckets.values()) == 11


def test_a_generation_is_compared_on_fulls_own_answer(ours):
    lm = ours(fidelity=True, strategy="h2o", budget=1.0)
    requests = [
        complete(TEXT, until=["q"], max_gen_toks=9),
        complete(TEXT[5:], 1, until=["q"], max_gen_toks=9),
    ]
    texts = lm.generate_until(requests)
    for one in lm.records:
        assert one.kl < 1e-6 and one.agreement == 1.0 and one.compared_tokens == one.scored_tokens
    lm.use(FULL, "stream")
    assert lm.generate_until(requests) == texts
    lm.use(make_strategy("h2o", 6), "serve")
    lm.generate_until(requests)
    prompt = lm._prompts().whole(requests[0])
    answer = lm.references.answer(prompt, repr((["q", "</s>"], 9, None)))
    # By hand: full's answer read by the strategy on the step path, after a dense prompt.
    session = lm.wrapped.step(lm.strategy, [RowReading(0, len(prompt), len(prompt))])
    own = copy.deepcopy(lm.model)
    own.set_attn_implementation("eager")
    tokens = torch.tensor([prompt + answer[:-1]])
    steps = []
    with attention.active(session), torch.inference_mode():
        for column in range(tokens.shape[1]):
            steps.append(step_forward(lm.wrapped, session, tokens[:, column : column + 1], column)[0, -1])
    with torch.inference_mode():
        theirs = own(tokens).logits[0]
    count = len(answer)
    kl = kl_of(theirs[-count:], torch.stack(steps)[-count:])
    assert float(kl.mean()) > 1e-4
    assert lm.records[0].kl == pytest.approx(float(kl.mean()), rel=1e-3)
    assert lm.records[0].compared_tokens == count
    assert lm.records[0].loglikelihood_difference < 0


def test_full_generates_once(ours, monkeypatch):
    import kvacc.backend.generation as module

    names = []
    original = module.generate

    def generate(wrapped, strategy, *args, **kwargs):
        names.append(strategy.name)
        return original(wrapped, strategy, *args, **kwargs)

    monkeypatch.setattr(module, "generate", generate)
    lm = ours(fidelity=True)
    requests = [complete(TEXT, until=["q"], max_gen_toks=4)]
    for strategy in (FULL, H2O, make_strategy("recent", 0.2)):
        lm.use(strategy, "stream")
        lm.generate_until(requests)
    assert names == ["full", "h2o", "recent"]


def test_sampling_is_compared_on_the_greedy_answer(ours):
    lm = ours(fidelity=True, strategy="h2o", budget=0.3)
    torch.manual_seed(0)
    lm.generate_until([complete(TEXT, until=["q"], max_gen_toks=4, do_sample=True, temperature=5.0)])
    greedy = ours(fidelity=True, strategy="h2o", budget=0.3)
    greedy.generate_until([complete(TEXT, until=["q"], max_gen_toks=4)])
    assert lm.records[0].kl == pytest.approx(greedy.records[0].kl)


def test_a_text_scored_as_a_whole_is_summed_by_position(ours):
    lm = ours(strategy="recent", budget=5, window=16)
    totals = lm.loglikelihood_rolling([roll("a" * 37), roll(TEXT, 1)])
    buckets = lm.meter.buckets
    assert sum(b.loglikelihood for b in buckets.values()) == pytest.approx(sum(totals))
    # lm-eval's windows: 2 and 5 whole ones, then the last 5 and 11 tokens behind 11 and 5 of context.
    assert len(lm.tok_encode(TEXT)) == 91
    assert {at: b.tokens for at, b in buckets.items()} == {
        (0, 1): 7, (1, 2): 7, (2, 4): 7 * 2, (4, 8): 7 * 4 + 3, (8, 16): 7 * 8 + 5 + 8,
    }  # fmt: skip


def test_a_window_is_no_longer_than_the_models_context(ours):
    lm = ours(max_length=16, window=500)
    lm.loglikelihood_rolling([roll("a" * 40)])
    assert max(end for _, end in lm.meter.buckets) <= 16


@pytest.mark.parametrize("arguments", [{"window": 0}, {"window": "many"}, {"fidelity": "perhaps"}])
def test_wrong_arguments_are_named(ours, arguments):
    [name] = arguments
    with pytest.raises(KvaccError, match=name):
        ours(**arguments)


def spec_of(strategy, **changes):
    values = {"tasks": ["kvacc_mini_copa"], "limit": 6, "fidelity": True, **changes}
    config = config_from({"models": ["tiny"], "strategies": [strategy], **values})
    return plan_cells(config)[0]


def test_fidelity_is_part_of_a_cells_identity_only_where_it_was_measured():
    h2o = {"name": "h2o", "budget": 0.2}
    with_it, without = spec_of(h2o), spec_of(h2o, fidelity=False)
    assert with_it.cell_id != without.cell_id
    assert with_it.asked() == {**without.asked(), "fidelity": True}
    assert spec_of("full").cell_id == spec_of("full", fidelity=False).cell_id
    assert spec_of("full").fidelity, "full keeps its answers for the others"


def test_a_cell_holds_its_fidelity(ours, tmp_path, passes):
    lm = ours()
    task = task_catalog.load_tasks(["kvacc_mini_copa"])["kvacc_mini_copa"]
    full = evaluate_cell(spec_of("full"), lm, task, model_fingerprint={"name": "tiny"})
    assert full.fidelity is None and full.curve is None and not full.warnings[1:]
    passes.clear()
    cell = evaluate_cell(
        spec_of({"name": "h2o", "budget": 0.2}), lm, task, model_fingerprint={"name": "tiny"}
    )
    assert set(passes) == {"h2o"}
    found, rows = cell.fidelity, cell.samples
    tokens = sum(row["scored_tokens"] for row in rows)
    assert found.tokens == tokens == sum(place.tokens for place in found.by_position)
    mean = sum(row["kl"] * row["scored_tokens"] for row in rows) / tokens
    assert found.kl == pytest.approx(mean) and found.kl > 1e-4 and found.kl_stderr > 0
    assert sum(p.kl * p.tokens for p in found.by_position) / tokens == pytest.approx(mean)
    assert found.loglikelihood_difference == pytest.approx(
        sum(row["loglikelihood_difference"] for row in rows) / tokens
    )
    full_by_request = {(row["doc_id"], row["option"]): row["loglikelihood"] for row in full.samples}
    for row in rows:
        lost = row["loglikelihood"] - full_by_request[row["doc_id"], row["option"]]
        assert row["loglikelihood_difference"] == pytest.approx(lost, abs=1e-3)
    assert [len(layer) for layer in found.mass_by_layer_and_head] == [2, 2]
    assert cell.measured.attention_mass == pytest.approx(numpy.mean(found.mass_by_layer_and_head), abs=1e-6)
    back = results.read_cell(results.write_cell(tmp_path, cell))
    assert back.fidelity == found and back.spec.fidelity
    [of_full, row] = build([results.read_cell(results.write_cell(tmp_path, full)), back])
    assert (row.kl, row.agreement) == (found.kl, pytest.approx(found.agreement, abs=1e-6))
    assert of_full.kl is None and row.difference is not None, "full without fidelity is the baseline"
    shown = to_markdown([of_full, row])
    assert "| KL | agreement |" in shown and f"{found.kl:.3g}" in shown and "nats per" in shown
    assert "KL" not in to_markdown([of_full])
    table = back.load_samples()
    assert table["kl"].to_pylist() == pytest.approx([row["kl"] for row in rows])
    old = evaluate_cell(
        spec_of({"name": "h2o", "budget": 0.2}, fidelity=False), lm, task, model_fingerprint={"name": "tiny"}
    )
    assert old.fidelity is None and "fidelity" not in spec_of("full", fidelity=False).asked()
    assert old.scores == cell.scores


@pytest.mark.parametrize("name", ["h2o", "streaming_llm", "recent", "random", "quest", "infllm"])
@pytest.mark.parametrize("protocol", ["stream", "context", "serve"])
def test_a_budget_of_everything_agrees_with_full(ours, name, protocol):
    lm = ours(fidelity=True)
    lm.use(make_strategy(name, 1.0), protocol, tail_tokens=8)
    lm.loglikelihood([ask(TEXT, " and so", 0, 0), ask(TEXT, " but", 0, 1)])
    for one in lm.records:
        assert one.kl < 1e-6 and one.agreement == 1.0


@pytest.mark.slow
def test_a_budget_of_everything_agrees_with_full_on_a_real_model(smollm2_folder):
    lm = kvacc.KvaccLM(str(smollm2_folder), fidelity=True)
    requests = [ask(TEXT, " and so on", 0, 0), ask(TEXT, " but not", 0, 1), ask("Two and two", " is four", 1)]
    for name in ("h2o", "streaming_llm", "recent", "random", "quest", "infllm", "infinigen"):
        lm.use(make_strategy(name, 1.0), "stream")
        lm.loglikelihood(requests)
        for one in lm.records:
            assert one.kl < 1e-6 and one.agreement == 1.0, name
    assert lm.references.passes == 1
