"""The parts of the checks: oracles against transformers itself, differences, rounding."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from kvacc.strategy import make_strategy
from kvacc.verify import Bench, tiny_subject, tiny_subjects
from kvacc.verify.results import FAILS, HOLDS, NOT_APPLICABLE, Failure, Tally, merged
from kvacc.verify.runs import Run, first_difference, parallel_runs, positions, step_runs
from kvacc.verify.subjects import flat_subject, own_logits, rounded_otherwise


@pytest.mark.parametrize("subject", tiny_subjects(), ids=lambda subject: subject.label)
def test_the_oracle_without_decisions_is_the_model_itself(subject):
    tokens = subject.draw_tokens(20, seed=3)
    model = copy.deepcopy(subject.wrapped.model)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(own_logits(subject, tokens), expected, atol=1e-5, rtol=0)


def test_the_oracle_hides_what_it_is_told_to():
    # With the first three entries hidden everywhere, a text of one layer is the rest of it alone.
    subject = tiny_subject("llama", 1)
    tokens = subject.draw_tokens(12, seed=3)
    read = torch.ones(2, 12, 12, dtype=torch.bool).tril()
    read[:, 3:, :3] = False
    found = own_logits(subject, tokens, {0: read})
    torch.testing.assert_close(
        found[3:], own_logits(subject, tokens[3:]), atol=1e-4, rtol=0
    )  # rotary: distances
    assert (found[3:] - own_logits(subject, tokens)[3:]).abs().max() > 1e-2


def test_the_oracle_of_cache_positions_is_the_model_given_the_kept_tokens_only():
    # In one layer an entry depends on its own token alone, so the kept ones can be read as a text.
    subject = tiny_subject("llama", 1)
    tokens = subject.draw_tokens(14, seed=5)
    strategy = make_strategy("streaming_llm", 5, sinks=2)
    bench = Bench(subject, strategy, [5], 14)
    case = next(case for case in bench.long_cases if case.protocol == "stream")
    run = bench.step(case)
    rotation = subject.wrapped.rotation_for(strategy)
    found = own_logits(subject, case.text.tokens, run.reads, rotation)
    for query in (6, 9, 13):
        kept = run.reads[0][0, query].nonzero()[:, 0].tolist()
        alone = own_logits(subject, tuple(case.text.tokens[place] for place in kept))
        torch.testing.assert_close(found[query], alone[-1], atol=1e-4, rtol=0)
    assert len(tokens) == len(case.text)


def test_stored_heads_and_bytes_are_those_of_transformers_own_cache():
    known = {subject.label: subject for subject in tiny_subjects()}
    llama, opt, latent = known["tiny llama"], known["tiny opt"], known["tiny deepseek_v3"]
    assert (llama.stored_heads, llama.deciding_heads, llama.entry_bytes) == (2, 2, 2 * 8 * 4)
    assert (opt.stored_heads, opt.deciding_heads, opt.entry_bytes) == (4, 4, 2 * 8 * 4)
    assert latent.deciding_heads == 1


def test_uniform_attention_is_uniform():
    subject = flat_subject()
    strategy = make_strategy("h2o", 4)
    bench = Bench(subject, strategy, [4], 12)
    run = bench.step(bench.main_case)
    # Older entries have received more of every query's equal share: the newest heavy one goes.
    assert positions(run.reads[0][0, 11]) == "0-1 9-11 (5)"


def run_of(reads, logits=None) -> Run:
    return Run(torch.zeros(4, 3) if logits is None else logits, reads)


def test_the_first_difference_is_the_earliest_and_what_was_read_comes_first():
    everything = torch.ones(2, 4, 4, dtype=torch.bool).tril()
    other = everything.clone()
    other[1, 2, 0] = False
    logits = torch.zeros(4, 3)
    logits[2, 1] = 0.5
    found = first_difference(run_of({0: everything}), run_of({0: other}, logits), 1e-3)
    assert (found.what, found.layer, found.head, found.position) == ("entries read", 0, 1, 2)
    assert (found.expected, found.found) == ("0-2 (3)", "1-2 (2)")
    logits[1, 2] = -0.25
    found = first_difference(run_of({0: everything}), run_of({0: other}, logits), 1e-3)
    assert (found.what, found.position, found.expected, found.found) == ("logit of token 2", 1, "0", "-0.25")
    assert first_difference(run_of({0: everything}), run_of({0: other}, logits), 1e-3, before=1) is None
    # Layers without a record read everything.
    assert first_difference(run_of({}), run_of({0: everything}), 0.0) is None
    found = first_difference(run_of({}), run_of({0: other}), 0.0)
    assert (found.position, found.expected) == (2, "0-2 (3)")
    nan = torch.full((4, 3), float("nan"))
    assert first_difference(run_of({}), run_of({}, nan), 1e-3).found == "nan"


def test_long_lists_of_positions_are_cut():
    read = torch.zeros(60, dtype=torch.bool)
    read[::2] = True
    assert positions(read) == "0 2 4 6 8 10 12 14 16 18 20 ... 58 (30)"
    assert positions(torch.zeros(3, dtype=torch.bool)) == "none (0)"


def test_both_paths_record_the_same_reads():
    subject = tiny_subject("gemma2")
    bench = Bench(subject, make_strategy("h2o", 6), [6], 20)
    case = bench.main_case
    (parallel,) = parallel_runs(subject, case.strategy, [case.text])
    (step,) = step_runs(subject, case.strategy, [case.text], chunk=7, padding=3)
    assert parallel.reads.keys() == step.reads.keys() == {1}  # layer 0 slides
    assert first_difference(step, parallel, 1e-3) is None
    assert parallel.hides


def test_rounding_is_small_and_leaves_the_model_as_it_was():
    subject = tiny_subject("llama")
    tokens = subject.draw_tokens(10, seed=1)
    before = own_logits(subject, tokens)
    with rounded_otherwise(subject, seed=0):
        off = (own_logits(subject, tokens) - before).abs().max()
    assert 0 < off < 1e-2
    assert torch.equal(own_logits(subject, tokens), before)


def test_a_decision_between_equal_scores_is_left_to_rounding():
    subject = tiny_subject("llama")
    bench = Bench(subject, make_strategy("h2o", 6), [6], 20)
    clear = first_difference(
        run_of({0: torch.ones(2, 4, 4).bool().tril()}), run_of({0: torch.eye(4).bool().expand(2, 4, 4)}), 0
    )
    assert not bench.is_rounding(bench.main_case, clear)


def test_results_of_several_models_become_one():
    failure = Failure("x", "b", "stream", "3", 8, "1", "2", "why")
    one = Tally(4, "a", cases=3).result()
    other = Tally(4, "b", cases=2).result(failure)
    none = Tally(4, "c", reasons=["no budget"]).result()
    assert (one.status, other.status, none.status) == (HOLDS, FAILS, NOT_APPLICABLE)
    both = merged([one, other, none])
    assert (both.status, both.cases, both.failure, both.failing_models) == (FAILS, 5, failure, ("b",))
    assert both.models == ("a", "b") and both.reasons == ("no budget",)
    assert merged([one, none]).status == HOLDS and merged([none]).status == NOT_APPLICABLE


def test_a_strategy_made_and_forgotten_leaves_its_runs_to_nobody():
    # A freed object's id is given to the next one; runs are kept by it.
    bench = Bench(tiny_subject("llama", 1), make_strategy("recent", 4), [4], 12)
    for budget in (3, 9, 4, 8, 5, 7, 6) * 3:
        case = dataclasses.replace(bench.main_case, strategy=make_strategy("recent", budget))
        (read,) = bench.parallel(case).reads.values()
        assert int(read[0, -1].sum()) == budget + 1
        del case
