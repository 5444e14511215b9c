"""What is installed: every folder with code or data, and a light ``import kvacc``."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kvacc

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAPPED = SETTINGS["tool"]["setuptools"]["package-dir"]


def test_every_package_is_listed():
    """A package that is not listed works in the repository and is missing from the wheel."""
    found = set()
    for name, folder in MAPPED.items():
        for file in (ROOT / folder).rglob("__init__.py"):
            parts = file.parent.relative_to(ROOT / folder).parts
            found.add(".".join([name, *parts]))
    assert found == set(SETTINGS["tool"]["setuptools"]["packages"])


def test_every_data_file_is_in_a_package_that_ships_its_kind():
    data = SETTINGS["tool"]["setuptools"]["package-data"]
    for name, folder in MAPPED.items():
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".yaml", ".jsonl"):
                package = ".".join([name, *file.parent.relative_to(ROOT / folder).parts])
                if name != "kvacc" or package in data:
                    assert f"*{file.suffix}" in data[package], file


def test_constraints_fit_the_ranges():
    from packaging.requirements import Requirement

    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pinned = {line.split("==")[0].lower().replace("_", "-"): line.split("==")[1] for line in lines}
    project = SETTINGS["project"]
    extras = [project["optional-dependencies"][name] for name in ("fast", "embedded", "test")]
    for text in [*project["dependencies"], *sum(extras, [])]:
        requirement = Requirement(text)
        version = pinned[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(version), text


def test_import_is_light():
    code = (
        "import sys, kvacc; heavy = {'torch', 'transformers', 'datasets', 'numpy', 'pandas'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lazy_names_resolve():
    for name in kvacc.__all__:
        assert name in dir(kvacc)
    assert kvacc.Budget.parse("20%").is_fraction
    assert kvacc.make_strategy("h2o", 0.5).name == "h2o"
    assert kvacc.load_config.__module__ == "kvacc.config.loading"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = kvacc.nonsense


@pytest.mark.parametrize("first", ["import kvacc", "import lm_eval.models, kvacc", "import kvacc, kvacc.backend"])
def test_backend_is_registered_beside_lm_evals_own(first):
    """lm-eval fills its registry only while that is empty: `hf` must not get lost."""
    code = (
        f"{first}\nfrom lm_eval.api.registry import get_model\n"
        "assert get_model('kvacc').__module__ == 'kvacc.backend'\n"
        "assert get_model('hf').__name__ == 'HFLM'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_entry_points():
    points = {(point.group, point.name): point.value for point in importlib.metadata.distribution("kvacc").entry_points}
    assert points["lm_eval.models", "kvacc"] == "kvacc.backend:KvaccLM"
    assert points["console_scripts", "kvacc"] == "kvacc.cli:main"


def test_version_is_the_installed_one():
    assert kvacc.__version__ == importlib.metadata.version("kvacc")
