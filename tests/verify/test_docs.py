"""docs/write-a-strategy.md: every command and every piece of code in it works as it stands."""

from __future__ import annotations

import functools
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from kvacc import verify
from kvacc.cli import cli

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "write-a-strategy.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines() if line.strip()]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("KVACC_DATA_DIR", raising=False)


@pytest.fixture
def one_model_and_budget(monkeypatch):
    """Every model and budget is tried in test_strategies.py."""
    monkeypatch.setattr(verify, "tiny_subjects", lambda layers: [verify.tiny_subject("llama", layers)])
    monkeypatch.setattr(verify, "verify_strategy", functools.partial(verify.verify_strategy, thorough=False))


def run(command: str, tmp_path: Path, model: Path | None = None):
    """The command, with its results in a folder of the test, and with another model."""
    words = shlex.split(command)
    assert words.pop(0) == "kvacc"
    words = [str(tmp_path / word) if word.startswith("runs/") else word for word in words]
    if model is not None and words[0] == "run":
        # One short task: the slow tests run the commands as they stand.
        words += [
            "--set",
            f"models=[{json.dumps(str(model))}]",
            "--set",
            "tasks=[kvacc_mini_copa]",
            "--limit",
            "1",
        ]
    if model is not None:
        words = [word.replace("smollm2-135m", str(model)) for word in words]
    return CliRunner().invoke(cli, words)


def test_the_page_has_a_command_for_each_step():
    said = [command.split()[1] for command in COMMANDS]
    assert said == ["strategies", "strategies", "verify", "verify", "run", "leaderboard", "run", "lm-eval"]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.split()[1] in ("strategies", "verify")])
def test_listing_and_verifying(command, tmp_path, one_model_and_budget):
    result = run(command, tmp_path)
    assert result.exit_code == 0, result.output
    assert "decayed_attention" in result.stdout
    if "verify" in command:
        assert "10 hold" in result.stdout


def test_running_beside_h2o(tmp_path, tiny_folder):
    sweep, board, other = (c for c in COMMANDS if c.split()[1] in ("run", "leaderboard"))
    result = run(sweep, tmp_path, tiny_folder)
    assert result.exit_code == 0, result.output
    cells = [json.loads(path.read_text()) for path in (tmp_path / "runs" / "decayed").rglob("cell.json")]
    mine = [cell for cell in cells if cell["spec"]["strategy"] == "decayed_attention"]
    assert len(mine) == 2 and all(len(cell["spec"]["options"]["file_sha256"]) == 64 for cell in mine)
    again = run(sweep, tmp_path, tiny_folder)
    assert "6 of 6 cells are finished already" in again.stderr
    result = run(board, tmp_path, tiny_folder)
    assert result.exit_code == 0 and "decayed_attention" in result.stdout and "h2o" in result.stdout
    result = run(other, tmp_path, tiny_folder)
    assert result.exit_code == 0, result.output
    assert "decayed_attention" in result.stdout


@pytest.mark.slow
def test_lm_evals_command_line(tmp_path, tiny_folder):
    (command,) = (c for c in COMMANDS if c.split()[1] == "lm-eval")
    result = run(command, tmp_path, tiny_folder)
    assert result.exit_code == 0, result.output


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in COMMANDS if c.split()[1] == "run"])
def test_the_commands_with_the_model_that_they_name(command, tmp_path, smollm2_folder):
    result = run(command, tmp_path)
    assert result.exit_code == 0, result.output


def test_the_code_is_the_example(tmp_path):
    """Without its checks of options the example is what the page shows."""
    from kvacc.include import include
    from kvacc.strategy import make_strategy
    from kvacc.verify.bench import Bench
    from kvacc.verify.runs import first_difference

    shown = tmp_path / "shown.py"
    shown.write_text(blocks("python")[0])
    found = []
    for file in (shown, ROOT / "examples" / "decayed_attention.py"):
        include(file)
        strategy = make_strategy("decayed_attention", 6)
        bench = Bench(verify.tiny_subject("llama"), strategy, [6])
        found.append((strategy.options(), bench.parallel(bench.main_case)))
    (one_options, one), (other_options, other) = found
    assert one_options == other_options
    assert one.hides and first_difference(one, other, 0.0) is None


def test_the_python_code_runs(one_model_and_budget):
    namespace = {}
    exec(blocks("python")[1], namespace)
    assert namespace["report"].acted


def test_the_configuration_shown_is_part_of_the_example():
    shown = yaml.safe_load(blocks("yaml")[0])
    example = yaml.safe_load((ROOT / "examples" / "decayed_attention.yaml").read_text())
    for key, value in shown.items():
        assert example[key] == value if key != "strategies" else all(entry in example[key] for entry in value)


def test_the_invariants_are_those_of_the_command():
    for number, title in verify.INVARIANTS.items():
        assert f"| {number} | {title} |" in PAGE


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target


@pytest.mark.parametrize(
    ("option", "message"),
    [("half_life=0", "half_life 0.0 is not above 0"), ("recent=-1", "recent -1 is below 0")],
)
def test_the_example_checks_its_options(option, message):
    words = ["verify", "decayed_attention", "--include", "examples/decayed_attention.py", "--option", option]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2 and message in result.stderr
