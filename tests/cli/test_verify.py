"""``kvacc verify`` and ``--include`` on the command line."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvacc import verify
from kvacc.cli import cli

MUTANTS = Path(__file__).parent.parent / "verify" / "mutants.py"
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "decayed_attention.py"


@pytest.fixture(autouse=True)
def only_kvaccs_own_strategies(monkeypatch):
    monkeypatch.setattr("kvacc.strategy._INCLUDED", {})


@pytest.fixture(autouse=True)
def one_model_and_budget(monkeypatch):
    """Every model and budget is tried in tests/verify."""
    monkeypatch.setattr(verify, "tiny_subjects", lambda layers: [verify.tiny_subject("llama", layers)])
    quick = functools.partial(verify.verify_strategy, thorough=False)
    monkeypatch.setattr(verify, "verify_strategy", quick)


def kvacc(*words):
    return CliRunner().invoke(cli, [str(word) for word in words])


def assert_mistake(result, *parts):
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    for part in parts:
        assert part in result.stderr


def test_what_holds():
    result = kvacc("verify", "h2o")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("h2o ") and "recent_fraction=0.5" in lines[0] and lines[0].endswith("on tiny llama")
    for number, title in verify.INVARIANTS.items():
        assert any(f" {number} " in line and title in line and "holds" in line for line in lines)
    assert "10 hold" in lines[-1]


def test_what_fails_is_shown_with_its_place_and_both_values():
    result = kvacc("verify", "one_too_many", "--include", MUTANTS)
    assert result.exit_code == 1
    assert "4. the budget holds" in result.stdout
    shown = result.stdout[result.stdout.index("Smallest failing cases") :]
    for part in ("tiny llama, stream, budget 3, 8 tokens", "layer 0, KV head 0, position 4", "entries read"):
        assert part in shown
    assert "expected  at most 3 kept, 1 new" in shown and "found     0-4 (5)" in shown
    assert "1 of 10 fail: 4" in shown and result.stderr == ""


def test_an_exception_is_told_once():
    result = kvacc("verify", "raises", "--include", MUTANTS)
    assert result.exit_code == 1 and "10 of 10 fail" in result.stdout
    assert result.stdout.count("found     RuntimeError") == 1
    assert "RuntimeError as in 8" in result.stdout


def test_a_simulation_is_reported_as_it_is():
    result = kvacc("verify", "h2o", "--option", "scores=global")
    assert result.exit_code == 1
    assert "not applicable" in result.stdout and "no step path" in result.stdout
    assert "says of itself that it is not causal" in result.stdout
    assert "2 of 10 fail: 1, 2" in result.stdout


def test_what_does_not_apply_is_no_failure():
    result = kvacc("verify", "full")
    assert result.exit_code == 0 and "8 hold, 2 do not apply" in result.stdout


def test_options_budgets_and_lengths(monkeypatch):
    asked = {}

    def spy(strategy, subjects, budgets, tokens, progress):
        asked.update(strategy=strategy, budgets=budgets, tokens=tokens)
        return verify.Report("x", (), (), (), acted=True, seconds=0.0)

    monkeypatch.setattr(verify, "verify_strategy", spy)
    words = ["--option", "half_life=4", "--option", "recent=2", "--budget", "5", "--budget", "20%", "--tokens", "40"]
    result = kvacc("verify", "decayed_attention", "--include", EXAMPLE, *words)
    assert result.exit_code == 0, result.output
    assert asked["strategy"].options() == {"half_life": 4.0, "recent": 2}
    assert asked["budgets"] == ("5", "20%") and asked["tokens"] == 40


def test_a_strategy_that_cannot_act_is_not_passed():
    result = kvacc("verify", "recent", "--budget", "1000")
    assert result.exit_code == 2
    assert "recent hid no entry in any of these runs" in result.stderr and "--budget" in result.stderr
    assert "10 hold" in result.stdout


def test_a_model_that_refuses_the_strategy(monkeypatch):
    monkeypatch.setattr(
        verify, "tiny_subjects", lambda layers: [verify.tiny_subject(name, layers) for name in ("llama", "opt")]
    )
    result = kvacc("verify", "streaming_llm", "--budget", "6")
    assert result.exit_code == 0, result.output
    assert "not run on tiny opt: model family 'opt' has no rotary positions" in result.stdout
    monkeypatch.setattr(verify, "tiny_subjects", lambda layers: [verify.tiny_subject("opt", layers)])
    assert_mistake(kvacc("verify", "streaming_llm"), "no rotary positions", "positions=original")


def test_a_model_by_folder(tiny_folder):
    result = kvacc("verify", "recent", "--model", tiny_folder)
    assert result.exit_code == 0, result.output
    assert f"on {tiny_folder.name}" in result.stdout


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["h20"], ["unknown strategy 'h20'", "did you mean 'h2o'"]),
        (["h2o", "--option", "recent_fractoin=1"], ["has no option 'recent_fractoin'", "recent_fraction"]),
        (["h2o", "--option", "recent_fraction=2"], ["recent_fraction 2.0 is not between 0 and 1"]),
        (["h2o", "--option", "recent_fraction=some"], ["'some' is refused"]),
        (["h2o", "--option", "recent_fraction"], ["--option 'recent_fraction'", "NAME=VALUE"]),
        (["h2o", "--option", "budget=3"], ["'budget' is no option of strategy 'h2o'"]),
        (["h2o", "--option", "scores=["], ["scores", "["]),
        (["h2o", "--budget", "0"], ["budget 0 keeps nothing"]),
        (["streaming_llm", "--budget", "3"], ["fewer than 4 sinks + 1 recent"]),
        (["h2o", "--model", "./nowhere"], ["there is no such folder"]),
        (["mine", "--include", "nowhere.py"], ["no strategy file 'nowhere.py'"]),
        (["h2o", "--tokens", "3"], ["3", "8"]),
    ],
)
def test_mistakes(words, parts):
    assert_mistake(kvacc("verify", *words), *parts)


def test_a_broken_file_is_one_line(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("from kvacc.strategy import EvictStrategy\nclass A(EvictStrategy:\n")
    for command in (["verify", "a"], ["strategies"], ["run", "quickstart"], ["lm-eval", "ls"]):
        result = kvacc(*command[:1], "--include", path, *command[1:])
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1 and "broken.py:2: SyntaxError" in result.stderr


def test_included_strategies_are_listed_and_shown():
    result = kvacc("strategies", "--include", EXAMPLE)
    assert result.exit_code == 0 and "decayed_attention" in result.stdout and "h2o" in result.stdout
    result = kvacc("strategies", "decayed_attention", "--include", EXAMPLE)
    assert result.exit_code == 0 and "half_life=32.0" in result.stdout


def test_include_is_taken_from_lm_evals_arguments():
    from kvacc.cli.lm_eval import take_included
    from kvacc.errors import KvaccError

    words = ["run", "--include", "a.py", "--include_path", "tasks", "--include=b.py", "--tasks", "piqa"]
    assert take_included(words) == (["run", "--include_path", "tasks", "--tasks", "piqa"], ["a.py", "b.py"])
    with pytest.raises(KvaccError, match="--include needs a Python file"):
        take_included(["run", "--include", "--tasks"])
