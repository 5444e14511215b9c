"""``kvacc calibrate``: the smallest budget that holds, on a backend whose losses are known."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from fake_backend import FakeLM

from kvacc import evaluation, sweep
from kvacc.budget import Budget
from kvacc.calibrate import SUITE, calibrate, explicit_grid, fraction_grid
from kvacc.cli import cli
from kvacc.config import config_from
from kvacc.errors import KvaccError

# The items of a task that a budget gets wrong are the first of these shares of them.
LOSSES = {
    "kvacc_mini_copa": lambda kept: 0.0 if kept >= 0.3 else 0.5,
    "kvacc_mini_piqa": lambda kept: 0.0 if kept >= 0.6 else 0.5,
}


class KnownLM(FakeLM):
    """Full is always right; a budget is wrong on the share of a task's items that ``losses`` says."""

    losses = LOSSES
    loaded = 0

    def loglikelihood(self, requests):
        answers = []
        for request in requests:
            acted, _ = self._record(request, request.args[0], 1)
            kept = float(self.strategy.budget.amount) if self.strategy.has_budget else 1.0
            share = self.losses[request.task_name](kept) if self.strategy.has_budget else 0.0
            wrong = request.doc_id < share * 48
            right = request.idx == request.doc["label"]
            value = -1.0 if right != wrong else -5.0
            # A budget moves log-likelihoods even where every answer stays.
            answers.append((value - (0.01 if self.strategy.has_budget else 0.0), False))
        return answers


@pytest.fixture(autouse=True)
def known_backend(monkeypatch):
    monkeypatch.setattr(evaluation, "fingerprint_of", lambda lm, spec: {"name": "tiny"})


def config(**changes):
    tasks = {"tasks": ["kvacc_mini_copa", "kvacc_mini_piqa"]}
    return config_from({"name": "trial", "models": ["tiny"], "strategies": ["full"], **tasks, **changes})


def search(tmp_path, lm=None, **options):
    lm = lm or KnownLM()
    loads = []

    def load(model, settings):
        loads.append(model)
        return lm

    settings = options.pop("config", None) or config()
    found = calibrate(settings, "h2o", tmp_path / "runs", load_model=load, **{"margin": 0.08, **options})
    assert len(loads) <= 1  # one model, loaded once
    return found


def answers(found):
    return {answer.task: answer.budget for answer in found.answers}


def test_grids():
    assert [str(budget) for budget in fraction_grid(0.25)] == ["0.25", "0.5", "0.75"]
    assert [str(budget) for budget in fraction_grid(0.1)][2] == "0.3"  # not 0.30000000000000004
    assert [str(b) for b in explicit_grid(["64", "16", "32"])] == ["16", "32", "64"]
    assert [str(b) for b in explicit_grid(["20%", "1.0", "0.1"])] == ["0.1", "0.2"]
    with pytest.raises(KvaccError, match="only one kind"):
        explicit_grid(["0.5", "64"])
    with pytest.raises(KvaccError, match="step 0.9 is out of range"):
        fraction_grid(0.9)


@pytest.mark.slow
def test_the_smallest_budget_of_each_task_and_of_the_suite(tmp_path):
    """48 items without a flip: at most 5.3 points at 95 %, so a margin of 8 can be shown."""
    found = search(tmp_path)
    assert answers(found) == {"kvacc_mini_copa": "0.3", "kvacc_mini_piqa": "0.6", SUITE: "0.6"}
    assert found.falls == []
    holds = {(one.task, one.budget): one.holds for one in found.tried}
    assert holds["kvacc_mini_copa", "0.25"] is False and holds["kvacc_mini_piqa", "0.55"] is False


@pytest.mark.slow
def test_the_search_halves_and_reuses(tmp_path):
    found = search(tmp_path)
    budgets = {one.budget for one in found.tried if one.task == "kvacc_mini_copa"}
    assert len(budgets) <= 9  # of 19, for two targets
    again = search(tmp_path)
    assert again.runs == 0 and answers(again) == answers(found)
    # Another margin finds most of what it needs.
    assert search(tmp_path, margin=0.2).runs <= 4


@pytest.mark.slow
def test_a_margin_too_small_for_the_items(tmp_path):
    """Nothing is lost at 0.6 and above, but 48 items cannot show it to a point: 268 could."""
    found = search(tmp_path, margin=0.01)
    assert answers(found) == {"kvacc_mini_copa": None, "kvacc_mini_piqa": None, SUITE: None}
    assert found.answers[0].needed == 268 and found.answers[0].items == 48


@pytest.mark.slow
def test_a_score_that_does_not_rise_is_said(tmp_path):
    class Odd(KnownLM):
        losses = {"kvacc_mini_copa": lambda kept: 0.5 if 0.45 < kept < 0.6 or kept < 0.1 else 0.0}

    grid = [Budget.parse(value) for value in (0.05, 0.2, 0.5, 0.8, 0.9)]
    one = config(tasks=["kvacc_mini_copa"])
    found = search(tmp_path, Odd(), config=one, grid=grid)
    # Halving goes up from 0.5, which does not hold, so 0.8 is the answer although 0.2 would hold.
    assert answers(found) == {"kvacc_mini_copa": "0.8"}

    class Mixed(KnownLM):
        losses = {
            "kvacc_mini_copa": lambda kept: 0.5 if kept > 0.7 else 0.0,
            "kvacc_mini_piqa": lambda kept: 0.0 if kept > 0.7 else 0.5,
        }

    found = calibrate(
        config(), "h2o", tmp_path / "mixed", margin=0.08, grid=grid, load_model=lambda *_: Mixed()
    )
    # piqa's search runs 0.8 and 0.9 for the suite too, where copa falls.
    assert [line.split(" (p")[0] for line in found.falls] == [
        "kvacc_mini_copa: budget 0.8 scored 50.0 points below 0.05",
        "kvacc_mini_copa: budget 0.9 scored 50.0 points below 0.05",
        "kvacc_mini_copa: budget 0.8 scored 50.0 points below 0.5",
        "kvacc_mini_copa: budget 0.9 scored 50.0 points below 0.5",
    ]
    copa = found.answers[0]
    assert (copa.task, copa.budget, copa.contradicted) == ("kvacc_mini_copa", None, "0.9")


def test_tasks_keep_their_options(tmp_path):
    """Two lengths of one task are two tasks."""
    from kvacc.calibrate import _Runner

    tasks = [{"name": "kvacc_needle", "length": [256, 1024], "items": 2}, "kvacc_mini_copa"]
    runner = _Runner(config(tasks=tasks), "h2o", {}, tmp_path, None, None)
    assert runner.tasks == [
        "kvacc_needle items=2 length=256",
        "kvacc_needle items=2 length=1024",
        "kvacc_mini_copa",
    ]
    narrowed = runner._config(Budget.parse(0.5), ["kvacc_needle items=2 length=1024"])
    from kvacc.config import plan_cells

    found = {(spec.task, str(spec.task_options), spec.strategy.name) for spec in plan_cells(narrowed)}
    assert found == {
        ("kvacc_needle", "{'length': 1024, 'items': 2}", "full"),
        ("kvacc_needle", "{'length': 1024, 'items': 2}", "h2o"),
    }


@pytest.mark.parametrize(
    ("changes", "strategy", "message"),
    [
        ({}, "h20", "unknown strategy 'h20' .did you mean 'h2o'"),
        ({}, "full", "'full' has no budget to calibrate"),
        ({"shots": [0, 5]}, "h2o", "calibration is for one of shots, and the configuration has 2"),
    ],
)
def test_bad_input(tmp_path, changes, strategy, message):
    with pytest.raises(KvaccError, match=message):
        calibrate(config(**changes), strategy, tmp_path / "runs", load_model=lambda *_: KnownLM())


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "_load_model", lambda model, settings: KnownLM())
    (tmp_path / "c.yaml").write_text(
        "models: [tiny]\nstrategies: [full, {name: h2o, budget: 0.5, recent_fraction: 0.25}]\n"
        "tasks: [kvacc_mini_copa, kvacc_mini_piqa]\n"
    )

    def run(*words):
        return CliRunner().invoke(cli, ["calibrate", "c.yaml", "--strategy", "h2o", *words])

    result = run("--margin", "8", "--step", "0.1", "--json", "found.json")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-3:] == [
        "  kvacc_mini_copa: 0.3", "  kvacc_mini_piqa: 0.6", "  suite: 0.6",
    ]  # fmt: skip
    assert "h2o(recent_fraction=0.25) on suite: 96 items, full 100.0" in result.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert [answer["budget"] for answer in found["answers"]] == ["0.3", "0.6", "0.6"]
    few = run("--margin", "1", "--step", "0.1")
    assert few.exit_code == 1
    assert (
        "no budget below everything holds at this margin with 48 items; about 268 items would show"
        in few.stdout
    )
    assert run("--margin", "8", "--budgets", "0.2,64").exit_code == 2
    assert run("--margin", "8", "--budgets", "0.2", "--step", "0.1").exit_code == 2
