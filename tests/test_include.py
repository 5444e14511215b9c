"""Strategies from a user's file: found, stamped with the file's hash, mistakes in one line."""

from __future__ import annotations

import hashlib

import pytest

from kvacc.config import config_from, load_config, plan_cells
from kvacc.errors import KvaccError
from kvacc.include import include
from kvacc.strategy import make_strategy, strategy_classes

STRATEGY = """\
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvacc.strategy import EvictStrategy


@dataclass(frozen=True)
class Mine(EvictStrategy):
    \"\"\"Keep what was attended to.\"\"\"

    name: ClassVar[str] = "mine"
    summary: ClassVar[str] = "a strategy of my own"
    source: ClassVar[str] = "none"

    strength: float = 1.0
    mode: str = "soft"

    def observe(self, scores, attention):
        return scores + self.strength * attention.mean(2)
"""

CONFIG = """\
include: mine.py
models: [tiny]
strategies: [full, {name: mine, budget: 0.5, strength: 2.0}]
tasks: [kvacc_mini_copa]
"""


@pytest.fixture(autouse=True)
def only_kvaccs_own_strategies(monkeypatch):
    monkeypatch.setattr("kvacc.strategy._INCLUDED", {})
    monkeypatch.delenv("KVACC_DATA_DIR", raising=False)


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "mine.py"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def error_of(*paths) -> str:
    before = set(strategy_classes())
    with pytest.raises(KvaccError) as caught:
        include(*paths)
    assert set(strategy_classes()) == before, "a file that is at fault registers nothing"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_adds_its_strategy(write):
    path = write(STRATEGY)
    (cls,) = include(path)
    assert strategy_classes()["mine"] is cls
    assert cls.file_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    strategy = make_strategy("mine", 0.5, strength=3.0)
    assert strategy.options() == {"strength": 3.0, "mode": "soft"}
    assert list(strategy_classes())[-1] == "mine"
    assert make_strategy("h2o", 0.5).file_sha256 is None


def test_the_same_file_again_and_an_edited_one(write):
    first = include(write(STRATEGY))[0]
    assert include(write(STRATEGY))[0].file_sha256 == first.file_sha256
    edited = include(write(STRATEGY.replace("mean", "amax")))[0]
    assert strategy_classes()["mine"] is edited and edited.file_sha256 != first.file_sha256


def test_one_file_may_define_several_and_use_kvaccs_own(write):
    text = STRATEGY.replace("EvictStrategy\n\n", "EvictStrategy\nfrom kvacc.strategies.h2o import H2O\n\n", 1)
    text += '\n\n@dataclass(frozen=True)\nclass Other(H2O):\n    name: ClassVar[str] = "other"\n'
    assert [cls.name for cls in include(write(text))] == ["mine", "other"]
    assert make_strategy("other", 4).recent_fraction == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "defines no strategy: write a subclass of kvacc.strategy.EvictStrategy"),
        ("import kvacc.strategies.h2o\nfrom kvacc.strategies.h2o import H2O\n", "defines no strategy"),
        (STRATEGY.replace('    name: ClassVar[str] = "mine"\n', ""), "class Mine has no name"),
        (STRATEGY.replace('"mine"', '"h2o"'), "class Mine is named 'h2o' like a strategy of kvacc"),
        (STRATEGY.replace("return scores", "return return"), "mine.py:21: SyntaxError: invalid syntax; mend"),
        (STRATEGY.replace("    mode", "   mode"), "mine.py:18: IndentationError: unindent does not match"),
        ("x = 1\ny = x + z\n", "mine.py:2: NameError: name 'z' is not defined; mend"),
        ("import missing_module_of_mine\n", "mine.py:1: ModuleNotFoundError: No module named"),
        ("raise SystemExit(3)\n", "mine.py:1: SystemExit: 3"),
        (STRATEGY.replace("@dataclass(frozen=True)\n", ""), "write @dataclass(frozen=True) above the class"),
        (STRATEGY.replace("(frozen=True)", ""), "cannot inherit non-frozen dataclass from a frozen one"),
        ("\x00", "mine.py:1: "),
    ],
)
def test_mistakes_in_a_file(write, text, message):
    path = write(text)
    found = error_of(path)
    assert message in found and str(path.name) in found


def test_missing_files(write, tmp_path):
    write(STRATEGY, "my_strategy.py")
    assert "did you mean 'my_strategy.py'" in error_of(tmp_path / "my_stratgy.py")
    assert "is a folder" in error_of(tmp_path)


def test_two_files_with_one_name(write):
    one, two = write(STRATEGY), write(STRATEGY.replace("Mine", "Yours"), "two.py")
    assert "class Yours is named 'mine' like Mine of" in error_of(one, two)
    assert [cls.__name__ for cls in include(one, one)] == ["Mine"]


def test_a_configuration_includes_files_relative_to_itself(write, tmp_path, monkeypatch):
    path = write(STRATEGY)
    config = write(CONFIG, "trial.yaml")
    monkeypatch.chdir("/")
    loaded = load_config(config)
    assert loaded.include == [str(path)]
    assert loaded.strategies[1].strategies()[0].strength == 2.0
    cells = plan_cells(loaded)
    options = cells[1].asked()["options"]
    assert options["file_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert "file_sha256" not in cells[0].asked()["options"]


def test_an_edited_file_gives_other_cells_and_leaves_the_rest(write, tmp_path):
    write(STRATEGY)
    config = write(CONFIG, "trial.yaml")
    before = [cell.cell_id for cell in plan_cells(load_config(config))]
    assert [cell.cell_id for cell in plan_cells(load_config(config))] == before
    write(STRATEGY + "\n# another remark\n")
    after = [cell.cell_id for cell in plan_cells(load_config(config))]
    assert after[0] == before[0] and after[1] != before[1]


def test_files_named_on_the_command_line(write, tmp_path, monkeypatch):
    write(STRATEGY)
    config = write(CONFIG.replace("include: mine.py\n", ""), "trial.yaml")
    with pytest.raises(KvaccError, match="unknown strategy 'mine'"):
        load_config(config)
    monkeypatch.chdir(tmp_path)
    loaded = load_config(config, include=["mine.py", "mine.py"])
    assert loaded.include == [str(tmp_path / "mine.py")]
    monkeypatch.chdir("/")
    with pytest.raises(KvaccError, match=r"^--include mine.py: include.0: no strategy file '/?mine.py'"):
        load_config(config, include=["mine.py"])


def test_mistakes_in_a_configurations_include(write, tmp_path):
    config = write(CONFIG, "trial.yaml")
    with pytest.raises(KvaccError) as caught:
        load_config(config)
    assert str(caught.value).startswith(f"{config}:1:") and "no strategy file" in str(caught.value)
    assert "\n" not in str(caught.value)  # what follows from it is not said beside it
    with pytest.raises(KvaccError, match="include.0: 3 is refused"):
        config_from({"models": ["tiny"], "strategies": ["full"], "include": [3]})


def test_options_of_an_included_strategy_are_typed(write):
    include(write(STRATEGY))
    base = {"models": ["tiny"], "tasks": ["kvacc_mini_copa"]}
    with pytest.raises(KvaccError, match="strategies.0: 'much' is refused"):
        config_from({**base, "strategies": [{"name": "mine", "budget": 2, "strength": "much"}]})
    with pytest.raises(KvaccError, match="has no option 'strenght' .did you mean 'strength'"):
        config_from({**base, "strategies": [{"name": "mine", "budget": 2, "strenght": 1.0}]})
    # Edited in the same process: its options are the new ones.
    include(write(STRATEGY.replace('mode: str = "soft"', "mode: int = 3")))
    config_from({**base, "strategies": [{"name": "mine", "budget": 2, "mode": 4}]})


def test_cells_of_kvaccs_own_strategies_keep_their_ids():
    # A published cell: its id must not change when strategies of other origins become possible.
    import json
    from pathlib import Path

    cells = Path(__file__).parent.parent / "leaderboard" / "paper" / "runs" / "cells"
    for file in sorted(cells.glob("*/cell.json"))[:20]:
        cell = json.loads(file.read_text())
        assert "file_sha256" not in cell["spec"]["options"]
        text = {**cell["spec"], "source": cell["task"]["source"]}
        digest = hashlib.sha256(json.dumps(text, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        assert digest[:16] == file.parent.name
