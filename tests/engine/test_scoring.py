"""Batches, memory, progress and precision of the parallel path's scores."""

from __future__ import annotations

import random

import pytest
import torch
from families import build
from naive import sharp

from kvacc.engine import scoring
from kvacc.engine.plan import Request
from kvacc.engine.scoring import score_by_steps, score_documents, token_logprobs
from kvacc.engine.wrapped import WrappedModel
from kvacc.errors import KvaccError
from kvacc.strategy import make_strategy

FULL = make_strategy("full")
H2O = make_strategy("h2o", 0.4)


def document(length: int, options: list[list[int]], seed: int = 0, dense: int = 0) -> list[Request]:
    draw = random.Random(seed)
    context = tuple(draw.randrange(3, 128) for _ in range(length))
    return [Request((*context, *o[:-1]), tuple(o), dense, dense or length) for o in options]


def documents() -> list[list[Request]]:
    options = [[5, 6, 7], [5, 8, 9, 10], [11]]
    return [document(length, options, seed) for seed, length in enumerate((22, 9, 31, 15))]


def flat(scores):
    return [score for answers in scores for score in answers]


def assert_same(found, expected):
    for one, other in zip(flat(found), flat(expected), strict=True):
        assert one.loglikelihood == pytest.approx(other.loglikelihood, abs=1e-4)
        assert (one.greedy, one.hidden) == (other.greedy, other.hidden)
        assert one.kept_fraction == pytest.approx(other.kept_fraction, abs=1e-12)


@pytest.fixture
def passes(monkeypatch):
    """Shape [rows, width] of every forward pass."""
    shapes = []
    original = WrappedModel.parallel

    def parallel(self, plan, *args, **kwargs):
        shapes.append(tuple(plan.tokens.shape))
        return original(self, plan, *args, **kwargs)

    monkeypatch.setattr(WrappedModel, "parallel", parallel)
    return shapes


def test_full_is_the_models_own_loglikelihood():
    model = build("llama")
    docs = documents()
    expected = []
    with torch.inference_mode():
        for request in (r for doc in docs for r in doc):
            logprobs = model(torch.tensor([request.tokens])).logits[0].double().log_softmax(-1)
            rows = logprobs[request.first_scored :]
            targets = torch.tensor(request.targets)
            greedy = bool((rows.argmax(-1) == targets).all())
            expected.append((float(rows.gather(1, targets[:, None]).sum()), greedy))
    found = flat(score_documents(WrappedModel(model), docs, FULL))
    for score, (loglikelihood, greedy) in zip(found, expected, strict=True):
        assert score.loglikelihood == pytest.approx(loglikelihood, abs=1e-4)
        assert score.greedy == greedy
        assert score.kept_fraction == 1.0 and not score.hidden


def test_a_greedy_continuation_is_found():
    model = sharp()
    context = tuple(range(3, 15))
    scores = [Request(context, (t,), 0, 12) for t in range(128)]
    answers = score_documents(model, [scores], FULL)[0]
    best = max(range(128), key=lambda t: answers[t].loglikelihood)
    assert [t for t in range(128) if answers[t].greedy] == [best]


@pytest.mark.parametrize("tokens", [1, 40, 70, 4096])
def test_batches_hold_so_many_tokens_and_change_nothing(tokens, passes):
    model = sharp()
    expected = score_documents(model, documents(), H2O)
    assert len(passes) == 1
    passes.clear()
    found = score_documents(model, documents(), H2O, batch_tokens=tokens)
    for rows, width in passes:
        assert rows == 1 or rows * width <= tokens
    widths = [width for _, width in passes]
    assert widths == sorted(widths, reverse=True)
    assert_same(found, expected)


def test_a_batch_of_one_document_equals_any_batch():
    model = sharp()
    together = score_documents(model, documents(), H2O)
    alone = [score_documents(model, [doc], H2O)[0] for doc in documents()]
    assert_same(together, alone)


def test_shared_tokens_are_computed_once(passes):
    score_documents(sharp(), [document(20, [[5, 6, 7], [5, 8, 9, 10], [11]])], FULL)
    # 20 of the context, then 5; 6 under it; 8 and 9 under it. The last token is never read.
    assert passes == [(1, 20 + 1 + 1 + 2)]


def test_equal_options_get_equal_answers():
    answers = score_documents(sharp(), [document(12, [[5, 6], [9], [5, 6]])], H2O)[0]
    assert answers[0] == answers[2] != answers[1]


def test_nothing_to_score():
    assert score_documents(sharp(), [], H2O) == []
    assert score_documents(sharp(), [[], document(5, [[7]])], H2O)[0] == []


@pytest.mark.parametrize("strategy", [FULL, H2O], ids=lambda s: s.name)
def test_a_document_wider_than_a_batch_is_split(strategy, passes):
    options = [[10 * i + j for j in range(3, 10)] for i in range(6)]
    docs = [document(10, options), document(6, [[4, 5]])]
    expected = score_documents(sharp(), docs, strategy)
    assert passes[0] == (2, 10 + 6 * 6)
    passes.clear()
    found = score_documents(sharp(), docs, strategy, batch_tokens=30)
    assert max(width for _, width in passes) <= 30
    assert_same(found, expected)


def test_a_document_longer_than_a_batch_runs_alone(passes):
    docs = [document(40, [[5, 6], [7, 8]]), document(8, [[5]])]
    expected = score_documents(sharp(), docs, H2O)
    passes.clear()
    assert_same(score_documents(sharp(), docs, H2O, batch_tokens=16), expected)
    # The options share all but their last token: apart they would be read twice.
    assert passes == [(1, 42), (1, 8)]


@pytest.fixture
def small_memory(monkeypatch):
    """Passes of more than 60 padded tokens run out of memory."""
    attempts = []
    original = WrappedModel.parallel

    def parallel(self, plan, *args, **kwargs):
        attempts.append(plan.tokens.numel())
        if attempts[-1] > 60:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return original(self, plan, *args, **kwargs)

    monkeypatch.setattr(WrappedModel, "parallel", parallel)
    return attempts


def test_out_of_memory_halves_the_batch_and_loses_nothing(small_memory, monkeypatch):
    calls = []
    found = score_documents(sharp(), documents(), H2O, progress=calls.append)
    assert max(small_memory) > 60 and small_memory[-1] <= 60
    first_that_fits = next(i for i, size in enumerate(small_memory) if size <= 60)
    assert all(size <= 60 for size in small_memory[first_that_fits:]), "a smaller batch is remembered"
    assert sum(calls) == 12
    monkeypatch.undo()
    assert_same(found, score_documents(sharp(), documents(), H2O))


def test_one_row_that_does_not_fit_is_one_clear_line(small_memory):
    with pytest.raises(KvaccError, match="one row of 70 tokens does not fit in memory; use") as raised:
        score_documents(sharp(), [document(70, [[5]]), document(5, [[6]])], H2O)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("tokens", [30, 4096])
def test_progress_counts_every_request_once(tokens):
    calls = []
    score_documents(sharp(), documents(), H2O, batch_tokens=tokens, progress=calls.append)
    assert sum(calls) == 12 and all(count > 0 for count in calls)
    assert (len(calls) > 1) == (tokens == 30)


def test_logits_are_computed_at_counted_positions_only():
    model = sharp()
    sizes = []
    handle = model.model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: sizes.append(tuple(output.shape))
    )
    try:
        score_documents(model, [document(20, [[5, 6, 7], [5, 8, 9, 10], [11]])], FULL)
    finally:
        handle.remove()
    # The context's last query (shared by three), 5 (shared by two), 6, 8 and 9.
    assert sizes == [(1, 5, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", [1, 2**28])
def test_token_logprobs_against_double_precision(dtype, held, monkeypatch):
    monkeypatch.setattr(scoring, "LOGIT_BYTES", held)
    draw = torch.Generator().manual_seed(3)
    logits = (30 * torch.randn(11, 1000, generator=draw)).to(dtype)
    rows = torch.randint(0, 11, (40,), generator=draw)
    targets = torch.randint(0, 1000, (40,), generator=draw)
    targets[::4] = logits[rows[::4]].argmax(-1)
    found, best = token_logprobs(logits, rows, targets)
    exact = logits.double().log_softmax(-1)[rows, targets]
    assert found == pytest.approx(exact.tolist(), abs=3e-5)
    assert best == (logits[rows].argmax(-1) == targets).tolist()
    assert all(best[::4]) and not all(best)


def test_a_long_continuation_loses_no_precision():
    targets = tuple(3 + i % 90 for i in range(80))
    request = Request((*range(3, 13), *targets[:-1]), targets, 0, 10)
    model = build("llama")
    with torch.inference_mode():
        logprobs = model(torch.tensor([request.tokens])).logits[0, -80:].double().log_softmax(-1)
    exact = float(logprobs.gather(1, torch.tensor(targets)[:, None]).sum())
    [[score]] = score_documents(WrappedModel(model), [[request]], FULL)
    assert score.loglikelihood == pytest.approx(exact, abs=3e-4)


@pytest.mark.parametrize("dense", [0, 9, 14])
def test_kept_fraction_by_hand(dense):
    """``recent`` at 4 entries: a query reads the four kept ones and itself."""
    strategy = make_strategy("recent", 4)
    [[score]] = score_documents(sharp(), [document(14, [[5, 6, 7]], dense=dense)], strategy)
    # Scored queries stand at 13, 14 and 15; in `serve` (all 14 dense) the first reads everything.
    first = 1.0 if dense == 14 else 5 / 14
    assert score.kept_fraction == pytest.approx((first + 5 / 15 + 5 / 16) / 3)
    assert score.hidden


def test_one_token_after_a_dense_prompt_is_untouched():
    [[score]] = score_documents(sharp(), [document(14, [[5]], dense=14)], make_strategy("recent", 4))
    [[full]] = score_documents(sharp(), [document(14, [[5]])], FULL)
    assert not score.hidden and score.kept_fraction == 1.0
    assert score.loglikelihood == pytest.approx(full.loglikelihood, abs=1e-5)


def test_compiled_and_plain_scans_agree():
    for strategy in (H2O, make_strategy("streaming_llm", 8), make_strategy("random", 0.3)):
        found = score_documents(sharp(), documents(), strategy)
        assert_same(found, score_documents(sharp(), documents(), strategy, reference=True))


def test_step_path_returns_the_logits_it_scored():
    requests = [r for doc in documents()[:2] for r in doc]
    scores, logits = score_by_steps(sharp(), requests, H2O)
    for request, score, rows in zip(requests, scores, logits, strict=True):
        assert rows.shape == (len(request.targets), 128)
        exact = rows.double().log_softmax(-1).gather(1, torch.tensor(request.targets)[:, None]).sum()
        assert score.loglikelihood == pytest.approx(float(exact), abs=1e-4)


def test_batches_cost_least_in_padding_and_passes():
    from kvacc.engine.scoring import batch_sizes

    # One long row by itself: beside the short ones it would pad each of them by 90.
    assert batch_sizes([100, 10, 10, 10], 1000, 48) == [1, 3]
    # A pass costs more than so little padding.
    assert batch_sizes([12, 10, 10, 10], 1000, 48) == [4]
    assert batch_sizes([100, 10], 1000, 1000) == [2]
    # The limit holds, but one row may be wider.
    assert batch_sizes([10] * 7, 30, 48) == [1, 3, 3]
    assert batch_sizes([50, 20, 20], 40, 1) == [1, 2]
    assert batch_sizes([], 40, 1) == []


def test_options_of_a_long_context_stay_together():
    """A document wider than a batch is divided where that makes rows narrower, and nowhere else."""
    from kvacc.engine.scoring import _rows_within

    shared = [(n, Request((*range(3, 43), tail), (tail, 9), 0, 40)) for n, tail in enumerate((50, 51))]
    assert len(_rows_within(shared, True, 30, 0)) == 1
    apart = [(n, Request((3, *range(first, first + 40)), (9,), 0, 40)) for n, first in enumerate((10, 60))]
    assert len(_rows_within(apart, True, 60, 0)) == 2
