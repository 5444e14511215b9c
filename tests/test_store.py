"""Many results at once: what is damaged is named, and averages are those of the documents."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pyarrow
import pytest
from click.testing import CliRunner
from stored_cells import make_cell, rewrite, row, sign, stored

from kvacc.cli import cli
from kvacc.errors import KvaccError
from kvacc.results import SAMPLE_COLUMNS, read_cell, read_cells, write_cell
from kvacc.store import Store
from kvacc.store.check import REQUIRED_COLUMNS
from kvacc.store.diff import diff_cells, match_cells
from kvacc.store.export import FORMATS, as_text, choose_columns, write_text
from kvacc.store.merge import merge
from kvacc.store.tables import cell_columns

PAPER = Path(__file__).parents[1] / "leaderboard" / "paper" / "runs"


@pytest.fixture
def run(tmp_path):
    """Full and h2o on two tasks; piqa has four documents, copa two."""
    folder = tmp_path / "run"
    full = {"strategy": "full", "options": {}, "budget": None}
    stored(folder / "cells", "f1", (1.0, 1.0, 0.0, 1.0), spec=full)
    stored(folder / "cells", "h1", (1.0, 0.0, 0.0, 0.0))
    stored(folder / "cells", "f2", (1.0, 1.0), spec={**full, "task": "copa"})
    stored(folder / "cells", "h2", (0.0, 1.0), spec={"task": "copa"})
    return folder


# --- reading -----------------------------------------------------------------------------


def test_cells_are_rows_with_a_column_for_every_scalar(run):
    store = Store.open(run)
    rows = store.rows("cells")
    assert [cell["cell_id"] for cell in rows] == ["f2", "h2", "f1", "h1"]
    one = rows[3]
    assert (one["strategy"], one["budget"], one["task"], one["items"]) == ("h2o", "0.2", "piqa", 4)
    assert (one["score"], one["stderr"], one["metric"], one["chance"]) == (0.25, 0.25, "acc", 0.5)
    assert json.loads(one["options"]) == {"recent_fraction": 0.5}
    assert (one["kvacc"], one["device"], one["seconds"]) == ("0.1", "cpu", 1.5)
    assert rows[2]["budget"] is None and one["warning_count"] == 0
    assert (
        {"mass_by_layer", "attention_mass", "item_limit", "strategy_repr"} <= set(one) == set(cell_columns())
    )


def test_every_scalar_of_the_schema_has_a_column_of_its_own():
    """No two parts of a cell may have a field of one name, of which one would hide the other."""
    from kvacc.store import tables

    names = [
        tables._RENAMED.get((part, field), field)
        for part, record in tables._records().items()
        for field in record.model_fields
        if (part, field) not in tables._LEFT_OUT
    ]
    assert len(names) == len(set(names))
    assert set(names) <= set(cell_columns())


def test_documents_count_once_however_many_options_they_have(run, tmp_path):
    # One document with three options that is right, one with one option that is wrong.
    rows = [row(0, option, 1.0) for option in range(3)] + [row(1, 0, 0.0)]
    stored(tmp_path / "uneven", "u1", (1.0, 0.0), rows=rows)
    store = Store.open(tmp_path / "uneven")
    assert store.sql("SELECT avg(metric_acc) AS mean FROM samples").to_pylist() == [{"mean": 0.75}]
    assert store.aggregate(["task"])[0]["mean"] == 0.5
    assert [document["requests"] for document in store.rows("documents")] == [3, 1]
    assert len(Store.open(run).rows("samples")) == 24 and len(Store.open(run).rows("documents")) == 12


def test_aggregate_by_hand(run):
    groups = Store.open(run).aggregate(["strategy"])
    # Each cell counts once: full (3/4 + 1) / 2, h2o (1/4 + 1/2) / 2.
    assert [(group["strategy"], group["mean"]) for group in groups] == [("full", 0.875), ("h2o", 0.375)]
    assert groups[1] == {
        "strategy": "h2o", "protocol": "stream", "metric": "acc", "cells": 2, "documents": 6, "requests": 12,
        "mean": 0.375, "kept_fraction": 0.25, "acted_share": 1.0,
    }  # fmt: skip


def test_kept_fractions_are_weighted_by_scored_tokens(tmp_path):
    rows = [
        row(0, 0, 1.0, scored_tokens=1, kept_fraction=1.0),
        row(0, 1, 1.0, scored_tokens=3, kept_fraction=0.5),
    ]
    stored(tmp_path, "w1", (1.0,), rows=rows)
    store = Store.open(tmp_path)
    assert store.rows("documents")[0]["kept_fraction"] == 0.625
    assert store.aggregate([])[0]["kept_fraction"] == 0.625


def test_protocols_and_metrics_are_never_averaged_together(run, tmp_path):
    stored(run / "cells", "s1", (0.0, 0.0), spec={"protocol": "serve", "task": "copa"})
    groups = Store.open(run).aggregate(["strategy"])
    assert [(group["strategy"], group["protocol"]) for group in groups] == [
        ("full", "stream"), ("h2o", "serve"), ("h2o", "stream"),
    ]  # fmt: skip
    stored(run / "cells", "p1", (9.0, 11.0), metric="perplexity")
    assert {group["metric"] for group in Store.open(run).aggregate(["strategy"])} == {"acc", "perplexity"}


@pytest.mark.skipif(not PAPER.exists(), reason="the published results are not in this checkout")
def test_averages_of_published_results_are_those_in_their_cells():
    store = Store.open(PAPER)
    cells = {cell.cell_id: cell for cell in store.cells}
    groups = store.aggregate(["cell_id"])
    assert len(groups) == len(cells) > 100
    for group in groups:
        cell = cells[group["cell_id"]]
        assert group["mean"] == pytest.approx(cell.scores["acc"].value, abs=1e-8)
        assert group["kept_fraction"] == pytest.approx(cell.measured.kept_fraction, abs=1e-8)
        assert group["acted_share"] == pytest.approx(cell.measured.acted_share, abs=1e-8)
        assert group["documents"] == cell.task.num_items


def test_columns_that_some_files_lack_are_null(run):
    rewrite(run / "cells" / "f1", lambda table: table.drop_columns(["recall", "moved_bytes"]))
    rewrite(run / "cells" / "h1", lambda table: table.append_column("extra", pyarrow.array(range(8))))
    store = Store.open(run)
    assert store.sql("SELECT count(*) AS n FROM samples WHERE recall IS NULL").to_pylist() == [{"n": 24}]
    assert store.sql("SELECT sum(extra) AS total FROM samples").to_pylist()[0]["total"] == 28
    assert set(SAMPLE_COLUMNS) <= set(store.columns("samples"))
    assert set(REQUIRED_COLUMNS) <= set(SAMPLE_COLUMNS)


def test_names_of_filtered_metrics_with_commas(tmp_path):
    rows = [{**row(0, 0, None), "metric_exact_match,strict": 1.0}]
    stored(tmp_path, "g1", (1.0,), rows=rows, metric="exact_match,strict")
    assert Store.open(tmp_path).aggregate([])[0]["mean"] == 1.0
    assert Store.open(tmp_path).aggregate([], metric="exact_match,strict")[0]["mean"] == 1.0


@pytest.mark.parametrize("name", ["it's", "a [b] *c?", 'quo"te', "semi;colon -- x", "ümlaut"])
def test_any_folder_name(tmp_path, name):
    stored(tmp_path / name, "a1")
    # A wildcard would find this one too.
    stored(tmp_path / "a b xc!", "b1")
    store = Store.open(tmp_path / name)
    assert [sample["cell_id"] for sample in store.rows("samples")] == ["a1"] * 8


def test_a_cell_reached_through_a_link(tmp_path):
    stored(tmp_path / "real", "a1")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "a1")
    assert Store.open(tmp_path / "link").rows("documents")[0]["cell_id"] == "a1"


def test_select(run):
    store = Store.open(run)

    def chosen(**options):
        return [cell.cell_id for cell in store.select(**options).cells]

    assert chosen() == ["f1", "f2", "h1", "h2"]
    assert chosen(task=["piqa"]) == ["f1", "h1"]
    assert chosen(task=["piqa", "copa"], strategy=["full"]) == ["f1", "f2"]
    assert chosen(budget=["20%"]) == ["h1", "h2"] and chosen(shots=[0], task=["copa"]) == ["f2", "h2"]
    assert chosen(where="score < 0.3 OR budget IS NULL AND task = 'copa'") == ["f2", "h1"]
    assert chosen(task=["copa"], where="score < 0.3 OR TRUE -- all") == ["f2", "h2"]
    assert len(store.select(task=["copa"]).rows("samples")) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": ["pica"]}, "unknown task 'pica' (did you mean 'piqa'?); known: copa, piqa"),
        ({"budget": ["0.3"]}, "unknown budget '0.3' (did you mean '0.2'?)"),
        ({"budget": ["much"]}, "budget 'much' is not a number"),
        ({"colour": ["red"]}, "unknown column 'colour'"),
        ({"where": "scoer > 1"}, 'DuckDB refuses the condition: Binder Error: Referenced column "scoer"'),
        ({"where": "score >"}, "DuckDB refuses the condition: Parser Error"),
        ({"where": "TRUE); SELECT (1"}, "must be one SELECT"),
        ({"strategy": ["full"], "budget": ["0.2"]}, "none of the 4 cells has strategy full, budget 0.2"),
        ({"where": "score > 2"}, "none of the 4 cells has score > 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_selected(run, options, message):
    with pytest.raises(KvaccError) as error:
        Store.open(run).select(**options)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "query",
    ["DELETE FROM cells", "SELECT 1; SELECT 2", "COPY cells TO 'x.csv'", "", "CREATE TABLE x (a INT)"],
)
def test_sql_is_one_select(run, query):
    with pytest.raises(KvaccError, match="must be one SELECT over cells"):
        Store.open(run).sql(query)


def test_mistakes_in_aggregates_and_tables(run):
    store = Store.open(run)
    with pytest.raises(KvaccError, match=r"unknown column 'stratgy' \(did you mean 'strategy'"):
        store.aggregate(["stratgy"])
    with pytest.raises(KvaccError, match=r"unknown metric 'accc' \(did you mean 'acc'"):
        store.aggregate(metric="accc")
    with pytest.raises(KvaccError, match="unknown table 'sample'"):
        store.table("sample")


# --- damage ------------------------------------------------------------------------------


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def replace_text(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def with_nan(table):
    values = table["loglikelihood"].to_pylist()
    values[2] = math.nan
    index = table.column_names.index("loglikelihood")
    return table.set_column(index, "loglikelihood", pyarrow.array(values))


def not_parquet(folder):
    (folder / "samples.parquet").write_text("doc_id,option\n")
    sign(folder)


def other_duplicate(folder):
    stored(folder.parents[2] / "run" / "more", "a1", (0.0, 0.0, 1.0, 1.0))


DAMAGES = {
    "truncated samples": (lambda f: truncate(f / "samples.parquet"), "samples.parquet is truncated or was edited"),
    "edited samples": (lambda f: flip_a_byte(f / "samples.parquet"), "samples.parquet is truncated or was edited"),
    "empty samples": (lambda f: (f / "samples.parquet").write_bytes(b""), "samples.parquet is truncated or was edited"),
    "no samples": (lambda f: (f / "samples.parquet").unlink(), "samples.parquet is missing"),
    "samples that are no Parquet": (not_parquet, "no Parquet file"),
    "samples without a column": (lambda f: rewrite(f, lambda t: t.drop_columns(["cluster"])), "lack the columns cluster"),
    "NaN in the samples": (lambda f: rewrite(f, with_nan), "loglikelihood is NaN for document 1, option 0"),
    "a row twice": (
        lambda f: rewrite(f, lambda t: pyarrow.concat_tables([t, t.slice(3, 1)])),
        "document 1, option 1 is there more than once",
    ),
    "a document less": (lambda f: rewrite(f, lambda t: t.slice(2)), "3 documents where cell.json says 4"),
    "another score": (
        lambda f: sign(f, scores={"acc": {"value": 0.9, "stderr": 0.1}}),
        "the documents average 0.75 in acc, but cell.json says 0.9",
    ),
    "truncated cell.json": (lambda f: truncate(f / "cell.json"), "cell.json is truncated or not JSON"),
    "edited cell.json": (
        lambda f: replace_text(f / "cell.json", '"value": 0.75', '"value": 0.85'),
        "cell.json was edited after it was written",
    ),
    "NaN score": (lambda f: replace_text(f / "cell.json", '"value": 0.75', '"value": NaN'), "not a finite number"),
    "no cell.json": (lambda f: (f / "cell.json").unlink(), "cell.json is missing"),
    "cell.json is a list": (lambda f: (f / "cell.json").write_text("[]"), "holds no JSON object"),
    "newer schema": (lambda f: sign(f, schema_version=99), "schema_version 99 is newer than 1"),
    "a field of a newer version": (lambda f: sign(f, colour="red"), "colour is not known to this kvacc"),
    "renamed folder": (lambda f: f.rename(f.with_name("other")), "but its folder is named 'other'"),
    "the cell again with other results": (other_duplicate, "cell a1 has different results in"),
}  # fmt: skip


@pytest.fixture
def damaged_run(tmp_path):
    """A sound cell and one to damage."""
    stored(tmp_path / "run" / "cells", "sound")
    return stored(tmp_path / "run" / "cells", "a1")


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_one_line_wherever_results_are_read(damaged_run, name, monkeypatch):
    damage, phrase = DAMAGES[name]
    damage(damaged_run)
    run = damaged_run.parents[1]
    with pytest.raises(KvaccError) as error:
        Store.open(run)
    message = str(error.value)
    assert phrase in message and "\n" not in message

    checked = CliRunner().invoke(cli, ["results", "check", str(run)])
    assert checked.exit_code == 1, checked.output
    lines = [line for line in checked.stdout.splitlines() if line.startswith("damaged: ")]
    assert len(lines) == 1 and phrase in lines[0]
    assert "1 sound cell with 8 rows of samples, 1 damaged" in checked.stdout

    board = CliRunner().invoke(cli, ["leaderboard", str(run)])
    assert board.exit_code == 2
    assert board.stderr.startswith("error: ") and board.stderr.count("\n") == 1 and phrase in board.stderr

    rest = Store.open(run, skip_damaged=True)
    assert [cell.cell_id for cell in rest.cells] == ["sound"] and len(rest.damaged) == 1
    assert rest.aggregate(["cell_id"])[0]["cells"] == 1


@pytest.mark.parametrize("name", ["no such folder", "empty folder", "a run without a cell"])
def test_folders_without_results_are_bad_input(tmp_path, name):
    folder = tmp_path / "run"
    if name != "no such folder":
        folder.mkdir()
    if name == "a run without a cell":
        (folder / "run.json").write_text("{}")
    phrase = "does not exist" if name == "no such folder" else "holds no finished cell"
    for command in (["results", "check"], ["results", "list"], ["leaderboard"]):
        result = CliRunner().invoke(cli, [*command, str(folder)])
        assert result.exit_code == 2 and phrase in result.stderr and result.stderr.count("\n") == 1


def test_every_damaged_cell_is_named(tmp_path):
    for name in ("a", "b", "c"):
        truncate(stored(tmp_path, name) / "samples.parquet")
    rewrite(stored(tmp_path, "d"), with_nan)
    stored(tmp_path, "e")
    with pytest.raises(
        KvaccError, match=r"a/samples.parquet is truncated.*\(2 more: kvacc results check RUNS\)"
    ):
        Store.open(tmp_path)
    assert [damage.folder.name for damage in Store.open(tmp_path, skip_damaged=True).damaged] == list("abcd")


def test_a_cell_of_a_newer_version_is_never_replaced(tmp_path):
    folder = stored(tmp_path, "a1")
    sign(folder, colour="red")
    before = (folder / "cell.json").read_bytes()
    with pytest.raises(KvaccError, match="update kvacc"):
        stored(tmp_path, "a1")
    assert (folder / "cell.json").read_bytes() == before


def run_file(folder, cells, version="0.1"):
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "schema_version": 1,
        "kvacc": version,
        "runs": [{"config": {}, "cells": dict.fromkeys(cells, "x")}],
    }
    (folder / "run.json").write_text(json.dumps(content))
    return folder


def check(folder):
    result = CliRunner().invoke(cli, ["results", "check", str(folder)])
    return result.exit_code, result.stdout


def test_check_reads_the_run_files(tmp_path):
    run = run_file(tmp_path / "run", ["a1", "b1"])
    stored(run / "cells", "a1")
    stored(run / "cells", "c1")
    (run / "cells" / ".writing-b1@elsewhere@1@ff").mkdir()
    code, text = check(run)
    assert code == 0 and "2 sound cells with 16 rows of samples, none damaged" in text
    assert "1 of 2 planned cells are not here" in text and "1 cells are in no plan" in text
    assert "1 cells are being written" in text
    assert check(run / "cells") == (code, text)
    (run / "run.json").write_text('{"schema_version": 1')
    code, text = check(run)
    assert code == 1 and "run.json is damaged" in text


def test_a_cell_in_two_folders_is_missing_in_neither(tmp_path):
    for name in ("one", "other"):
        stored(run_file(tmp_path / name, ["a1"]) / "cells", "a1")
    code, text = check(tmp_path)
    assert code == 0 and "1 sound cell " in text and "not here" not in text


def test_two_versions_in_one_run_are_a_problem_and_in_two_runs_a_note(tmp_path):
    run = run_file(tmp_path / "run", ["a1"])
    stored(run / "cells", "a1")
    newer = make_cell("b1")
    newer.environment.kvacc = "0.2"
    write_cell(run_file(tmp_path / "newer", ["b1"], "0.2") / "cells", newer)
    code, text = check(tmp_path)
    assert code == 0 and "note: cells of several kvacc versions: 0.1, 0.2" in text
    shutil.copytree(tmp_path / "newer" / "cells" / "b1", run / "cells" / "b1")
    code, text = check(run)
    assert code == 1 and "mixes versions: run.json is of kvacc 0.1, cell b1 of 0.2" in text


# --- differences -------------------------------------------------------------------------


def pair(tmp_path, before, after, **changes):
    a = read_cell(stored(tmp_path / "a", "a1", before))
    return a, read_cell(stored(tmp_path / "b", "a1", after, **changes))


def test_a_difference_by_hand(tmp_path):
    a, b = pair(tmp_path, (1.0, 1.0, 0.0, 1.0), (1.0, 0.0, 1.0, 0.0), spec={"budget": "0.1"})
    found = diff_cells(a, b)
    assert (found.items, found.changed, found.lost, found.gained) == (4, 3, [1, 3], [2])
    assert found.difference.value == -0.25 and found.difference.method == "tango"
    assert found.difference.low < -0.25 < found.difference.high
    assert found.settings == {"spec.budget": ("0.2", "0.1")}
    assert (found.loglikelihoods, found.loglikelihood_max, found.is_identical) == (8, 0.0, False)


def test_loglikelihood_differences(tmp_path):
    rows = [row(0, 0, 1.0, loglikelihood=-1.5), row(0, 1, 1.0)]
    a, b = pair(tmp_path, (1.0,), (1.0,), rows=rows)
    found = diff_cells(a, b)
    assert (found.loglikelihood_max, found.loglikelihood_mean) == (0.5, 0.25) and not found.is_identical
    impossible = [row(0, 0, 1.0, loglikelihood=-math.inf), row(0, 1, 1.0)]
    c = read_cell(stored(tmp_path / "c", "a1", (1.0,), rows=impossible))
    assert diff_cells(a, c).loglikelihood_max == math.inf
    d = read_cell(stored(tmp_path / "d", "a1", (1.0,), rows=impossible))
    assert diff_cells(c, d).loglikelihood_max == 0.0 and diff_cells(c, d).is_identical


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"rows": [row(0, 0, 1.0, prompt_hash="other"), row(1, 0, 0.0)]},
            "the prompts differ, first at document 0",
        ),
        ({"rows": [row(0, 0, 1.0), row(2, 0, 0.0)]}, "the documents differ: 2 and 2, 1 in common"),
        ({"spec": {"task": "copa"}}, "the task differs: piqa and copa"),
    ],
)
def test_other_questions_are_not_paired(tmp_path, changes, reason):
    rows = [row(0, 0, 1.0), row(1, 0, 0.0)]
    a = read_cell(stored(tmp_path / "a", "a1", (1.0, 0.0), rows=rows))
    b = read_cell(stored(tmp_path / "b", "a1", (1.0, 0.0), **{"rows": rows, **changes}))
    found = diff_cells(a, b)
    assert found.why_not.startswith(reason) and found.difference is None and not found.is_identical


def test_cells_of_two_runs_are_matched(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    shutil.rmtree(other / "cells" / "h2")
    stored(other / "cells", "z9", spec={"budget": "0.9"})
    pairs, only_a, only_b = match_cells(read_cells(run), read_cells(other))
    assert [one.cell_id for one, _ in pairs] == ["f1", "f2", "h1"]
    assert [cell.cell_id for cell in only_a] == ["h2"] and [cell.cell_id for cell in only_b] == ["z9"]
    with pytest.raises(
        KvaccError, match=r'no cell in common \(the closest differ in spec.budget "0.2" and "0.9"\)'
    ):
        match_cells(read_cells(run / "cells" / "h1"), read_cells(other / "cells" / "z9"))


# --- export ------------------------------------------------------------------------------


def text_of(store, what, format, columns=None):
    return "".join(as_text(choose_columns(store.table(what), what, format, columns), format))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("what", ["cells", "scores", "samples", "documents"])
def test_the_same_results_give_the_same_bytes_wherever_they_lie(run, tmp_path, what, format):
    shutil.copytree(run, tmp_path / "else" / "where")
    texts = {text_of(Store.open(folder), what, format) for folder in (run, tmp_path / "else")}
    assert len(texts) == 1
    assert str(tmp_path) not in texts.pop()


def test_csv_and_json_read_back_equal(run):
    import csv
    import io

    store = Store.open(run)
    rows = store.rows("samples")
    assert json.loads(text_of(store, "samples", "json")) == rows
    read = list(csv.DictReader(io.StringIO(text_of(store, "samples", "csv"))))
    assert [float(line["loglikelihood"]) for line in read] == [line["loglikelihood"] for line in rows]
    assert read[0]["acted"] == "true" and read[0]["response"] == ""


def test_json_has_no_bare_infinity(tmp_path):
    stored(tmp_path, "a1", (1.0,), rows=[row(0, 0, 1.0, loglikelihood=-math.inf)])
    (read,) = json.loads(text_of(Store.open(tmp_path), "samples", "json"))
    assert read["loglikelihood"] == "-inf"


def test_markdown_and_latex_by_hand(tmp_path):
    stored(tmp_path, "a1", spec={"strategy": "streaming_llm", "budget": None, "model": {}})
    store = Store.open(tmp_path)
    columns = ["strategy", "budget", "score", "causal"]
    assert text_of(store, "cells", "markdown", columns) == (
        "| strategy | budget | score | causal |\n| :-- | :-- | --: | :-- |\n| streaming_llm | - | 0.7500 | yes |\n"
    )
    assert text_of(store, "cells", "latex", columns) == (
        "% needs \\usepackage{booktabs} and \\usepackage[T1]{fontenc}\n\\begin{tabular}{llrl}\n\\toprule\n"
        "strategy & budget & score & causal \\\\\n\\midrule\n"
        "streaming\\_llm & -- & 0.7500 & yes \\\\\n\\bottomrule\n\\end{tabular}\n"
    )


def test_latex_and_markdown_are_escaped():
    table = pyarrow.table({"a_b": [r"50% of $x_1 & {y} #2 \z ~ ^ | <t>"], "n": [-1.5]})
    assert r"50\% of \$x\_1 \& \{y\} \#2 \textbackslash{}z \textasciitilde{} \textasciicircum{}" in "".join(
        as_text(table, "latex")
    )
    assert "& $-$1.5000" in "".join(as_text(table, "latex"))
    assert r"\| &lt;t>" in "".join(as_text(table, "markdown"))


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("before")

    def failing():
        yield "half"
        raise OSError(28, "No space left on device")

    with pytest.raises(KvaccError, match="No space left on device; choose another --output"):
        write_text(failing(), path)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


# --- merge -------------------------------------------------------------------------------


def test_merge_copies_each_cell_once_and_joins_the_run_files(tmp_path):
    for name, cells in (("one", ["a1", "b1"]), ("two", ["b1", "c1"])):
        folder = run_file(tmp_path / name, cells)
        for cell in cells:
            stored(folder / "cells", cell)
    report = merge([tmp_path / "one", tmp_path / "two"], tmp_path / "all")
    assert (report.copied, report.present, report.runs) == (["a1", "b1", "c1"], [], 2)
    assert [cell.cell_id for cell in read_cells(tmp_path / "all")] == ["a1", "b1", "c1"]
    before = {path: path.read_bytes() for path in (tmp_path / "all").rglob("*") if path.is_file()}
    again = merge([tmp_path / "one", tmp_path / "two"], tmp_path / "all")
    assert (again.copied, again.present, again.runs) == ([], ["a1", "b1", "c1"], 2)
    assert {path: path.read_bytes() for path in (tmp_path / "all").rglob("*") if path.is_file()} == before
    stored(run_file(tmp_path / "three", ["d1"]) / "cells", "d1")
    assert merge([tmp_path / "three"], tmp_path / "all").copied == ["d1"]


def test_contradicting_results_are_named_and_nothing_is_copied(tmp_path):
    stored(tmp_path / "one", "a1")
    first = stored(tmp_path / "one", "b1", (1.0, 1.0))
    second = stored(tmp_path / "two", "b1", (1.0, 0.0))
    with pytest.raises(KvaccError) as error:
        merge([tmp_path / "one", tmp_path / "two"], tmp_path / "all")
    assert str(first) in str(error.value) and str(second) in str(error.value)
    assert not (tmp_path / "all").exists()
    merge([tmp_path / "two"], tmp_path / "all")
    with pytest.raises(KvaccError, match="cell b1 has different results"):
        merge([tmp_path / "one"], tmp_path / "all")
    assert [cell.cell_id for cell in read_cells(tmp_path / "all")] == ["b1"]


def test_what_cannot_be_merged(tmp_path):
    stored(run_file(tmp_path / "one", ["a1"]) / "cells", "a1")
    stored(run_file(tmp_path / "newer", ["b1"], "0.2") / "cells", "b1")
    with pytest.raises(KvaccError, match="one is of kvacc 0.1 and .*newer of kvacc 0.2; merge each version"):
        merge([tmp_path / "one", tmp_path / "newer"], tmp_path / "all")
    cell = make_cell("c1")
    cell.environment.kvacc = "0.3"
    write_cell(tmp_path / "bare", cell)
    with pytest.raises(KvaccError, match="is of kvacc 0.1 and .* is of kvacc 0.3; merge each version"):
        merge([tmp_path / "one", tmp_path / "bare"], tmp_path / "all")
    truncate(stored(tmp_path / "damaged", "d1") / "samples.parquet")
    with pytest.raises(KvaccError, match="truncated or was edited"):
        merge([tmp_path / "one", tmp_path / "damaged"], tmp_path / "all")
    assert not (tmp_path / "all").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(KvaccError, match="is a file; choose another --output"):
        merge([tmp_path / "one"], tmp_path / "file")
