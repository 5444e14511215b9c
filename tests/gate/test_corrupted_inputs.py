"""Whatever is wrong with the inputs of ``kvacc check`` is one clear line and exit code 2."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil

import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner
from gate.cells import make_cell, write_run

from kvacc.cli import cli
from kvacc.gate import baseline as baseline_file
from kvacc.results.checksums import sha256_of_record

RIGHT = [1, 1, 0, 1]


def cells(**changes):
    """What the baseline and the results hold unless a test changes it."""
    h2o = {"task": "piqa", **changes}
    return [make_cell(RIGHT, strategy="full"), make_cell(RIGHT, **h2o)]


def check(*words):
    return CliRunner().invoke(cli, ["check", "--baseline", "base.json", "--results", "run", *map(str, words)])


@pytest.fixture
def run(tmp_path):
    """A baseline, and a run that equals it."""
    folder = write_run(tmp_path / "run", *cells())
    made = CliRunner().invoke(
        cli, ["baseline", "create", "run", "--output", "base.json", "--reason", "first"]
    )
    assert made.exit_code == 0, made.output
    assert check().exit_code == 0
    return folder


def h2o_folder(run):
    (found,) = [path.parent for path in run.rglob("cell.json") if '"h2o"' in path.read_text()]
    return found


def again(run, *made):
    """Other results in the run's place."""
    shutil.rmtree(run)
    write_run(run, *made)


def truncated_parquet(run):
    path = h2o_folder(run) / "samples.parquet"
    path.write_bytes(path.read_bytes()[:200])


def missing_parquet(run):
    (h2o_folder(run) / "samples.parquet").unlink()


def edited_cell(run):
    path = h2o_folder(run) / "cell.json"
    path.write_text(path.read_text().replace('"value": 0.75', '"value": 0.95'))


def truncated_cell(run):
    path = h2o_folder(run) / "cell.json"
    path.write_text(path.read_text()[:99])


def _resign(folder, change):
    """Change the samples, and make every checksum right again: what no checksum can notice."""
    path = folder / "samples.parquet"
    pyarrow.parquet.write_table(change(pyarrow.parquet.read_table(path)), path)
    record = json.loads((folder / "cell.json").read_text())
    record["samples_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    record["record_sha256"] = sha256_of_record(record)
    (folder / "cell.json").write_text(json.dumps(record))


def _column(table, name, values):
    return table.set_column(table.column_names.index(name), name, pyarrow.array(values))


def nan_scores(run):
    _resign(h2o_folder(run), lambda table: _column(table, "metric_acc", [float("nan")] * len(table)))


def values_above_one(run):
    _resign(h2o_folder(run), lambda table: _column(table, "metric_acc", [2.0] * len(table)))


def some_without_value(run):
    _resign(h2o_folder(run), lambda table: _column(table, "metric_acc", [None, None] + [1.0] * 6))


def no_metric(run):
    _resign(h2o_folder(run), lambda table: table.drop_columns(["metric_acc"]))


def duplicated_cell(run):
    copy = make_cell([0, 1, 0, 1])
    write_run(run.parent / "run" / "copy", copy)


def two_seeds(run):
    write_run(run, make_cell(RIGHT, seed=7))


def mixed_versions(run):
    again(run, *cells(version="2.0"))


def empty_run(run):
    shutil.rmtree(run)
    run.mkdir()


def no_run(run):
    shutil.rmtree(run)


def another_seed(run):
    again(run, *cells(seed=7))


def another_limit(run):
    again(run, *cells(limit=3))


def another_model(run):
    again(run, *[make_cell(RIGHT, strategy="full", content="other"), make_cell(RIGHT)])


def other_documents(run):
    again(run, *cells(data="other"))


def other_prompts(run):
    again(run, *cells(prompt="other"))


def another_metric(run):
    again(run, *cells(metric="exact_match"))


def missing_cell(run):
    shutil.rmtree(h2o_folder(run))


def new_cell(run):
    write_run(run, make_cell(RIGHT, task="copa"))


def no_baseline(run):
    (run.parent / "base.json").unlink()


def truncated_baseline(run):
    path = run.parent / "base.json"
    path.write_text(path.read_text()[:100])


def edited_baseline(run):
    path = run.parent / "base.json"
    path.write_text(path.read_text().replace('"score": 0.75', '"score": 0.25'))


def no_baseline_at_all(run):
    (run.parent / "base.json").write_text("[1, 2]")


def newer_baseline(run):
    _change_baseline(run, lambda content: content.update(schema_version=9))


def damaged_base64(run):
    _change_baseline(run, lambda content: content["cells"][0]["values"].update(base64="?"))


def short_values(run):
    few = base64.b64encode(b"\x80").decode()
    _change_baseline(run, lambda content: content["cells"][0]["values"].update(count=1, base64=few))


def _change_baseline(run, change):
    path = run.parent / "base.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    change(content)
    path.write_text(json.dumps({**content, "sha256": baseline_file._checksum(content)}))


AGAIN = "and run the same command again"
ANEW = "restore it from version control, or make it anew with: kvacc baseline create"
FULL, H2O = "tiny full piqa 0-shot", "tiny h2o 0.2 stream piqa 0-shot"
LINES = {
    truncated_parquet: "{cell}/samples.parquet is truncated or was edited (its checksum differs from cell.json); delete the folder {cell} " + AGAIN,
    missing_parquet: "{cell}/samples.parquet is missing; delete the folder {cell} " + AGAIN,
    edited_cell: "{cell}/cell.json was edited after it was written (its checksum differs); delete the folder {cell} " + AGAIN,
    truncated_cell: "{cell}/cell.json is truncated or not JSON (*); delete the folder {cell} " + AGAIN,
    nan_scores: "{cell}/samples.parquet: *metric_acc is NaN for document 0, option 0*",
    values_above_one: "cell {id} (h2o, piqa): acc is 2 for an item; the gate needs values between 0 and 1: leave this task out",
    some_without_value: "cell {id} (h2o, piqa): 3 of 4 items have a value of acc; the gate compares item by item: leave this task out",
    no_metric: "cell {id} (h2o, piqa): 0 of 4 items have a value of acc; the gate compares item by item: leave this task out",
    duplicated_cell: "cell {id} has different results in run/cells/{id} and run/copy/cells/{id}; keep one of the two folders",
    two_seeds: H2O + " is in the results twice (seed * and *); keep one",
    mixed_versions: H2O + ": task version 2.0 here, 1.0 in the baseline; make a new baseline for it",
    empty_run: "results folder run holds no finished cell; fill it with: kvacc run CONFIG",
    no_run: "results folder run does not exist; make it with: kvacc run CONFIG",
    another_seed: H2O + ": seed 7 here, 1234 in the baseline; run with the same",
    another_limit: H2O + ": limit 3 here, None in the baseline; run with the same",
    another_model: FULL + ": another model than the baseline's (content differ); run with the same model",
    other_documents: H2O + ": the task's documents are not the baseline's; run with the same data, or make a new baseline",
    other_prompts: H2O + ": the prompts are not the baseline's (first at item 0); make a new baseline for it",
    another_metric: H2O + ": metric exact_match here, acc in the baseline; make a new baseline for it",
    missing_cell: H2O + " is missing from the results; run it, or drop it with: kvacc baseline update RUNS --remove-missing",
    new_cell: "tiny h2o 0.2 stream copa 0-shot is not in the baseline; add it with: kvacc baseline update RUNS, or give --allow-new",
    no_baseline: 'baseline base.json does not exist; make it with: kvacc baseline create RUNS --output base.json --reason "first baseline"',
    truncated_baseline: "baseline base.json is truncated or not JSON (*); " + ANEW,
    edited_baseline: "baseline base.json was edited by hand (its checksum differs); " + ANEW,
    no_baseline_at_all: "baseline base.json is no baseline file (schema_version None); " + ANEW,
    newer_baseline: "baseline base.json: schema_version 9 is newer than 1, which this kvacc reads; update kvacc",
    damaged_base64: "baseline base.json: cells.0.values: base64 is damaged; " + ANEW,
    short_values: "baseline base.json: cells.0: prompts has 4 entries for 1 items; " + ANEW,
}  # fmt: skip


@pytest.mark.parametrize("corrupt", LINES, ids=lambda corrupt: corrupt.__name__)
def test_one_clear_line(run, corrupt):
    folder = h2o_folder(run)
    corrupt(run)
    result = check("--junit", "j.xml", "--json", "j.json", "--summary", "s.md")
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    parts = (
        LINES[corrupt].replace("{cell}", f"run/cells/{folder.name}").replace("{id}", folder.name).split("*")
    )
    assert line.startswith("error: " + parts[0]), line
    assert line.endswith(parts[-1]), line
    assert all(part in line for part in parts), line
    # Nothing half-written.
    assert not [name for name in ("j.xml", "j.json", "s.md") if (run.parent / name).exists()]


def test_several_mistakes_are_all_listed(run):
    again(run, make_cell(RIGHT, strategy="full", seed=7), make_cell(RIGHT, task="copa"))
    result = check()
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "error: 3 cells cannot be compared:",
        f"{FULL}: seed 7 here, 1234 in the baseline; run with the same",
        f"{H2O} is missing from the results; run it, or drop it with: kvacc baseline update RUNS --remove-missing",
        "tiny h2o 0.2 stream copa 0-shot is not in the baseline; add it with: kvacc baseline update RUNS, or give --allow-new",
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--margin", "0"], "--margin '0': give points above 0 and below 100, such as 1 or 2.5"),
        (["--margin", "much"], "--margin 'much': give points above 0 and below 100, such as 1 or 2.5"),
        (["--confidence", "95"], "confidence 95.0 is out of range; give one between 0.5 and 1, such as 0.95"),
        (["--max-kl", "-1"], "max_kl -1.0 is out of range; give one above 0"),
        (["--max-kl", "0.1"], H2O + ": the results have no kl per item, so no limit of it can be checked; run them with --set fidelity=true, or leave the limit out"),
        (["--compare-as", "h2o"], "--compare-as 'h2o': write NEW=OLD, such as harmed_h2o=h2o"),
        (["--compare-as", "mine=h2o"], "--compare-as mine=h2o: the results have no strategy 'mine'; known: full, h2o"),
        (["--compare-as", "h2o=h20"], "--compare-as h2o=h20: the baseline has no strategy 'h20' (did you mean 'h2o'?); known: full, h2o"),
        (["--config", "ci"], "give either --config CONFIG (it is run afresh) or --results FOLDER (results that are there)"),
        (["--output", "x"], "--output, --resume, --set, --include and --data-dir go with --config, not --results"),
        (["--junit", "base.json/x"], "cannot write base.json/x: *; choose another file"),
    ],
)  # fmt: skip
def test_wrong_options(run, words, line):
    result = check(*words)
    assert result.exit_code == 2, result.output
    start, star, end = line.partition("*")
    (found,) = result.stderr.splitlines()
    assert found.startswith(f"error: {start}") and found.endswith(end), found
    assert star or found == f"error: {line}"
