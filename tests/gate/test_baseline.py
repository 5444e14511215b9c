"""Baseline files: made, changed with a reason, shown; the same results give the same bytes."""

from __future__ import annotations

import json

import numpy
import pytest
from click.testing import CliRunner
from gate.cells import make_cell, write_run

from kvacc.cli import cli
from kvacc.gate.baseline import read_baseline
from kvacc.gate.snapshot import Packed, snapshot


def kvacc(*words):
    return CliRunner().invoke(cli, ["baseline", *map(str, words)])


@pytest.fixture
def made(tmp_path):
    write_run(tmp_path / "run", make_cell([1, 0, 1, 1]), make_cell([1, 1, 1, 1], strategy="full"))
    assert kvacc("create", "run", "--output", "deep/base.json", "--reason", "first").exit_code == 0
    return tmp_path / "deep" / "base.json"


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 0, 0, 1, 1, 1, 0, 1, 1], "bits"),
        ([0.1, -0.0, 1e300], "float64"),
        ([-3.5, -1e30], "float32"),
        ([0, 2, 1], "int32"),
    ],
)
def test_packed_numbers_come_back(values, kind):
    packed = Packed.of(values, kind)
    again = Packed.model_validate_json(packed.model_dump_json())
    assert numpy.allclose(again.numbers(), values, rtol=1e-7)


def test_a_thousand_items_are_small():
    cell = make_cell([1, 0] * 500)
    assert len(snapshot(cell).model_dump_json()) < 20_000


def test_it_holds_values_prompts_and_log_likelihoods(made):
    (full, h2o) = read_baseline(made).cells
    assert (full.label, h2o.label) == ("tiny full piqa 0-shot", "tiny h2o 0.2 stream piqa 0-shot")
    assert h2o.values.numbers().tolist() == [1, 0, 1, 1] and h2o.score == 0.75
    assert h2o.loglikelihoods.numbers().tolist() == [0, -1, -1, -2, -2, -3, -3, -4]
    assert len(set(h2o.prompt_hashes())) == 4 and h2o.clusters is None and h2o.depths is None


def test_the_same_results_give_the_same_bytes(made, tmp_path):
    kvacc("create", "run", "--output", "again.json", "--reason", "first")
    assert made.read_bytes() == (tmp_path / "again.json").read_bytes()


def test_no_path_and_no_clock_gets_in(tmp_path):
    write_run(tmp_path / "run", make_cell([1, 0], model=str(tmp_path / "models" / "mine")))
    kvacc("create", "run", "--output", "base.json", "--reason", "first")
    content = json.loads((tmp_path / "base.json").read_text())
    assert content["cells"][0]["spec"]["model"]["pretrained"] == "mine"
    assert "2026-01-01" not in json.dumps(content)


def test_an_existing_baseline_is_not_overwritten(made):
    result = kvacc("create", "run", "--output", made, "--reason", "again")
    assert result.exit_code == 2 and "exists; change it with: kvacc baseline update" in result.stderr


def test_a_reason_is_needed(made, tmp_path):
    result = kvacc("create", "run", "--output", "b.json", "--reason", "  ")
    assert result.exit_code == 2 and "needs a reason" in result.stderr
    assert not (tmp_path / "b.json").exists()


def test_an_update_says_what_changes_and_keeps_the_reason(made, tmp_path):
    write_run(tmp_path / "new", make_cell([1, 1, 1, 0], shift=0.1), make_cell([1, 1], task="copa"))
    result = kvacc("update", "new", "--baseline", made, "--reason", "sinks are kept now")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[:2] == [
        "new: tiny h2o 0.2 stream copa 0-shot: acc 100.0 on 2 items",
        "changed: tiny h2o 0.2 stream piqa 0-shot: acc 75.0 on 4 items -> acc 75.0 on 4 items (1 items lost, 1 gained)",
    ]
    known = read_baseline(made)
    assert [entry.reason for entry in known.history] == ["first", "sinks are kept now"]
    assert len(known.cells) == 3  # full stays
    shown = kvacc("show", made)
    assert "2. sinks are kept now" in shown.stdout and "copa" in shown.stdout


def test_an_update_to_the_same_changes_nothing(made):
    before = made.read_bytes()
    result = kvacc("update", "run", "--baseline", made, "--reason", "nothing")
    assert "nothing changed" in result.stdout and made.read_bytes() == before


def test_another_seed_or_data_is_said(made, tmp_path):
    write_run(tmp_path / "new", make_cell([1, 0, 1, 1], seed=7, data="other"))
    result = kvacc("update", "new", "--baseline", made, "--reason", "another seed")
    assert "seed 1234 -> 7, task data_fingerprint data -> other" in result.stdout


def test_cells_can_be_dropped(made, tmp_path):
    write_run(tmp_path / "new", make_cell([1, 0, 1, 1]))
    result = kvacc("update", "new", "--baseline", made, "--reason", "h2o only", "--remove-missing")
    assert "removed: tiny full piqa 0-shot" in result.stdout
    assert len(read_baseline(made).cells) == 1


def test_two_answers_to_one_question_are_refused(tmp_path):
    write_run(tmp_path / "run", make_cell([1, 0]), make_cell([1, 0], seed=7))
    result = kvacc("create", "run", "--output", "b.json", "--reason", "x")
    assert result.exit_code == 2 and "is there twice (seed" in result.stderr
