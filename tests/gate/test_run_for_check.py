"""``kvacc check --config``: results are made afresh, and never taken from an earlier run unasked."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_backend import FakeLM

from kvacc import evaluation, sweep
from kvacc.cli import cli
from kvacc.include import include

HARMED = Path(__file__).parent.parent.parent / "examples" / "harmed_h2o.py"
CONFIG = """\
name: trial
models: [tiny]
strategies: [full, {name: h2o, budgets: [0.2]}]
tasks: [kvacc_mini_copa, kvacc_mini_piqa]
"""


class Changed(FakeLM):
    """The code has changed: h2o answers at random now."""

    def _record(self, request, context, scored):
        acted, salt = super()._record(request, context, scored)
        return acted, salt + "changed" if acted else ""


class Right(FakeLM):
    """Every answer is right."""

    def loglikelihood(self, requests):
        super().loglikelihood(requests)
        return [(-1.0 if request.idx == request.doc["label"] else -5.0, False) for request in requests]


@pytest.fixture
def use(monkeypatch):
    monkeypatch.setattr(evaluation, "fingerprint_of", lambda lm, spec: {"name": "tiny"})

    def use(backend):
        monkeypatch.setattr(sweep, "_load_model", lambda model, config: backend())

    use(Right)
    return use


def kvacc(*words):
    return CliRunner().invoke(cli, [str(word) for word in words])


@pytest.fixture
def baseline(use, tmp_path):
    (tmp_path / "trial.yaml").write_text(CONFIG)
    assert kvacc("run", "trial.yaml", "--output", "first").exit_code == 0
    assert kvacc("baseline", "create", "first", "--output", "base.json", "--reason", "x").exit_code == 0
    return ("check", "--config", "trial.yaml", "--baseline", "base.json")


def test_every_check_runs_afresh(baseline, use, tmp_path):
    assert kvacc(*baseline).exit_code == 0
    assert (tmp_path / "runs" / "check" / "cells").is_dir()
    use(Changed)
    result = kvacc(*baseline)
    assert result.exit_code == 1, result.output
    assert (tmp_path / "runs" / "check-2" / "cells").is_dir()


def test_an_earlier_run_is_used_only_when_asked_for(baseline, use):
    assert kvacc(*baseline, "--output", "mine").exit_code == 0
    use(Changed)
    refused = kvacc(*baseline, "--output", "mine")
    assert refused.exit_code == 2
    assert (
        "mine holds results already, perhaps of other code; judge them with --results mine" in refused.stderr
    )
    assert kvacc(*baseline, "--output", "mine", "--resume").exit_code == 0  # the cells of before


def test_settings_reach_the_run(baseline):
    result = kvacc(*baseline, "--set", "seed=7")
    assert result.exit_code == 2
    assert result.stderr.count("seed 7 here, 1234 in the baseline; run with the same") == 4


def test_the_harmed_example_stands_in_for_h2o(baseline, use):
    use(Changed)
    words = ("--include", HARMED, "--set", "strategies.1.name=harmed_h2o", "--compare-as", "harmed_h2o=h2o")
    result = kvacc(*baseline, *words)
    assert result.exit_code == 1, result.output
    assert "tiny harmed_h2o 0.2 stream kvacc_mini_copa" in result.stdout


def test_the_harmed_example_evicts_the_heavy_hitter():
    """Of five entries the third received most: H2O keeps it, this one evicts it."""
    import torch

    from kvacc.strategy import make_strategy

    include(HARMED)
    attention = torch.tensor([0.1, 0.2, 0.5, 0.15, 0.05]).view(1, 1, 1, 5)
    for name, kept in (
        ("harmed_h2o", [True, False, False, True, True]),
        ("h2o", [False, True, True, False, True]),
    ):
        strategy = make_strategy(name, 3)
        scores = strategy.observe(torch.zeros(1, 1, 5), attention)
        numbers = [torch.tensor([number]) for number in (5, 3, 1 if name == "h2o" else 2, 0)]
        keep, _ = strategy.keep(
            scores, torch.arange(5).view(1, 1, 5), torch.ones(1, 1, 5, dtype=bool), *numbers
        )
        assert keep.view(-1).tolist() == kept


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_harmed_h2o_fails_on_the_embedded_model_and_the_unharmed_one_passes(smollm2_folder):
    """Two minutes on two quiet cores for each run."""
    assert kvacc("run", "ci", "--output", "first").exit_code == 0
    assert kvacc("baseline", "create", "first", "--output", "base.json", "--reason", "x").exit_code == 0
    check = ("check", "--config", "ci", "--baseline", "base.json", "--margin", "10")
    unharmed = kvacc(*check)
    assert unharmed.exit_code == 0, unharmed.output
    words = ("--include", HARMED, "--set", "strategies.1.name=harmed_h2o", "--compare-as", "harmed_h2o=h2o")
    harmed = kvacc(*check, *words)
    assert harmed.exit_code == 1, harmed.output
    (line,) = [
        one for one in harmed.stdout.splitlines() if one.startswith("fail") and "kvacc_passkey 0" in one
    ]
    assert "most at depth" in line
