"""``kvacc results``: what people see, and what mistakes say. What it computes is in tests/test_store.py."""

from __future__ import annotations

import csv
import io
import json
import shutil

import pytest
from click.testing import CliRunner
from stored_cells import row, sign, stored

from kvacc.cli import cli


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two cells of piqa and one of copa."""
    folder = tmp_path_factory.mktemp("results") / "run"
    full = {"strategy": "full", "options": {}, "budget": None}
    stored(folder / "cells", "f1", (1.0, 1.0, 0.0, 1.0), spec=full)
    stored(folder / "cells", "h1", (1.0, 0.0, 1.0, 0.0))
    stored(folder / "cells", "h2", (0.0, 1.0), spec={"task": "copa", "shots": 5})
    return folder


def results(*words):
    return CliRunner().invoke(cli, ["results", *map(str, words)])


def shown(*words):
    """What is printed, with runs of blanks as one."""
    result = results(*words)
    assert result.exit_code == 0, result.output
    return [" ".join(line.split()) for line in result.stdout.splitlines() if line.strip()]


def assert_mistake(result, *parts):
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    for part in parts:
        assert part in result.stderr
    assert result.stdout == ""


def test_help_and_unknown_commands(run):
    text = results("--help").output
    for name in ("list", "show", "diff", "aggregate", "export", "merge", "check", "sql"):
        assert name in text and results(name, "--help").exit_code == 0
    assert_mistake(results("lsit", run), "unknown command 'lsit'", "did you mean 'list'")
    assert_mistake(results("list"), "RUNS")


def test_list(run):
    lines = shown("list", run)
    assert lines[0] == "cell model strategy budget protocol task shots items metric score kept time warnings"
    assert lines[2:] == [
        "h2 tiny h2o 0.2 stream copa 5 2 acc 0.5000 ± 0.2500 25.0% 1.5 s -",
        "f1 tiny full - stream piqa 0 4 acc 0.7500 ± 0.2500 25.0% 1.5 s -",
        "h1 tiny h2o 0.2 stream piqa 0 4 acc 0.5000 ± 0.2500 25.0% 1.5 s -",
        "3 cells",
    ]


def test_list_tells_rows_of_one_strategy_apart(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    stored(tmp_path / "run" / "cells", "h3", spec={"options": {"recent_fraction": 0.25}})
    text = "\n".join(shown("list", tmp_path / "run"))
    assert "h3 tiny h2o recent_fraction=0.25 0.2" in text and "h1 tiny h2o recent_fraction=0.5 0.2" in text


@pytest.mark.parametrize(
    ("options", "cells"),
    [
        (["--task", "piqa"], ["f1", "h1"]),
        (["--task", "piqa", "--task", "copa", "--strategy", "h2o"], ["h2", "h1"]),
        (["--budget", "20%", "--shots", "5"], ["h2"]),
        (["--where", "score >= 0.5 AND task = 'piqa'"], ["f1", "h1"]),
        (["--protocol", "stream", "--model", "tiny", "--strategy", "full"], ["f1"]),
    ],
)
def test_filters(run, options, cells):
    assert [line.split()[0] for line in shown("list", run, *options)[2:-1]] == cells


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "pica"], "unknown task 'pica' (did you mean 'piqa'?)"),
        (["--strategy", "h20"], "unknown strategy 'h20' (did you mean 'h2o'?)"),
        (["--where", "scores > 1"], "DuckDB refuses the condition"),
        (["--task", "copa", "--strategy", "full"], "none of the 3 cells has task copa, strategy full"),
    ],
)
def test_mistaken_filters(run, options, message):
    assert_mistake(results("list", run, *options), message)


def test_damaged_cells_stop_a_command_or_are_left_out_and_named(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "cells" / "f1" / "samples.parquet").write_bytes(b"")
    assert_mistake(results("list", tmp_path / "run"), "f1/samples.parquet is truncated or was edited")
    rest = results("list", tmp_path / "run", "--skip-damaged")
    assert rest.exit_code == 0 and "2 cells" in rest.stdout
    assert rest.stderr.startswith("left out: ") and "f1/samples.parquet is truncated" in rest.stderr


def test_show(run):
    text = "\n".join(shown("show", run / "cells" / "h1", "--samples", "2"))
    for part in (
        "cell h1 in",
        "budget 0.2",
        'options {"recent_fraction": 0.5}',
        "acc (primary) 0.5000 ± 0.2500",
        "kept_fraction 0.25",
        "torch 2",
        "seconds 1.5",
        "samples (2 of 8 rows)",
        "0 1 -2 no 0 0.25 yes 1",
    ):
        assert part in text, part
    assert "samples (" not in "\n".join(shown("show", run / "cells" / "h1", "--samples", "0"))


def test_a_cell_may_be_named_by_its_first_letters(run):
    assert shown("show", run / "f")[0].startswith("cell f1 in")
    assert_mistake(results("show", run / "h"), "'h' begins 2 ids", "h1, h2")
    assert_mistake(results("show", run / "x1"), "no cell in", "begins with 'x1'", "kvacc results list")
    assert_mistake(results("show", run), "holds 3 cells; name one")
    assert_mistake(results("show", run / "no" / "where"), "does not exist")


def test_diff_of_two_cells(run):
    text = "\n".join(shown("diff", run / "f1", run / "h1"))
    assert "acc: A 0.7500, B 0.5000; B - A -0.2500 [" in text and "on 4 items (95 % interval, tango)" in text
    assert "values that differ: 3 of 4 items" in text
    assert "lost (right in A, wrong in B): 2 documents: 1, 3" in text and "gained: 1 documents: 2" in text
    assert "log-likelihoods: largest difference 0 nats, average 0, over 8 requests" in text
    assert "spec.strategy full h2o" in text and "spec.budget - 0.2" in text
    assert "2 documents: 1 and 1 more" in "\n".join(shown("diff", run / "f1", run / "h1", "--flips", "1"))
    assert "not compared item by item: the task differs: copa and piqa" in "\n".join(
        shown("diff", run / "h2", run / "h1")
    )


def test_diff_of_two_runs(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    assert shown("diff", run, other)[-2:] == [
        "3 cells compared, 3 of them identical in every answer",
        "no setting differs",
    ]
    shutil.rmtree(other / "cells" / "h1")
    shutil.rmtree(other / "cells" / "h2")
    rows = [
        row(document, option, 1.0, loglikelihood=-1.25 - option)
        for document in range(4)
        for option in range(2)
    ]
    cell = stored(other / "cells", "h1", (1.0,) * 4, rows=rows)
    environment = json.loads((cell / "cell.json").read_text())["environment"]
    sign(cell, environment={**environment, "torch": "3"})
    text = "\n".join(shown("diff", run, other))
    assert "h1 h2o 0.2 stream piqa 0-shot 0.5000 1.0000 +0.5000 [" in text and "0/2 0.25" in text
    assert "2 cells compared, 1 of them identical" in text and "only in A: 1 cells, such as h2" in text
    assert "environment.torch 2 3" in text
    assert_mistake(results("diff", run, other / "h1"), "is a run and", "name two cells (RUN/ID) or two runs")


def test_aggregate(run):
    assert shown("aggregate", run, "--by", "strategy,task")[2:] == [
        "full piqa stream acc 1 4 8 0.75 0.25 1",
        "h2o copa stream acc 1 2 4 0.5 0.25 1",
        "h2o piqa stream acc 1 4 8 0.5 0.25 1",
    ]
    assert_mistake(results("aggregate", run, "--by", "stratgy"), "unknown column 'stratgy'", "'strategy'")


def test_export(run, tmp_path):
    read = list(csv.DictReader(io.StringIO(results("export", run).stdout)))
    assert [line["cell_id"] for line in read] == ["h2", "f1", "h1"] and "folder" not in read[0]
    file = tmp_path / "deep" / "samples.json"
    lines = shown("export", run, "--what", "samples", "--format", "json", "--task", "copa", "--output", file)
    assert lines == [f"written: {file} (4 rows)"]
    assert [line["doc_id"] for line in json.loads(file.read_text())] == [0, 0, 1, 1]
    table = results(
        "export", run, "--format", "latex", "--columns", "task, score", "--strategy", "full"
    ).stdout
    assert "piqa & 0.7500 \\\\" in table
    assert_mistake(results("export", run, "--columns", "scroe"), "unknown column 'scroe'", "'score'")
    assert_mistake(results("export", run, "--format", "xml"), "xml")
    assert_mistake(
        results("export", run, "--output", run / "cells" / "h1" / "cell.json" / "x"), "cannot write"
    )


def test_merge(run, tmp_path):
    assert shown("merge", run, "--output", tmp_path / "all") == [f"3 cells copied to {tmp_path / 'all'}"]
    again = shown("merge", run, "--output", tmp_path / "all")
    assert again == [f"0 cells copied to {tmp_path / 'all'}, 3 were there already"]
    stored(tmp_path / "other", "h1", (0.0, 0.0, 0.0, 1.0))
    assert_mistake(
        results("merge", run, tmp_path / "other", "--output", tmp_path / "x"), "different results in"
    )
    assert_mistake(results("merge", run), "--output")


def test_check(run):
    assert shown("check", run) == ["3 sound cells with 20 rows of samples, none damaged"]


def test_sql(run):
    query = "SELECT strategy, count(*) AS cells FROM cells GROUP BY ALL ORDER BY strategy"
    assert shown("sql", query, run)[2:] == ["full 1", "h2o 2"]
    assert results("sql", query, run, "--format", "csv").stdout == "strategy,cells\nfull,1\nh2o,2\n"
    assert any(line.startswith("kept_fraction DOUBLE") for line in shown("sql", "FROM (DESCRIBE cells)", run))
    assert shown("sql", "SELECT * FROM cells WHERE FALSE", run)[-1] == "no row"
    assert_mistake(results("sql", "DROP TABLE documents", run), "must be one SELECT")
    assert_mistake(results("sql", "SELECT nothing FROM cells", run), "DuckDB refuses the query", "nothing")
