"""The command line: fast help, one-line errors, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import click
import pytest
from click.testing import CliRunner

from kvacc.cli import COMMANDS, cli
from kvacc.errors import KvaccError


@pytest.fixture
def run():
    """Runs a command line in this process: ``run("strategies", "h2o")``."""
    return lambda *words: CliRunner().invoke(cli, list(words))


def assert_mistake(result, *parts):
    """Exit code 2 and one line on the error stream that has all ``parts``."""
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    for part in parts:
        assert part in result.stderr
    assert result.stdout == ""


def test_help_is_fast_and_imports_nothing_heavy():
    code = (
        "import sys\nfrom kvacc.cli import cli\n"
        "try: cli(['--help'])\nexcept SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'pandas', 'rich', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    seconds = []
    for _ in range(3):
        start = os.times()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        end = os.times()
        # Processor time, because a busy machine says nothing about kvacc.
        seconds.append(end.children_user + end.children_system - start.children_user - start.children_system)
    assert min(seconds) < 0.4


def test_help_lists_every_command(run):
    result = run("--help")
    assert result.exit_code == 0
    for name, (_, summary) in COMMANDS.items():
        assert name in result.output and summary.split()[0] in result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_resolves_and_is_documented(name):
    context = click.Context(cli)
    command = cli.get_command(context, name)
    assert isinstance(command, click.Command)
    assert command.help


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "lm-eval"])
def test_every_command_has_help(run, name):
    result = run(name, "--help")
    assert result.exit_code == 0 and result.output.startswith("Usage:")


def test_version(run):
    import kvacc

    assert run("--version").output == f"kvacc, version {kvacc.__version__}\n"


def test_module_runs_as_the_console_script_does():
    done = subprocess.run([sys.executable, "-m", "kvacc", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("kvacc, version ")


def test_unknown_command_suggests_the_nearest(run):
    assert_mistake(run("leaderbord"), "unknown command 'leaderbord'", "did you mean 'leaderboard'")


def test_unknown_option_is_one_line(run):
    assert_mistake(run("strategies", "--nonsense"), "--nonsense")
    assert_mistake(run("--nonsense"), "--nonsense")


def test_missing_argument_is_one_line(run):
    assert_mistake(run("run"), "CONFIG")
    assert_mistake(run("leaderboard"), "RUNS")


def test_a_mistake_is_one_line_and_debug_shows_the_traceback(run):
    assert_mistake(run("strategies", "h20"), "did you mean 'h2o'")
    shown = CliRunner().invoke(cli, ["--debug", "strategies", "h20"])
    assert isinstance(shown.exception, KvaccError)
    # After the command's name the option is the command's, not ours.
    assert_mistake(run("strategies", "--debug"), "--debug")


def test_an_interrupt_is_no_traceback(monkeypatch):
    from kvacc import strategy

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(strategy, "strategy_classes", interrupt)
    result = CliRunner().invoke(cli, ["strategies"])
    assert result.exit_code == 130
    assert result.stderr.strip() == "interrupted"


def test_only_a_command_that_resumes_says_so(monkeypatch):
    from kvacc import config

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(config, "load_config", interrupt)
    result = CliRunner().invoke(cli, ["run", "quickstart"])
    assert result.exit_code == 130
    assert result.stderr.strip() == "interrupted; run the same command again to resume"


def test_a_real_interrupt():
    """Ctrl-C from a terminal, while a command works."""
    code = (
        "import signal, sys, time\nimport kvacc.strategy\n"
        # A terminal's programs heed Ctrl-C; those of a background job start with it ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def wait():\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "kvacc.strategy.strategy_classes = wait\n"
        "from kvacc.cli import main\nsys.argv = ['kvacc', 'strategies']\nmain()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 130
    assert errors.strip() == "interrupted"


def test_a_defect_keeps_its_traceback(monkeypatch):
    from kvacc import strategy

    def fail():
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(strategy, "strategy_classes", fail)
    assert isinstance(CliRunner().invoke(cli, ["strategies"]).exception, ZeroDivisionError)


def test_output_into_a_closed_pipe_is_no_traceback():
    command = f"{sys.executable} -m kvacc strategies h2o | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in done.stderr


def test_strategies_lists_all_with_their_options(run):
    from kvacc.strategy import strategy_classes

    result = run("strategies")
    assert result.exit_code == 0
    for name in strategy_classes():
        assert name in result.output
    assert "recent_fraction=0.5" in result.output and "evict (control)" in result.output


def test_one_strategy_in_detail(run):
    result = run("strategies", "streaming_llm")
    assert "sinks=4" in result.output and "arXiv:2309.17453" in result.output and "evict" in result.output
    assert "budget     none" in run("strategies", "full").output


def test_tasks_list_and_detail(run, monkeypatch, tmp_path):
    result = run("tasks")
    assert result.exit_code == 0
    for name in ("piqa", "boolq", "kvacc_mini_copa", "kvacc_passkey"):
        assert name in result.output
    assert "hub: not reachable" in result.output and result.output.count("not reachable: HF_HUB_OFFLINE") == 1
    (tmp_path / "piqa").mkdir()
    (tmp_path / "piqa" / "validation.jsonl").write_text("")
    assert "folder" in run("tasks", "piqa", "--data-dir", str(tmp_path)).output
    monkeypatch.setenv("KVACC_DATA_DIR", str(tmp_path))
    assert "not reachable" not in run("tasks", "piqa").output


def test_unknown_task(run):
    assert_mistake(run("tasks", "pica"), "unknown task 'pica'", "did you mean 'piqa'")


def test_models_list_and_unknown_alias(run):
    result = run("models", "list")
    assert "smollm2-135m" in result.output and "meta-llama/Llama-3.1-8B" in result.output
    assert_mistake(run("models", "path", "smollm2-136m"), "did you mean 'smollm2-135m'")


def test_models_path_prints_only_the_folder(run, monkeypatch, tmp_path):
    from kvacc import embedded_model

    monkeypatch.setattr(embedded_model, "checkpoint", lambda model: tmp_path / model.alias)
    assert run("models", "path", "smollm2-135m").stdout == f"{tmp_path / 'smollm2-135m'}\n"


def test_doctor_as_table_and_json(run):
    table = run("doctor")
    findings = json.loads(run("doctor", "--json").stdout)
    whats = {finding["what"] for finding in findings}
    assert {"kvacc", "torch", "flash-attn", "Hugging Face hub", "lm-eval backend kvacc"} <= whats
    for what in whats:
        assert what in table.output


def test_doctor_fails_when_something_is_wrong(run, tmp_path):
    result = run("doctor", "--data-dir", str(tmp_path / "missing"))
    assert result.exit_code == 1 and "is not a folder" in result.output
