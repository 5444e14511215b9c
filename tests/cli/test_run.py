"""``kvacc run`` and ``kvacc leaderboard``, without a model (tests/fake_backend.py)."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from fake_backend import FakeLM

from kvacc import evaluation, sweep
from kvacc.cli import cli

CONFIG = """\
name: trial
models: [tiny]
strategies:
  - full
  - {name: h2o, budgets: [0.5, 4]}
tasks: [kvacc_mini_copa]
limit: 6
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "_load_model", lambda model, config: FakeLM())
    monkeypatch.setattr(evaluation, "fingerprint_of", lambda lm, spec: {"name": "tiny"})
    path = tmp_path / "trial.yaml"
    path.write_text(CONFIG)
    return path


def kvacc(*words):
    return CliRunner().invoke(cli, [str(word) for word in words])


def assert_mistake(result, *parts):
    assert result.exit_code == 2, result.output
    last = result.stderr.strip().splitlines()[-1]
    for part in parts:
        assert part in result.stderr, result.stderr
    assert "Traceback" not in result.output
    return last


def test_a_sweep_ends_with_its_leaderboard(config, tmp_path):
    result = kvacc("run", config, "--output", "out")
    assert result.exit_code == 0, result.output
    assert "h2o" in result.stdout and "kvacc_mini_copa" in result.stdout
    assert "[3/3]" in result.stderr and "[3/3]" not in result.stdout
    assert len(list((tmp_path / "out").rglob("cell.json"))) == 3


def test_the_output_folder_is_named_after_the_config(config, tmp_path):
    assert kvacc("run", config).exit_code == 0
    assert (tmp_path / "runs" / "trial").is_dir()


def test_the_same_command_again_computes_nothing(config):
    kvacc("run", config, "--output", "out")
    again = kvacc("run", config, "--output", "out")
    assert again.exit_code == 0 and "3 of 3 cells are finished" in again.stderr
    assert "h2o" in again.stdout


def test_limit_and_set_change_the_config(config, tmp_path):
    result = kvacc("run", config, "--output", "out", "--limit", 2, "--set", "strategies.1.budgets=[0.25]")
    assert result.exit_code == 0, result.output
    cells = [json.loads(path.read_text()) for path in (tmp_path / "out").rglob("cell.json")]
    assert {cell["task"]["num_items"] for cell in cells} == {2}
    assert {cell["spec"]["budget"] for cell in cells} == {None, "0.25"}


def test_data_dir_reaches_the_tasks(config, tmp_path):
    folder = tmp_path / "data: of 'mine'"
    (folder / "copa").mkdir(parents=True)
    item = {"premise": "It rained.", "choice1": "The road got wet.", "choice2": "The sun shone.", "question": "effect"}
    lines = [json.dumps({**item, "idx": number, "label": number % 2}) for number in range(4)]
    (folder / "copa" / "validation.jsonl").write_text("\n".join(lines))
    result = kvacc("run", config, "--output", "out", "--data-dir", folder, "--set", "tasks=[copa]")
    assert result.exit_code == 0, result.output
    cells = [json.loads(path.read_text()) for path in (tmp_path / "out").rglob("cell.json")]
    assert {cell["task"]["source"] for cell in cells} == {"folder"}


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("strategies.1.name=h20", ["h20", "did you mean 'h2o'"]),
        ("tasks=[kvacc_mini_coba]", ["kvacc_mini_coba", "did you mean 'kvacc_mini_copa'"]),
        ("protocols=[steam]", ["steam", "did you mean 'stream'"]),
        ("strategies.1.recent_fractoin=0.5", ["recent_fractoin", "did you mean 'recent_fraction'"]),
        ("strategies.1.budgets=[0]", ["0", "keeps nothing"]),
        ("strategies.1.budgets=[-3]", ["-3", "keeps nothing"]),
        ("strategies.1.budgets=[1.5]", ["1.5", "above 1"]),
        ("strategies.1={name: streaming_llm, budgets: [4]}", ["fewer than 4 sinks + 1 recent"]),
        ("limits=3", ["limits", "did you mean 'limit'"]),
    ],
)
def test_bad_values_are_answered_before_anything_runs(config, tmp_path, change, parts):
    result = kvacc("run", config, "--output", "out", "--set", change)
    assert_mistake(result, *parts)
    assert not (tmp_path / "out").exists()


def test_a_yaml_typo_names_the_line(config):
    config.write_text(CONFIG.replace("limit: 6", "limt: 6"))
    assert_mistake(kvacc("run", config), "trial.yaml:7:1", "did you mean 'limit'")


def test_a_config_that_does_not_exist(config):
    assert_mistake(kvacc("run", "quickstrat"), "did you mean 'quickstart'")


def test_a_limit_below_one(config):
    assert_mistake(kvacc("run", config, "--limit", 0), "--limit")


def test_another_configuration_in_the_folder_is_refused_unless_extended(config):
    assert kvacc("run", config, "--output", "out").exit_code == 0
    change = ["--output", "out", "--set", "strategies.1.budgets=[0.1]"]
    assert_mistake(kvacc("run", config, *change), "another configuration", "--extend")
    assert kvacc("run", config, *change, "--extend").exit_code == 0


def test_an_output_folder_that_cannot_be_written(config, tmp_path):
    (tmp_path / "file").write_text("")
    assert_mistake(kvacc("run", config, "--output", "file"), "is a file")
    assert_mistake(kvacc("run", config, "--output", "/proc/kvacc"), "/proc/kvacc")


def test_an_interrupt_keeps_what_is_done(config, monkeypatch):
    class Interrupted(FakeLM):
        def loglikelihood(self, requests):
            if len(self.prompts) == 2:
                raise KeyboardInterrupt
            return super().loglikelihood(requests)

    monkeypatch.setattr(sweep, "_load_model", lambda model, config: Interrupted())
    stopped = kvacc("run", config, "--output", "out")
    assert stopped.exit_code == 130
    assert "run the same command again to resume" in stopped.stderr
    monkeypatch.setattr(sweep, "_load_model", lambda model, config: FakeLM())
    resumed = kvacc("run", config, "--output", "out")
    assert resumed.exit_code == 0 and "2 of 3 cells are finished" in resumed.stderr


def test_a_cell_that_fails_makes_the_command_fail(config, monkeypatch):
    from kvacc.errors import KvaccError

    class Failing(FakeLM):
        def loglikelihood(self, requests):
            if self.strategy.name == "h2o":
                raise KvaccError("no room on the device")
            return super().loglikelihood(requests)

    monkeypatch.setattr(sweep, "_load_model", lambda model, config: Failing())
    result = kvacc("run", config, "--output", "out")
    assert result.exit_code == 1
    assert "no room on the device" in result.stderr and "2 of 3 cells failed" in result.stderr
    assert "full" in result.stdout


def test_leaderboard_prints_and_writes(config, tmp_path):
    kvacc("run", config, "--output", "out")
    result = kvacc("leaderboard", "out", "--write", "board")
    assert result.exit_code == 0 and "h2o" in result.stdout
    assert {path.name for path in (tmp_path / "board").iterdir()} == {
        "leaderboard.md",
        "leaderboard.csv",
        "leaderboard.json",
        "leaderboard.html",
    }
    quiet = kvacc("leaderboard", "out", "--write", "board", "--quiet")
    assert "h2o" not in quiet.stdout and "leaderboard.md" in quiet.stdout


def test_leaderboard_of_nothing(config, tmp_path):
    assert_mistake(kvacc("leaderboard", "missing"), "missing", "kvacc run")
    (tmp_path / "empty").mkdir()
    assert_mistake(kvacc("leaderboard", "empty"), "no finished cell")


def test_packaged_configs_are_valid():
    from kvacc.config import load_config, packaged_configs

    names = {"quickstart", "paper", "ci", "long-context", "gpu-llama"}
    assert names <= set(packaged_configs())
    for name in names:
        checked = load_config(name)
        assert checked.name == name
        assert checked.strategies[0].name == "full"
