"""The fixture ``kvacc_check``, in a pytest of its own; and that pytest starts without kvacc's libraries."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from gate.cells import make_cell, write_run

from kvacc.gate.baseline import make_baseline, write_baseline

TESTS = """
import pytest
from kvacc.errors import KvaccError

def test_same(kvacc_check):
    report = kvacc_check("base.json", "same")
    assert report.exit_code == 0

def test_lost(kvacc_check):
    kvacc_check("base.json", ["lost"], margin=2)

def test_few(kvacc_check):
    kvacc_check("base.json", "few")

def test_few_skipped(kvacc_check):
    kvacc_check("base.json", "few", inconclusive="skip")

def test_few_allowed(kvacc_check):
    assert kvacc_check("base.json", "few", inconclusive="pass").exit_code == 3

def test_wrong(kvacc_check):
    with pytest.raises(KvaccError, match="does not exist"):
        kvacc_check("none.json", "same")
"""


def run_pytest(folder, *words):
    command = [sys.executable, "-m", "pytest", "-p", "kvacc.pytest_plugin", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_fixture(tmp_path):
    right = [1] * 40
    write_baseline(tmp_path / "base.json", make_baseline([make_cell(right)], "first"))
    write_run(tmp_path / "same", make_cell(right))
    write_run(tmp_path / "lost", make_cell([0] * 20 + [1] * 20, shift=0.1))
    write_run(tmp_path / "few", make_cell(right, shift=0.1))
    (tmp_path / "test_gate.py").write_text(TESTS)
    result = run_pytest(tmp_path, "-rA")
    assert "2 failed, 3 passed, 1 skipped" in result.stdout, result.stdout
    assert "FAILED test_gate.py::test_lost - Failed: kvacc check FAILED" in result.stdout
    assert "20 items lost, 0 gained of 40" in result.stdout
    assert "FAILED test_gate.py::test_few - Failed: kvacc check too few items" in result.stdout


def test_pytest_starts_without_our_libraries(tmp_path):
    (tmp_path / "test_light.py").write_text(
        "import sys\n\ndef test_light():\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'pyarrow', 'scipy'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    result = run_pytest(tmp_path)
    assert result.returncode == 0, result.stdout


def test_pytest_finds_it_by_its_entry_point():
    settings = tomllib.loads((Path(__file__).parent.parent.parent / "pyproject.toml").read_text())
    assert settings["project"]["entry-points"]["pytest11"] == {"kvacc": "kvacc.pytest_plugin"}
