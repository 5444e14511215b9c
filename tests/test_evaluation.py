"""One cell: lm-eval's answers joined with the backend's records, and honest standard errors."""

from __future__ import annotations

import dataclasses
import math
import runpy
from pathlib import Path

import pytest

from kvacc import evaluation, results, task_catalog
from kvacc.config import config_from, plan_cells
from kvacc.errors import KvaccError
from kvacc.evaluation import evaluate_cell, score_stderr
from kvacc.records import SELECTION

FakeLM = runpy.run_path(str(Path(__file__).with_name("fake_backend.py")))["FakeLM"]
ITEMS = 12


def spec_of(task="kvacc_mini_copa", strategy="full", protocol="stream", **changes):
    values = {"limit": ITEMS, **changes}
    config = config_from(
        {"models": ["fake"], "strategies": [strategy], "protocols": [protocol], "tasks": [task], **values}
    )
    return plan_cells(config)[0]


def run(spec, lm=None, task=None):
    task = task or load(spec)
    return evaluate_cell(spec, lm or FakeLM(), task, model_fingerprint={"name": "fake"})


def load(spec):
    return task_catalog.load_tasks([spec.task], num_fewshot=spec.shots, seed=spec.seed)[spec.task]


def test_a_cell_holds_what_was_asked_for_what_came_out_and_every_request():
    spec = spec_of(strategy={"name": "h2o", "budget": 3}, protocol="context", tail_tokens=7)
    lm = FakeLM()
    cell = run(spec, lm)
    assert lm.used == [(spec.strategy, "context", 7)] and lm.num_fewshot == 0
    assert cell.cell_id == spec.cell_id
    assert cell.spec.strategy == "h2o" and cell.spec.budget == "3" and cell.spec.limit == ITEMS
    assert cell.spec.options == {"recent_fraction": 0.5, "scores": "renormalised", "aggregate": "mean"}
    assert cell.strategy.repr == repr(spec.strategy)
    assert (cell.task.name, cell.task.kind, cell.task.source) == ("kvacc_mini_copa", "smoke", "embedded")
    assert (cell.task.num_items, cell.task.primary_metric, cell.task.chance) == (ITEMS, "acc", 0.5)
    assert cell.task.why_source == "embedded in kvacc"
    assert cell.environment.kvacc and cell.environment.processor and cell.environment.device.startswith("cpu")
    rows = cell.samples
    assert [(row["doc_id"], row["option"]) for row in rows] == [(d, o) for d in range(ITEMS) for o in (0, 1)]
    assert all(row["kind"] == "loglikelihood" and row["loglikelihood"] < 0 for row in rows)


def test_a_written_cell_reads_back(tmp_path):
    cell = run(spec_of())
    back = results.read_cell(results.write_cell(tmp_path, cell))
    assert back.scores == cell.scores and back.measured == cell.measured
    table = back.load_samples()
    assert table.num_rows == 2 * ITEMS
    assert set(results.SAMPLE_COLUMNS) | {"metric_acc"} <= set(table.column_names)


def test_scores_are_those_of_the_options_that_the_backend_preferred():
    cell = run(spec_of("kvacc_mini_piqa"))
    correct = []
    for doc_id in range(ITEMS):
        options = [row for row in cell.samples if row["doc_id"] == doc_id]
        preferred = max(range(2), key=lambda index: options[index]["loglikelihood"])
        correct.append(float(str(preferred) == options[0]["target"]))
        assert [row["metric_acc"] for row in options] == [correct[-1]] * 2
    share = sum(correct) / ITEMS
    assert 0 < share < 1
    assert cell.scores["acc"].value == pytest.approx(share)
    assert cell.scores["acc"].stderr == pytest.approx(math.sqrt(share * (1 - share) / (ITEMS - 1)))


def test_measured_is_weighted_by_scored_tokens_and_counts_documents():
    spec = spec_of(strategy={"name": "recent", "budget": 8}, protocol="serve")
    cell = run(spec)
    rows = cell.samples
    tokens = sum(row["scored_tokens"] for row in rows)
    weighted = sum(row["kept_fraction"] * row["scored_tokens"] for row in rows) / tokens
    acted = {row["doc_id"] for row in rows if row["acted"]}
    assert 0 < len(acted) < ITEMS
    measured = cell.measured
    assert measured.kept_fraction == pytest.approx(weighted) and measured.kept_fraction < 1
    assert measured.acted_items == len(acted) and measured.acted_share == len(acted) / ITEMS
    assert measured.scored_tokens == tokens
    assert measured.unreachable_share == pytest.approx(len(rows) / tokens)
    assert measured.budget_entries_median == 8


class Selecting(FakeLM):
    """Records a selection: of the first option of each document twice that of the second."""

    def _record(self, request, context, scored):
        answer = super()._record(request, context, scored)
        share = 0.8 / (request.idx + 1)
        self.records[-1] = dataclasses.replace(
            self.records[-1],
            moved_bytes=1000.0 * share,
            attention_mass=share,
            recall=share / 2,
            mass_by_layer=(None, share),
            recall_by_layer=(None, share / 2),
        )
        return answer


def test_a_selection_is_in_every_row_and_weighted_by_scored_tokens():
    cell = run(spec_of("kvacc_mini_winogrande"), Selecting())
    rows = cell.samples
    first, second = (sum(row["scored_tokens"] for row in rows if row["option"] == o) for o in (0, 1))
    assert [(row["moved_bytes"], row["attention_mass"], row["recall"]) for row in rows] == [
        (800.0, 0.8, 0.4),
        (400.0, 0.4, 0.2),
    ] * ITEMS
    share = (0.8 * first + 0.4 * second) / (first + second)
    measured = cell.measured
    assert measured.moved_bytes_per_token == pytest.approx(1000 * share)
    assert measured.attention_mass == pytest.approx(share) and measured.recall == pytest.approx(share / 2)
    assert measured.mass_by_layer == [None, pytest.approx(share)]
    assert measured.recall_by_layer == [None, pytest.approx(share / 2)]


def test_longer_continuations_weigh_more_in_a_selection():
    cell = run(spec_of("kvacc_mini_copa"), Selecting())
    tokens = [row["scored_tokens"] for row in cell.samples]
    assert sum(tokens[::2]) != sum(tokens[1::2]), "else this shows nothing"
    share = (0.8 * sum(tokens[::2]) + 0.4 * sum(tokens[1::2])) / sum(tokens)
    assert cell.measured.attention_mass == pytest.approx(share)


def test_strategies_that_do_not_select_have_nothing_of_it():
    cell = run(spec_of(strategy={"name": "h2o", "budget": 3}))
    assert {row[name] for row in cell.samples for name in SELECTION} == {None}
    measured = cell.measured
    assert measured.moved_bytes_per_token is measured.attention_mass is measured.recall is None
    assert measured.mass_by_layer is measured.recall_by_layer is None
    assert cell.strategy.offloads is False


def test_a_cache_in_host_memory_is_said(monkeypatch):
    spec = spec_of(strategy={"name": "h2o", "budget": 3})
    monkeypatch.setattr(type(spec.strategy), "offloads", True, raising=False)
    assert run(spec).strategy.offloads is True


def test_a_strategy_that_never_acted_is_reported():
    warnings = run(spec_of(strategy={"name": "h2o", "budget": 10_000})).warnings
    assert any(text.startswith("did not act") for text in warnings)
    assert not any("did not act" in text for text in run(spec_of()).warnings)
    acting = run(spec_of(strategy={"name": "h2o", "budget": 2}))
    assert not any("did not act" in text for text in acting.warnings)


def test_other_warnings():
    spec = spec_of("kvacc_mini_boolq", {"name": "h2o", "budget": 0.5, "scores": "global"}, limit=1000)
    cell = run(spec)
    text = "; ".join(cell.warnings)
    assert "non-causal" in text and "smoke test" in text
    truncated = sum(row["truncated_tokens"] > 0 for row in cell.samples)
    assert truncated > 0 and cell.measured.truncated_requests == truncated
    assert f"{truncated} prompts were cut from the left" in text
    assert f"limit 1000 is above the {cell.task.num_items} documents" in text


def test_few_shot_prompts_are_the_same_for_every_strategy_and_for_a_longer_run():
    spec = spec_of(shots=[3])
    task, lm = load(spec), FakeLM()
    first = run(spec, lm, task)
    # The same task object again: its sampler has moved on in the meantime.
    second = run(spec_of(strategy={"name": "h2o", "budget": 2}, shots=[3]), lm, task)
    longer = run(spec_of(shots=[3], limit=ITEMS + 5), lm, task)
    hashes = [row["prompt_hash"] for row in first.samples]
    assert hashes == [row["prompt_hash"] for row in second.samples]
    assert hashes == [row["prompt_hash"] for row in longer.samples][: len(hashes)]
    other_seed = run(spec_of(shots=[3], seed=1), lm, task)
    assert hashes != [row["prompt_hash"] for row in other_seed.samples]


def test_prompt_hashes_differ_where_the_options_stand_in_the_prompt():
    rows = run(spec_of("kvacc_mini_winogrande")).samples
    assert all(rows[i]["prompt_hash"] != rows[i + 1]["prompt_hash"] for i in range(0, len(rows), 2))
    rows = run(spec_of("kvacc_mini_copa")).samples
    assert all(rows[i]["prompt_hash"] == rows[i + 1]["prompt_hash"] for i in range(0, len(rows), 2))


def test_generated_answers_are_kept_and_scored():
    cell = run(spec_of("kvacc_passkey_generate", limit=6))
    assert cell.task.primary_metric.partition(",")[0] == "exact_match"
    assert cell.scores[cell.task.primary_metric].value == pytest.approx(2 / 6)
    assert [row["response"] == "nothing" for row in cell.samples] == [False, True, True] * 2
    assert {row["loglikelihood"] for row in cell.samples} == {None}
    # A metric of one depth covers the documents at that depth only.
    at_depth = [row["metric_exact_match_depth_10"] for row in cell.samples]
    assert at_depth == [1.0, None, None] * 2
    assert results.samples_table(cell.samples)["metric_exact_match_depth_10"].null_count == 4


def test_a_wrong_number_of_shots_or_too_many_are_refused():
    spec = spec_of(shots=[3])
    task = task_catalog.load_tasks([spec.task], num_fewshot=0)[spec.task]
    with pytest.raises(KvaccError, match="runs 0-shot only, but 3 shots were asked for"):
        run(spec, task=task)
    spec = spec_of(shots=[48])
    with pytest.raises(KvaccError, match="has 48 documents .* ask for at most 47"):
        run(spec)


def test_a_missing_record_is_a_defect_and_never_a_score():
    class Forgetful(FakeLM):
        def loglikelihood(self, requests):
            answers = super().loglikelihood(requests)
            self.records.pop()
            return answers

    with pytest.raises(RuntimeError, match="has no record of kvacc_mini_copa document 11, option 1"):
        run(spec_of(), Forgetful())


def test_lm_eval_draws_no_bar_of_its_own_and_is_left_as_it_was(capsys, caplog):
    run(spec_of("kvacc_passkey_generate", limit=3))
    captured = capsys.readouterr()
    assert "it/s" not in captured.err and "it/s" not in captured.out
    assert not caplog.records
    import lm_eval.api.task
    import tqdm

    assert lm_eval.api.task.tqdm is tqdm.tqdm


def mean(values):
    return sum(values) / len(values)


def test_the_standard_error_is_zero_only_if_all_documents_score_the_same():
    each = ["a", "b", "c", "d"]
    assert score_stderr([1.0] * 4, each, mean, 1.0) == 0
    assert score_stderr([1, 0, 1, 0], each, mean, 0.5) == pytest.approx(math.sqrt(0.25 / 3))
    # One document right in 1,000 still has an error.
    values = [1.0] + [0.0] * 999
    assert score_stderr(values, [str(i) for i in range(1000)], mean, 0.001) > 0
    # Errors that cancel within each cluster, and one cluster only.
    assert score_stderr([1, 0, 1, 0], ["a", "a", "b", "b"], mean, 0.5) > 0
    assert score_stderr([1, 0, 1, 0], ["a"] * 4, mean, 0.5) > 0
    assert score_stderr([1.0], ["a"], mean, 1.0) is None


def test_documents_of_one_cluster_count_together():
    values = [1, 1, 1, 0, 0, 0]
    apart = score_stderr(values, list("abcdef"), mean, 0.5)
    together = score_stderr(values, list("aaabbb"), mean, 0.5)
    assert together > 1.5 * apart


def test_a_score_that_is_no_mean_is_bootstrapped():
    values = [-1.0, -2.0, -3.0, -1.5, -2.5] * 8
    score = math.exp(-mean(values))
    clusters = [str(i) for i in range(40)]
    error = score_stderr(values, clusters, lambda v: math.exp(-mean(v)), score)
    # Delta method: score x standard error of the mean.
    spread = math.sqrt(sum((v - mean(values)) ** 2 for v in values) / 39 / 40)
    assert error == pytest.approx(score * spread, rel=0.15)
    assert error == score_stderr(values, clusters, lambda v: math.exp(-mean(v)), score)


def test_an_overflowed_score_is_no_result():
    with pytest.raises(KvaccError, match="NaN|nan"):
        cell = run(spec_of(), FakeLM(constant=math.nan))
        results.samples_table(cell.samples)


def test_environment_names_no_commit_of_a_foreign_checkout(tmp_path, monkeypatch):
    from kvacc import environment

    monkeypatch.setattr(environment, "__file__", str(tmp_path / "environment.py"))
    environment._commit.cache_clear()
    assert environment._commit() is None
    environment._commit.cache_clear()
    assert evaluation.environment_of("cpu").device.startswith("cpu, ")
