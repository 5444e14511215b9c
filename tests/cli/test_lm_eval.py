"""``kvacc lm-eval``: lm-eval's own command line with kvacc's backend and tasks in it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import lm_eval.__main__
import lm_eval.tasks
import pytest
from click.testing import CliRunner

from kvacc.cli import cli
from kvacc.cli.lm_eval import our_tasks, refuse_use_cache, take_data_dir
from kvacc.errors import KvaccError


@pytest.fixture
def handed_over(monkeypatch):
    """Runs a command line and returns what lm-eval was given as ``sys.argv``."""
    seen = []
    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", lambda: seen.append(list(sys.argv)))

    def run(*words):
        before = list(sys.argv)
        result = CliRunner().invoke(cli, ["lm-eval", *words], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert sys.argv == before
        return seen.pop()

    return run


def test_every_argument_is_handed_over_unchanged(handed_over):
    words = ["run", "--model", "kvacc", "--model_args", "pretrained=x,strategy=h2o,budget=0.2", "--tasks", "piqa"]
    words += ["--num_fewshot", "5", "--limit=3", "--apply_chat_template", "-O", "out dir", "--help", "--", "-x"]
    assert handed_over(*words) == ["lm-eval", *words]


@pytest.mark.parametrize("words", [("--data-dir", "{}"), ("--data-dir={}",), ("--data_dir", "{}")])
def test_data_dir_is_ours(handed_over, tmp_path, words):
    given = [word.format(tmp_path) for word in words]
    assert handed_over("run", *given, "--tasks", "piqa") == ["lm-eval", "run", "--tasks", "piqa"]


def test_data_dir_from_the_environment_or_the_command_line(monkeypatch):
    monkeypatch.setenv("KVACC_DATA_DIR", "/there")
    assert take_data_dir(["ls"]) == (["ls"], "/there")
    assert take_data_dir(["ls", "--data-dir", "/here"]) == (["ls"], "/here")
    for words in (["--data-dir"], ["--data-dir="], ["--data-dir", "--tasks"]):
        with pytest.raises(KvaccError, match="--data-dir needs a folder"):
            take_data_dir(words)


@pytest.mark.parametrize("words", [["--use_cache", "x"], ["--use_cache=x"], ["-c", "x"], ["-cx"], ["--use", "x"]])
def test_the_result_cache_is_refused(words):
    result = CliRunner().invoke(cli, ["lm-eval", "run", "--model", "kvacc", *words])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --use_cache is refused") and result.stderr.count("\n") == 1


def test_the_result_cache_in_a_config_file_is_refused(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: kvacc\nuse_cache: x\n")
    for words in (["--config", str(file)], [f"--config={file}"], ["-C", str(file)]):
        with pytest.raises(KvaccError, match="refused"):
            refuse_use_cache(["run", *words])
    file.write_text("model: kvacc\n")
    refuse_use_cache(["run", "--config", str(file)])
    refuse_use_cache(["run", "--config", str(tmp_path / "missing.yaml"), "--cache_requests", "true"])


@pytest.fixture
def data_dir(tmp_path):
    folder = tmp_path / "data" / "copa"
    folder.mkdir(parents=True)
    item = {"premise": "It rained.", "choice1": "The road got wet.", "choice2": "The sun shone.", "question": "effect"}
    lines = [json.dumps({**item, "idx": number, "label": number % 2}) for number in range(4)]
    (folder / "validation.jsonl").write_text("\n".join(lines))
    return folder.parent


@pytest.fixture
def user_tasks(tmp_path):
    """A user's folder: a task of its own, which includes a neighbour, and one that overrides ours."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "common").write_text("dataset_path: json\noutput_type: multiple_choice\n")
    (folder / "mine.yaml").write_text("task: mine\ninclude: common\n")
    (folder / "override.yaml").write_text("task: kvacc_mini_copa\ninclude: common\n")
    return folder


def test_our_tasks_and_the_users_are_both_found(data_dir, user_tasks):
    original = lm_eval.tasks.TaskManager
    with our_tasks(str(data_dir)):
        manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=str(user_tasks))
        names = set(manager.all_tasks)
        assert {"mine", "kvacc_mini_piqa", "kvacc_passkey", "copa"} <= names
        assert "piqa" not in names  # the folder has no file for it: lm-eval's own stays
        copa = manager.load(["copa"])["tasks"]["copa"]
        assert len(copa.eval_docs) == 4
    assert lm_eval.tasks.TaskManager is original


def test_what_the_user_gives_wins(user_tasks):
    with our_tasks(None):
        manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=str(user_tasks))
        assert str(manager.task_index["kvacc_mini_copa"].yaml_path).startswith(str(user_tasks))


def test_only_the_users_overrides_are_warned_about(user_tasks, data_dir, caplog):
    with our_tasks(str(data_dir)), caplog.at_level(logging.WARNING):
        lm_eval.tasks.TaskManager(include_defaults=False, include_path=str(user_tasks))
    messages = [record.getMessage() for record in caplog.records]
    assert [message for message in messages if "kvacc_mini_copa" in message]
    assert not [message for message in messages if message.startswith("Task 'copa'")]


def test_the_task_manager_is_put_back_after_an_error():
    original = lm_eval.tasks.TaskManager
    with pytest.raises(RuntimeError), our_tasks(None):
        raise RuntimeError
    assert lm_eval.tasks.TaskManager is original


def test_a_data_folder_that_does_not_exist(tmp_path):
    result = CliRunner().invoke(cli, ["lm-eval", "ls", "--data-dir", str(tmp_path / "none")])
    assert result.exit_code == 2 and "does not exist" in result.stderr


def test_help_is_lm_evals_own():
    done = subprocess.run([sys.executable, "-m", "kvacc", "lm-eval", "run", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--model_args" in done.stdout and "--use_cache" in done.stdout


@pytest.mark.slow
def test_a_whole_run(tiny_folder, data_dir, tmp_path):
    """lm-eval reads its 14,000 task files first, which takes most of the time."""
    arguments = f"pretrained={tiny_folder},strategy=h2o,budget=0.3,protocol=stream"
    words = ["lm-eval", "run", "--model", "kvacc", "--model_args", arguments, "--tasks", "copa,kvacc_mini_piqa"]
    words += ["--limit", "3", "--num_fewshot", "1", "--output_path", str(tmp_path / "out"), "--log_samples"]
    done = subprocess.run(
        [sys.executable, "-m", "kvacc", *words, "--data-dir", str(data_dir)],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    [file] = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(file.read_text())
    assert set(found["results"]) == {"copa", "kvacc_mini_piqa"}
    assert found["n-samples"]["copa"] == {"original": 4, "effective": 3}
    assert "0.3" in found["config"]["kvacc_strategy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("pretrained={},strategy=h20,budget=0.3", "did you mean 'h2o'"),
        ("pretrained={},strategy=h2o,budget=1.5", "above 1"),
        ("pretrained={},strategy=h2o,budget=0.3,protocol=steam", "did you mean 'stream'"),
        ("pretrained={}/none,strategy=full", "no such folder"),
    ],
)
def test_mistakes_in_model_args(tiny_folder, arguments, message):
    words = ["lm-eval", "run", "--model", "kvacc", "--model_args", arguments.format(tiny_folder)]
    words += ["--tasks", "kvacc_mini_piqa", "--limit", "1"]
    done = subprocess.run([sys.executable, "-m", "kvacc", *words], capture_output=True, text=True)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last
