"""``kvacc probe`` on a tiny checkpoint folder."""

import csv
import io
import json

import pytest
from click.testing import CliRunner

from kvacc.cli import cli

CONFIG = """\
name: trial
models: [{folder}]
strategies: [full, {{name: h2o, budgets: [0.5]}}]
prompts: [24]
outputs: [3]
repeats: 2
"""


@pytest.fixture
def config(tmp_path, monkeypatch, tiny_folder):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trial.yaml"
    path.write_text(CONFIG.format(folder=tiny_folder))
    return path


def kvacc(*words):
    return CliRunner().invoke(cli, [str(word) for word in words])


def test_a_run_ends_with_its_table_and_is_not_repeated(config, tmp_path):
    result = kvacc("probe", config)
    assert result.exit_code == 0, result.output
    assert "h2o" in result.stdout and "prefill peak" in result.stdout and "50.0%" in result.stdout
    assert "[1/1]" in result.stderr and "[1/1]" not in result.stdout
    files = {path: path.read_bytes() for path in (tmp_path / "runs" / "trial").rglob("probe.json")}
    assert len(files) == 2
    again = kvacc("probe", config)
    assert again.stdout == result.stdout and "2 of 2 cases are measured already" in again.stderr
    assert files == {path: path.read_bytes() for path in files}


def test_other_formats_and_only(config):
    result = kvacc("probe", config, "--only", "memory", "--format", "json", "--output", "out")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["strategy"] for row in rows] == ["full", "h2o"]
    assert rows[1]["kv_device"] * 2 == rows[0]["kv_device"] and rows[0]["per_token"] is None
    result = kvacc("probe", config, "--only", "memory", "--format", "csv", "--output", "out")
    assert [row["kv_share"] for row in csv.DictReader(io.StringIO(result.stdout))] == ["1.0", "0.5"]
    result = kvacc("probe", config, "--only", "memory", "--format", "markdown", "--output", "out")
    assert result.stdout.startswith("# Probes\n") and "| h2o | 0.5 | serve |" in result.stdout


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--only", "latncy"], ["unknown measure 'latncy'", "did you mean 'latency'?"]),
        (["--set", "prompts=[x]"], ["--set prompts=[x]: prompts.0: 'x' is refused"]),
        (["--include", "missing.py"], ["no strategy file 'missing.py'"]),
        (["--output", "trial.yaml"], ["it is a file; choose another --output"]),
    ],
)
def test_mistakes(config, words, parts):
    result = kvacc("probe", config, *words)
    assert result.exit_code == 2, result.output
    for part in parts:
        assert part in result.stderr
    assert "Traceback" not in result.output


def test_where_no_case_can_run(config):
    result = kvacc("probe", config, "--set", "prompts=[5000]", "--only", "latency")
    assert result.exit_code == 1
    assert "none of 2 cases could run" in result.stderr
    assert "exceeds the model's 2048 positions" in result.stdout
