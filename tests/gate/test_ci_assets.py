"""The commands in the CI examples are commands that kvacc has, and the action's script does what it says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from gate.cells import make_cell, write_run

from kvacc.cli import COMMANDS, cli
from kvacc.gate.baseline import make_baseline, write_baseline

ROOT = Path(__file__).parent.parent.parent
ACTION = ROOT / ".github" / "actions" / "kvacc-check" / "action.yml"
WORKFLOW = ROOT / ".github" / "workflows" / "kvacc-check.yml"
DOCUMENT = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")


def documented_commands():
    """Every line of the document's code blocks that runs kvacc."""
    blocks = re.findall(r"```(?:sh|yaml)\n(.*?)```", DOCUMENT, re.DOTALL)
    lines = [line.strip().removeprefix("- ") for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("kvacc ")]


def parse(words):
    """Parse a command line as click would, without running it."""
    command, name = cli, "kvacc"
    while True:
        context = command.make_context(name, list(words), resilient_parsing=False)
        if not hasattr(command, "resolve_command"):
            return context
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])


def test_the_document_has_commands():
    assert len(documented_commands()) >= 9


@pytest.mark.parametrize("line", documented_commands())
def test_documented_commands_parse(line):
    words = shlex.split(line)[1:]
    assert words[0] in COMMANDS
    parse(words)


def test_documented_fixture_is_python():
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    compile(block, "docs/ci.md", "exec")


def test_what_the_document_and_the_workflow_give_the_action_it_takes():
    inputs = yaml.safe_load(ACTION.read_text())["inputs"]
    required = {name for name, about in inputs.items() if about.get("required")}
    workflow = yaml.safe_load(WORKFLOW.read_text())
    steps = list(workflow["jobs"]["accuracy"]["steps"])
    (block,) = [one for one in re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL) if "uses: OWNER" in one]
    steps += yaml.safe_load(block)
    used = [step["with"] for step in steps if "kvacc-check" in step.get("uses", "")]
    assert len(used) == 2
    for given in used:
        assert required <= set(given) <= set(inputs)


def test_files_that_the_workflow_names_exist():
    workflow = WORKFLOW.read_text()
    assert (ROOT / "configs" / "ci.yaml").is_file() and "configs/ci.yaml" in workflow
    assert (ROOT / "constraints.txt").is_file() and (ROOT / ".github/actions/kvacc-check").is_dir()


def run_action(folder, **inputs):
    """The action's last step, as a runner runs it."""
    action = yaml.safe_load(ACTION.read_text())
    defaults = {name: about.get("default", "") for name, about in action["inputs"].items()}
    step = action["runs"]["steps"][-1]
    values = {**defaults, **inputs}
    given = {
        name: values[re.fullmatch(r"\$\{\{ inputs\.([\w-]+) \}\}", text)[1]]
        for name, text in step["env"].items()
    }
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    runner = {"GITHUB_ACTIONS": "true", "GITHUB_OUTPUT": "output", "GITHUB_STEP_SUMMARY": "summary.md"}
    environment = {**os.environ, **given, **runner, "PATH": binaries}
    command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(("lost", "code"), [(20, 1), (0, 0)])
def test_the_action_ends_as_the_check_does(tmp_path, lost, code):
    write_baseline(tmp_path / "base.json", make_baseline([make_cell([1] * 40)], "first"))
    write_run(tmp_path / "run", make_cell([0] * lost + [1] * (40 - lost), shift=0.1 if lost else 0.0))
    result = run_action(tmp_path, baseline="base.json", results="run", margin="5", arguments="--allow-new\n")
    assert result.returncode == code, result.stdout + result.stderr
    assert (tmp_path / "output").read_text() == f"exit-code={code}\n"
    assert "### kvacc check" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "kvacc-check.xml").is_file() and (tmp_path / "kvacc-check.json").is_file()
    assert ("::error title=" in result.stdout) == (code == 1)


def test_no_input_is_run_as_code(tmp_path):
    write_baseline(tmp_path / "base.json", make_baseline([make_cell([1] * 4)], "first"))
    result = run_action(tmp_path, baseline="base.json", results="$(touch evil)", arguments="; touch evil")
    assert result.returncode == 2 and not (tmp_path / "evil").exists()
