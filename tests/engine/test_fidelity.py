"""Fidelity against ``full``: divergences and attention mass, against oracles of plain transformers."""

from __future__ import annotations

import dataclasses
import errno

import pytest
import torch
from families import FAMILIES, build, wrapped
from naive import draw_tokens, sharp

from kvacc.engine import fidelity, scoring
from kvacc.engine.fidelity import Meter, References, bucket_of, divergence
from kvacc.engine.plan import Request, build_rows, make_plan
from kvacc.engine.scoring import score_by_steps, score_documents
from kvacc.engine.wrapped import WrappedModel
from kvacc.errors import KvaccError
from kvacc.strategy import make_strategy

FULL = make_strategy("full")
H2O = make_strategy("h2o", 0.4)
BUDGETED = ("h2o", "streaming_llm", "recent", "random", "quest", "infllm", "infinigen")


def document(length: int, options: list[list[int]], seed: int = 0, dense: int = 0) -> list[Request]:
    context = tuple(draw_tokens(length, seed))
    return [Request((*context, *o[:-1]), tuple(o), dense, dense or length) for o in options]


def documents() -> list[list[Request]]:
    options = [[5, 6, 7], [5, 8, 9, 10], [11]]
    return [document(length, options, seed) for seed, length in enumerate((22, 9, 31, 15))]


def flat(scores):
    return [score for answers in scores for score in answers]


def compared(model, docs, strategy, references=None, **options):
    meter = Meter(references or References())
    return score_documents(model, docs, strategy, meter=meter, **options), meter


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "granite", "gpt_oss", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize("dense", [0, 14])
def test_divergence_against_plain_transformers_and_the_step_path(family, dense):
    model = wrapped(family)
    strategy = make_strategy("h2o", 6)
    docs = [document(18, [[5, 6, 7], [5, 8, 9, 10], [11]], dense=dense), document(25, [[9, 4]], 3, dense)]
    requests = [request for doc in docs for request in doc]
    own = build(family)
    _, logits = score_by_steps(model, requests, strategy)
    found, _ = compared(model, docs, strategy)
    for request, score, ours in zip(requests, flat(found), logits, strict=True):
        with torch.inference_mode():
            theirs = own(torch.tensor([request.tokens])).logits[0, request.first_scored :]
        p, q = theirs.double().log_softmax(-1), ours.double().log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1)
        targets = torch.tensor(request.targets)[:, None]
        assert float(kl.mean()) > 1e-9, "the strategy must have acted for this test to mean anything"
        assert score.kl == pytest.approx(float(kl.mean()), rel=2e-3, abs=1e-9)
        assert score.agreement == float((p.argmax(-1) == q.argmax(-1)).double().mean())
        difference = float((q.gather(1, targets) - p.gather(1, targets)).sum())
        assert score.loglikelihood_difference == pytest.approx(difference, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_projecting_states_gives_the_models_own_logits(family):
    model = wrapped(family)
    plan = make_plan(build_rows([(0, Request(tuple(draw_tokens(9)), (5, 6, 7), 0, 9))]), FULL)
    logits, session = model.parallel(plan, FULL, keep_hidden=True)
    assert session.hidden_states.shape[0] == 3
    for _ in range(2):  # the first call finds out what is behind the output embedding
        assert torch.equal(model.project(session.hidden_states), logits)
    if family in ("gemma2", "cohere", "granite", "cohere2"):
        head = model.model.get_output_embeddings()
        with torch.inference_mode():
            alone = head(session.hidden_states[None])[0]
        assert torch.equal(alone, logits) == bool(model._head_only)


def test_models_that_cap_or_scale_their_logits_do_so_here():
    """Without what comes behind the output embedding, the divergence would be another one."""
    for family in ("gemma2", "granite"):
        changes = {"final_logit_softcapping": 0.5} if family == "gemma2" else {"logits_scaling": 3.0}
        model = WrappedModel(build(family, **changes))
        compared(model, [document(12, [[5, 6]])], make_strategy("h2o", 4))
        assert model._head_only is False


@pytest.mark.parametrize("name", BUDGETED)
@pytest.mark.parametrize("protocol_dense", [0, 9])
def test_a_budget_of_everything_is_full(name, protocol_dense):
    docs = [document(15, [[5, 6, 7], [5, 8, 9, 10]], dense=protocol_dense)]
    found, meter = compared(sharp(), docs, make_strategy(name, 1.0))
    for score in flat(found):
        assert score.kl < 1e-6
        assert score.agreement == 1.0
        assert score.loglikelihood_difference == pytest.approx(0, abs=1e-4)
    for layer in meter.mass_table(2):
        assert layer == pytest.approx([1.0, 1.0], abs=1e-5)


@pytest.mark.parametrize("name", BUDGETED)
def test_a_small_budget_is_seen(name):
    options = {"dense_layers": 1} if name == "quest" else {}
    options |= {"page_size": 2} if name == "quest" else {}
    options |= {"block": 2, "init": 2} if name == "infllm" else {}
    found, _ = compared(sharp(), [document(40, [[5, 6, 7]])], make_strategy(name, 8, **options))
    assert flat(found)[0].kl > 1e-6
    assert 0 < flat(found)[0].attention_mass < 1


def test_scores_are_the_same_bits_with_and_without():
    plain = flat(score_documents(sharp(), documents(), H2O))
    measured, _ = compared(sharp(), documents(), H2O)
    nothing = {
        "kl": None, "agreement": None, "loglikelihood_difference": None, "attention_mass": None,
        "mass_by_layer": None,
    }  # fmt: skip
    assert [dataclasses.replace(score, **nothing) for score in flat(measured)] == plain


class Layer:
    """What went into one attention module of a Llama."""

    def __init__(self, module):
        self.module = module
        self.hidden = None
        module.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module, arguments, named):
        self.hidden = named.get("hidden_states", arguments[0] if arguments else None).clone()


@pytest.mark.parametrize("name", ["h2o", "streaming_llm", "random", "quest"])
def test_attention_mass_against_eager_attention(name, monkeypatch):
    """Queries and keys from the model's projections, softmax over all earlier tokens by hand."""
    from kvacc.verify.tiny_models import sharp_model

    own = sharp_model("llama")
    seen = [Layer(layer.self_attn) for layer in own.model.layers]
    model = WrappedModel(own)
    options = {"dense_layers": 0, "page_size": 2} if name == "quest" else {}
    strategy = make_strategy(name, 6, **options)
    tokens = tuple(draw_tokens(24, seed=4))
    request = Request(tokens, (5, 6, 7, 8), 0, len(tokens))
    plan = make_plan(build_rows([(0, request)]), strategy)
    _, session = model.parallel(plan, strategy, record=True, weigh=True)
    count, config = len(tokens), own.config
    cos, sin = own.model.rotary_emb(torch.zeros(1), torch.arange(count)[None])

    def rotated(x):
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    future = torch.ones(count, count, dtype=torch.bool).triu(1)
    expected = []
    for layer, watched in enumerate(seen):
        with torch.inference_mode():
            query = rotated(
                watched.module.q_proj(watched.hidden[0]).view(count, -1, config.head_dim).transpose(0, 1)
            )
            key = rotated(
                watched.module.k_proj(watched.hidden[0]).view(count, -1, config.head_dim).transpose(0, 1)
            )
        groups = config.num_attention_heads // config.num_key_value_heads
        logits = query @ key.repeat_interleave(groups, 0).transpose(1, 2) * config.head_dim**-0.5
        attention = logits.masked_fill(future, float("-inf")).softmax(-1)
        read = session.decisions[layer][0].repeat_interleave(groups, 0)
        mass = (attention * read).sum(-1)[:, -4:].view(-1, groups, 4).mean(1).T  # [4, KV heads]
        assert torch.allclose(session.mass_by_head[layer], mass.double(), atol=1e-5)
        assert float(mass.min()) < 0.999
        expected.append(mass.mean(-1))
    [[score]], meter = compared(model, [[request]], strategy)
    assert score.attention_mass == pytest.approx(float(torch.stack(expected).mean()), abs=1e-5)
    assert score.mass_by_layer == pytest.approx([float(e.mean()) for e in expected], abs=1e-5)
    [bucket] = [b for at, b in meter.buckets.items() if at == (16, 32)]
    assert bucket.weighed == 4
    assert bucket.mass == pytest.approx(float(torch.stack(expected).mean(0).sum()), abs=1e-4)


def test_mass_of_long_rows_is_replayed_in_blocks(monkeypatch):
    from kvacc.engine import parallel

    docs = [document(40, [[5, 6, 7], [8]])]
    whole, one = compared(sharp(), docs, H2O)
    monkeypatch.setattr(parallel, "BLOCK_BYTES", 4 * 4 * 44 * 7)
    parts, other = compared(sharp(), docs, H2O)
    assert [s.attention_mass for s in flat(parts)] == pytest.approx([s.attention_mass for s in flat(whole)])
    for a, b in zip(one.mass_table(2), other.mass_table(2), strict=True):
        assert a == pytest.approx(b, abs=1e-6)


def test_layers_that_read_everything_hold_all_the_mass():
    _, meter = compared(
        sharp(), [document(30, [[5, 6]])], make_strategy("quest", 8, dense_layers=1, page_size=2)
    )
    first, second = meter.mass_table(2)
    assert first == [1.0, 1.0]
    assert max(second) < 1


def test_sliding_and_recurrent_layers_hold_everything_or_nothing():
    _, meter = compared(wrapped("qwen3_next"), [document(20, [[5, 6]])], make_strategy("h2o", 6))
    recurrent, full = meter.mass_table(2)
    assert recurrent is None and len(full) > 0 and max(full) < 1
    _, meter = compared(wrapped("gemma2"), [document(20, [[5, 6]])], make_strategy("h2o", 6))
    assert [1.0, 1.0] in meter.mass_table(2)


@pytest.fixture
def passes(monkeypatch):
    """The strategy of every forward pass."""
    names = []
    original = WrappedModel.parallel

    def parallel(self, plan, strategy, *args, **kwargs):
        names.append(strategy.name)
        return original(self, plan, strategy, *args, **kwargs)

    monkeypatch.setattr(WrappedModel, "parallel", parallel)
    return names


def test_full_runs_once_for_all_budgets_and_protocols(passes):
    references = References()
    for budget in (0.8, 0.4, 0.2):
        compared(sharp(), documents(), make_strategy("h2o", budget), references)
    served = [[dataclasses.replace(r, dense=r.first_scored + 1) for r in doc] for doc in documents()]
    compared(sharp(), served, H2O, references)
    compared(sharp(), documents(), make_strategy("quest", 0.4, page_size=2), references)
    assert passes.count("full") == references.passes == 1


def test_a_run_of_full_is_kept_for_those_that_follow(passes):
    references = References()
    found, _ = compared(sharp(), documents(), FULL, references)
    assert flat(found)[0].kl is None
    first, _ = compared(sharp(), documents(), H2O, references)
    assert passes == ["full", "h2o"] and references.passes == 0
    second, _ = compared(sharp(), documents(), H2O)
    assert [s.kl for s in flat(first)] == pytest.approx([s.kl for s in flat(second)], abs=1e-9)


def test_only_rows_that_are_not_known_are_run(passes, monkeypatch):
    references = References()
    docs = documents()
    compared(sharp(), docs[:2], H2O, references)
    shapes = []
    original = WrappedModel.parallel

    def parallel(self, plan, strategy, *args, **kwargs):
        if strategy.name == "full":
            shapes.append(plan.tokens.shape[0])
        return original(self, plan, strategy, *args, **kwargs)

    monkeypatch.setattr(WrappedModel, "parallel", parallel)
    compared(sharp(), docs, H2O, references)
    assert shapes == [2]


@pytest.mark.parametrize("memory", [0, 500, 2000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_that_do_not_fit_in_memory_go_to_a_file_without_loss(memory, dtype):
    references = References(memory_bytes=memory)
    draw = torch.Generator().manual_seed(0)
    requests = [Request(tuple(range(i, i + 9)), (1, 2, 3), 0, 9) for i in range(6)]
    states = [torch.randn(3, 32, generator=draw).to(dtype) for _ in requests]
    for request, state in zip(requests, states, strict=True):
        references.add(request, state)
        references.add(request, torch.zeros_like(state))  # known ones stay
    for request, state in list(zip(requests, states, strict=True))[::-1]:
        assert torch.equal(references.get(request), state)
    assert references.get(Request(tuple(range(9)), (1, 2), 0, 9)) is None


def test_a_full_disk_costs_time_and_no_number(monkeypatch, passes):
    class FullDisk:
        def __init__(self, **kwargs):
            raise OSError(errno.ENOSPC, "no space left on device")

    expected, _ = compared(sharp(), documents(), H2O)
    passes.clear()
    monkeypatch.setattr(fidelity.tempfile, "TemporaryFile", FullDisk)
    references = References(memory_bytes=0)
    for _ in range(2):
        found, _ = compared(sharp(), documents(), H2O, references)
        assert [s.kl for s in flat(found)] == pytest.approx([s.kl for s in flat(expected)], abs=1e-9)
    assert passes.count("full") == 2


def test_projection_in_blocks_changes_nothing(monkeypatch):
    expected, _ = compared(sharp(), documents(), H2O)
    monkeypatch.setattr(fidelity, "PROJECTED_BYTES", 1)
    found, _ = compared(sharp(), documents(), H2O)
    for a, b in zip(flat(found), flat(expected), strict=True):
        assert a.kl == pytest.approx(b.kl, abs=1e-8) and a.agreement == b.agreement


def test_long_texts_never_hold_all_logits_at_once(monkeypatch):
    docs = [[Request(tuple(draw_tokens(60)), tuple(draw_tokens(60, 1)), 0, 60)]]
    expected = score_documents(sharp(), docs, H2O)
    sizes = []
    handle = (
        sharp()
        .model.get_output_embeddings()
        .register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[1]))
    )
    monkeypatch.setattr(scoring, "WHOLE_LOGIT_BYTES", 1000)
    monkeypatch.setattr(scoring, "LOGIT_BYTES", 8 * 128 * 10)
    try:
        found = score_documents(sharp(), docs, H2O)
    finally:
        handle.remove()
    assert max(sizes) <= 10 and sum(sizes) >= 60
    assert flat(found)[0].loglikelihood == pytest.approx(flat(expected)[0].loglikelihood, abs=1e-4)


def test_divergence_by_hand():
    """Two queries whose distributions over three tokens are known."""

    class Given:
        vocabulary = 3
        model = None

        def project(self, states):
            return states

    full = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    ours = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]).log()
    found = divergence(Given(), full, ours, torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]))
    # 0.5 ln(0.5/0.25) + 0.25 ln(0.25/0.5) = 0.25 ln 2
    assert found.kl.tolist() == pytest.approx([0.1732867951, 0.0], abs=1e-6)
    assert found.agrees.tolist() == [False, True]
    assert found.difference.tolist() == pytest.approx([-0.6931471806, 0.6931471806, 0.0], abs=1e-6)


def test_tokens_that_cannot_follow_add_nothing():
    class Given:
        vocabulary = 3
        model = None

        def project(self, states):
            return states

    never = float("-inf")
    full, ours = torch.tensor([[1.0, 1.0, never]]), torch.tensor([[1.0, 1.0, never]])
    assert divergence(Given(), full, ours, torch.tensor([0]), torch.tensor([0])).kl.tolist() == [0.0]


def test_an_overflow_is_one_clear_line():
    class Given:
        vocabulary = 2
        model = torch.nn.Linear(1, 1)
        model.dtype = torch.float16

        def project(self, states):
            return states

    full, ours = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, float("nan")]])
    with pytest.raises(KvaccError, match="not a finite number .*float16"):
        divergence(Given(), full, ours, torch.tensor([0]), torch.tensor([0]))


def test_buckets_double():
    places = [0, 1, 2, 3, 4, 7, 8, 1023, 1024]
    expected = [(0, 1), (1, 2), (2, 4), (2, 4), (4, 8), (4, 8), (8, 16), (512, 1024), (1024, 2048)]
    assert [bucket_of(place) for place in places] == expected


def test_sums_by_position_are_those_of_the_requests():
    docs = documents()
    found, meter = compared(sharp(), docs, H2O)
    scores, counts = flat(found), [len(r.targets) for doc in docs for r in doc]
    buckets = meter.buckets.values()
    assert sum(b.tokens for b in buckets) == sum(b.compared for b in buckets) == sum(counts)
    assert sum(b.loglikelihood for b in buckets) == pytest.approx(sum(s.loglikelihood for s in scores))
    assert sum(b.kl for b in buckets) == pytest.approx(
        sum(s.kl * n for s, n in zip(scores, counts, strict=True))
    )
    expected = sum(s.agreement * n for s, n in zip(scores, counts, strict=True))
    assert sum(b.agreements for b in buckets) == pytest.approx(expected)
    # Contexts of 22, 9, 31 and 15 tokens, answers of 3, 4 and 1: the first queries stand at 21, 8, 30, 14.
    assert {at: bucket.tokens for at, bucket in meter.buckets.items()} == {
        (8, 16): 8 + 5,
        (16, 32): 8 + 5 + 3,
        (32, 64): 3,
    }
