"""``kvacc check``: verdicts worked out by hand, its outputs, and what it compares with what."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from gate.cells import make_cell, write_run

from kvacc.cli import cli

ALL = [1] * 40


def kvacc(*words):
    return CliRunner().invoke(cli, [str(word) for word in words])


def make_baseline(tmp_path, *cells):
    write_run(tmp_path / "before", *cells)
    made = kvacc("baseline", "create", "before", "--output", "base.json", "--reason", "first")
    assert made.exit_code == 0, made.output


def check(*words):
    return kvacc("check", "--baseline", "base.json", "--results", "now", *words)


def lose(count, items=40, gained=0):
    """``count`` of the items wrong."""
    return [0] * count + [1] * (items - count)


# --- verdicts ----------------------------------------------------------------------------


def test_nothing_changed_passes_whatever_the_number_of_items(tmp_path):
    make_baseline(tmp_path, make_cell([1, 0, 1]))
    write_run(tmp_path / "now", make_cell([1, 0, 1], shift=5e-5))
    result = check("--margin", "0.1")
    assert result.exit_code == 0, result.output
    assert "piqa 0-shot: acc 66.7, unchanged" in result.stdout


def test_no_flip_but_other_log_likelihoods_is_a_sample(tmp_path):
    """40 items without a flip: a drop of up to 6.4 points cannot be excluded; 268 items would do."""
    make_baseline(tmp_path, make_cell(ALL))
    write_run(tmp_path / "now", make_cell(ALL, shift=0.01))
    result = check()
    assert result.exit_code == 3, result.output
    assert "too few items to tell at a margin of 1.0 points" in result.stdout
    assert "about 268 items would do if nothing is lost; 40 were there" in result.stdout
    assert check("--margin", "8").exit_code == 0
    assert check("--noise", "0.02").exit_code == 0
    assert check("--inconclusive", "pass").exit_code == 0
    assert check("--inconclusive", "fail").exit_code == 1


def test_a_large_drop_fails(tmp_path):
    """12 of 40 lost: exact p is below 2^-12 for no difference, and small for a margin of a point."""
    make_baseline(tmp_path, make_cell(ALL))
    write_run(tmp_path / "now", make_cell(lose(12), shift=0.1))
    result = check()
    assert result.exit_code == 1, result.output
    assert "acc 100.0 -> 70.0, drop +30.0" in result.stdout
    assert "12 items lost, 0 gained of 40" in result.stdout
    assert "kvacc check FAILED: 1 FAILED (margin 1 points, 95 % confidence)" in result.stdout


def test_a_drop_within_the_margin_does_not_fail(tmp_path):
    """30 points lost, 50 allowed."""
    make_baseline(tmp_path, make_cell(ALL))
    write_run(tmp_path / "now", make_cell(lose(12), shift=0.1))
    assert check("--margin", "50").exit_code == 0


def test_a_gain_is_no_loss(tmp_path):
    make_baseline(tmp_path, make_cell(lose(30)))
    write_run(tmp_path / "now", make_cell(lose(10), shift=0.1))
    assert check().exit_code == 0


MANY = ["copa", "boolq", "winogrande", "hellaswag", "openbookqa", "kvacc_mini_copa", "kvacc_mini_piqa"]


def test_many_cells_make_one_drop_less_telling(tmp_path):
    """7 of 40 lost has p = 1/128 for no difference: of eight cells that changed one does by chance (Holm)."""
    one_way, other_way = [0] * 6 + [1] * 34, [1] * 6 + [0] * 6 + [1] * 28
    make_baseline(tmp_path, make_cell(ALL), *[make_cell(one_way, task=task) for task in MANY])
    changed = [make_cell(other_way, task=task, shift=0.1) for task in MANY]
    write_run(tmp_path / "now", make_cell(lose(7), shift=0.1), *changed)
    assert check().exit_code == 3


def test_unchanged_cells_do_not_hide_a_drop(tmp_path):
    make_baseline(tmp_path, make_cell(ALL), *[make_cell(ALL, task=task) for task in MANY])
    write_run(tmp_path / "now", make_cell(lose(7), shift=0.1), *[make_cell(ALL, task=task) for task in MANY])
    assert check().exit_code == 1


def test_items_of_one_text_count_as_one(tmp_path):
    """8 of 40 lost, all about one text: no proof of anything."""
    texts = [f"text{i // 8}" for i in range(40)]
    make_baseline(tmp_path, make_cell(ALL, clusters=texts))
    write_run(tmp_path / "now", make_cell(lose(8), shift=0.1, clusters=texts))
    assert check().exit_code == 3
    write_run(tmp_path / "free", make_cell(ALL))
    kvacc("baseline", "create", "free", "--output", "free.json", "--reason", "x")
    write_run(tmp_path / "later", make_cell(lose(8), shift=0.1))
    assert kvacc("check", "--baseline", "free.json", "--results", "later").exit_code == 1


# --- retention ---------------------------------------------------------------------------

DEPTHS = [10] * 16 + [50] * 16 + [90] * 16
WRONG_IN_THE_MIDDLE = [1] * 16 + [0] * 12 + [1] * 4 + [1] * 16


def retention(correct, task, **changes):
    return make_cell(correct, task=task, kind="retention", depths=DEPTHS, **changes)


def test_a_failure_names_the_task_and_the_depth(tmp_path):
    right = [1] * 48
    make_baseline(tmp_path, retention(right, "kvacc_passkey"), retention(right, "kvacc_keyvalue"))
    now = retention(WRONG_IN_THE_MIDDLE, "kvacc_passkey", shift=0.1), retention(right, "kvacc_keyvalue")
    write_run(tmp_path / "now", *now)
    result = check()
    assert result.exit_code == 1
    assert "kvacc_passkey 0-shot: acc 100.0 -> 75.0" in result.stdout
    assert "most at depth 50 %: 12 of 16 items lost" in result.stdout
    # The score of both tasks: (75 + 100) / 2.
    assert "retention score 0-shot: average 100.0 -> 87.5" in result.stdout
    assert "most at kvacc_passkey, depth 50 %: 12 of 16 items lost" in result.stdout


def test_the_retention_score_adds_up_what_single_tasks_cannot_show(tmp_path):
    """5 of 48 lost on each of four tasks: p = 1/32 alone, but the average is beyond chance."""
    tasks = ["kvacc_passkey", "kvacc_keyvalue", "kvacc_passkey_generate", "kvacc_keyvalue_generate"]
    make_baseline(tmp_path, *[retention([1] * 48, task) for task in tasks])
    write_run(tmp_path / "now", *[retention(lose(5, 48), task, shift=0.1) for task in tasks])
    result = check("--json", "report.json")
    assert result.exit_code == 1
    checks = json.loads((tmp_path / "report.json").read_text())["checks"]
    assert [one["what"] for one in checks if one["verdict"] == "fail"] == ["retention score"]


# --- fidelity ----------------------------------------------------------------------------


def test_fidelity_sees_what_answers_do_not(tmp_path):
    make_baseline(tmp_path, make_cell(ALL, kl=[0.01] * 40, agreement=[0.99] * 40))
    now = make_cell(
        ALL,
        shift=0.001,
        kl=[0.05 + i / 4000 for i in range(40)],
        agreement=[0.9 + i / 4000 for i in range(40)],
    )
    write_run(tmp_path / "now", now)
    loose = ("--margin", "8")
    assert check(*loose).exit_code == 0
    failed = check(*loose, "--max-kl", "0.04")
    assert failed.exit_code == 1 and "kl against full 0.0549" in failed.stdout
    assert check(*loose, "--max-kl", "0.06").exit_code == 0
    assert check(*loose, "--min-agreement", "0.95").exit_code == 1
    assert check(*loose, "--min-agreement", "0.85").exit_code == 0
    assert check(*loose, "--kl-margin", "0.01").exit_code == 1
    assert check(*loose, "--kl-margin", "0.1").exit_code == 0
    assert check(*loose, "--agreement-margin", "2").exit_code == 1
    assert check(*loose, "--agreement-margin", "20").exit_code == 0


# --- what is compared with what ----------------------------------------------------------


def test_another_strategy_can_stand_in(tmp_path):
    make_baseline(tmp_path, make_cell(ALL, strategy="full"), make_cell(ALL, options={"recent_fraction": 0.5}))
    full = make_cell(ALL, strategy="full")
    mine = make_cell(lose(20), strategy="mine", options={"file_sha256": "0" * 64}, shift=0.1)
    write_run(tmp_path / "now", full, mine)
    assert check().exit_code == 2  # h2o is missing, and mine is new
    result = check("--compare-as", "mine=h2o")
    assert result.exit_code == 1
    assert "mine 0.2 stream piqa" in result.stdout and "mine stands in for h2o" in result.stdout


def test_an_edited_strategy_file_is_what_a_gate_is_for(tmp_path):
    make_baseline(tmp_path, make_cell(ALL, strategy="mine", options={"file_sha256": "a" * 64}))
    write_run(
        tmp_path / "now", make_cell(lose(20), strategy="mine", options={"file_sha256": "b" * 64}, shift=0.1)
    )
    assert check().exit_code == 1


def test_new_cells_are_told_when_allowed(tmp_path):
    make_baseline(tmp_path, make_cell(ALL))
    write_run(tmp_path / "now", make_cell(ALL), make_cell(ALL, task="copa"))
    result = check("--allow-new")
    assert result.exit_code == 0
    assert "not judged     tiny h2o 0.2 stream copa 0-shot: not in the baseline" in result.stdout


def test_generated_answers_count_as_unchanged_only_when_they_are(tmp_path):
    make_baseline(tmp_path, make_cell(ALL, response="one"))
    write_run(tmp_path / "now", make_cell(ALL, response="one"))
    write_run(tmp_path / "other", make_cell(ALL, response="two"))
    assert "unchanged" in check().stdout
    assert kvacc("check", "--baseline", "base.json", "--results", "other").exit_code == 3


def test_another_environment_is_told(tmp_path):
    make_baseline(tmp_path, make_cell(ALL))
    write_run(tmp_path / "now", make_cell(ALL, torch="2.14"))
    result = check()
    assert result.exit_code == 0 and "torch 2.14 here, 2.13 in the baseline" in result.stdout


def test_a_baseline_at_chance_is_told(tmp_path):
    """10 of 40 right, by chance 10: it could lose nothing. 25 of 40 could."""
    make_baseline(tmp_path, make_cell(lose(30)), make_cell(lose(15), task="copa"))
    write_run(tmp_path / "now", make_cell(lose(30)), make_cell(lose(15), task="copa"))
    notes = [line for line in check().stdout.splitlines() if line.startswith("note")]
    assert notes == [
        "note           tiny h2o 0.2 stream piqa 0-shot: the baseline, 25.0, cannot be told from chance, 25.0: "
        "no loss can show there"
    ]


# --- outputs -----------------------------------------------------------------------------


@pytest.fixture
def failing(tmp_path):
    """Three cells: one fails, one has too few items, one is unchanged."""
    names = ("piqa", "copa", "boolq")
    make_baseline(tmp_path, *[make_cell(ALL, task=task) for task in names])
    now = make_cell(lose(20), task="piqa", shift=0.1), make_cell(ALL, task="copa", shift=0.1)
    write_run(tmp_path / "now", *now, make_cell(ALL, task="boolq"))
    return tmp_path


def test_junit(failing):
    assert check("--junit", "out/junit.xml").exit_code == 1
    root = ElementTree.parse(failing / "out" / "junit.xml").getroot()
    suite = root.find("testsuite")
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "3", "failures": "1", "errors": "0", "skipped": "1",
    }  # fmt: skip
    cases = {case.get("classname"): case for case in suite}
    failure = cases["kvacc.piqa"].find("failure")
    assert failure.get("type") == "AccuracyRegression" and "50.0" in failure.get("message")
    assert "268 items" in cases["kvacc.copa"].find("skipped").get("message")
    assert [child.tag for child in cases["kvacc.boolq"]] == ["properties"]
    numbers = {one.get("name"): one.get("value") for one in cases["kvacc.piqa"].iter("property")}
    assert (numbers["drop"], numbers["lost"], numbers["items"]) == ("50.0", "20", "40")


def test_markdown_goes_to_the_step_summary(failing, monkeypatch):
    (failing / "summary.md").write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(failing / "summary.md"))
    check()
    text = (failing / "summary.md").read_text()
    assert text.startswith("before\n### kvacc check FAILED: 1 passed, 1 FAILED, 1 too few items to tell")
    assert "| ❌ | piqa | h2o 0.2 stream | acc | 100.0 | 50.0 | +50.0 |" in text
    assert "| ✅ | boolq | h2o 0.2 stream | acc | 100.0 | 100.0 | unchanged | unchanged |" in text
    check("--summary", "own.md")
    assert (failing / "summary.md").read_text() == text  # a file of one's own instead
    assert (failing / "own.md").read_text() == text.removeprefix("before\n")


def test_annotations_only_where_they_are_understood(failing, monkeypatch):
    assert "::error" not in check().stdout
    assert "::error" in check("--annotations", "github").stdout
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    lines = check().stdout.splitlines()
    assert [line.split("::")[1].split(" ")[0] for line in lines if line.startswith("::")] == [
        "error",
        "warning",
    ]
    assert next(line for line in lines if line.startswith("::error title=kvacc check%3A piqa::"))
    assert "::error" not in check("--annotations", "none").stdout


def test_json_holds_what_a_program_needs(failing):
    check("--json", "report.json")
    report = json.loads((failing / "report.json").read_text())
    assert (report["verdict"], report["exit_code"], report["margin"]) == ("fail", 1, 0.01)
    worst = report["checks"][0]
    assert (worst["task"], worst["verdict"], worst["drop"], worst["limit"]) == ("piqa", "fail", 50.0, 1.0)
    # The others have no item that changed, so they could not fail and do not count.
    assert worst["p_beyond_adjusted"] == worst["p_beyond"]


def test_the_same_inputs_give_the_same_bytes(failing):
    for name in ("one", "two"):
        check("--json", f"{name}.json", "--junit", f"{name}.xml", "--summary", f"{name}.md")
    for kind in ("json", "xml", "md"):
        assert (failing / f"one.{kind}").read_bytes() == (failing / f"two.{kind}").read_bytes()
