"""How examples are chosen, from the configuration to the leaderboard: the two ways are never mixed."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from click.testing import CliRunner
from fake_backend import FakeLM
from gate.cells import make_cell as make_gate_cell
from gate.cells import write_run
from rich.console import Console
from stored_cells import stored
from test_leaderboard import LOST_THREE_GAINED_ONE, make_cell, row_of

from kvacc import evaluation, results
from kvacc.cli import cli
from kvacc.config import CellSpec, ModelEntry, config_from, load_config, plan_cells
from kvacc.errors import KvaccError
from kvacc.evaluation import evaluate_cell
from kvacc.leaderboard import to_csv, to_json, to_markdown
from kvacc.leaderboard_rows import averages, build
from kvacc.results.checksums import sha256_of_record
from kvacc.shots import shots_text
from kvacc.store import Store
from kvacc.strategy import make_strategy
from kvacc.sweep import run_sweep
from kvacc.task_catalog import load_tasks

RECENT = {"name": "recent", "budget": 0.2}


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("KVACC_DATA_DIR", raising=False)
    monkeypatch.setattr(evaluation, "fingerprint_of", lambda lm, spec: {"name": spec.model.pretrained})


def config(**changes):
    return config_from({"models": ["tiny"], "strategies": ["full"], "tasks": ["kvacc_mini_copa"], **changes})


def sampled(cell, sampler="first_n"):
    """A synthetic cell of the leaderboard's tests as it would be with this sampler."""
    spec = cell.spec.model_copy(update={"fewshot_sampler": sampler})
    return cell.model_copy(update={"spec": spec, "cell_id": f"{cell.cell_id}-{sampler.replace('_', '-')}"})


# ----------------------------------------------------------- configuration


def test_a_wrong_sampler_is_named_with_its_place(tmp_path):
    path = tmp_path / "cfg.yaml"
    path.write_text("models: [tiny]\nstrategies: [full]\nshots: [5]\nfewshot_sampler: firstn\n")
    with pytest.raises(KvaccError) as caught:
        load_config(path)
    assert f"{path}:4:1: fewshot_sampler: " in str(caught.value)
    assert "'firstn'" in str(caught.value) and "did you mean 'first_n'" in str(caught.value)
    assert load_config(path, ["fewshot_sampler=first_n"]).fewshot_sampler == "first_n"


def test_an_id_from_before_there_was_a_choice_stays():
    strategy = make_strategy("h2o", 0.2)
    model = ModelEntry(pretrained="smollm2-135m")
    spec = CellSpec(model, strategy, "stream", "piqa", 5, 100, 1234, 32, "folder")
    # As published in leaderboard/paper.
    assert spec.cell_id == "14190bc28b91a784"
    assert "fewshot_sampler" not in spec.asked()
    assert spec.label == "smollm2-135m h2o 0.2 stream piqa 5-shot"


def test_the_sampler_makes_another_cell_only_where_there_are_examples():
    plain = plan_cells(config(shots=[0, 5]))
    first = plan_cells(config(shots=[0, 5], fewshot_sampler="first_n"))
    assert plain[0].cell_id == first[0].cell_id and plain[0] == first[0]
    assert plain[1].cell_id != first[1].cell_id
    assert [spec.asked().get("fewshot_sampler") for spec in first] == [None, "first_n"]
    assert [spec.label for spec in first] == [
        "tiny full stream kvacc_mini_copa 0-shot", "tiny full stream kvacc_mini_copa 5-shot first_n"
    ]  # fmt: skip


def test_shots_in_words():
    assert shots_text(5) == "5-shot" and shots_text(None) == "task's own shots"
    assert shots_text(5, "first_n") == "5-shot first_n"


# ------------------------------------------------------------------- sweep


def sweep(folder, **changes):
    """The cells of a sweep, and the prompts of each in the order run."""
    lm = FakeLM()
    asked = {"strategies": ["full", RECENT], "protocols": ["context"], "shots": [2], "limit": 12, **changes}
    report = run_sweep(
        config(**asked), folder, console=Console(file=io.StringIO()), load_model=lambda model, config: lm
    )
    assert not report.failed
    return results.read_cells(folder), lm.prompts


def examples(prompt):
    return prompt.rpartition("\n\n")[0]


def test_with_first_n_all_documents_share_their_examples(tmp_path):
    cells, prompts = sweep(tmp_path / "first", fewshot_sampler="first_n")
    assert {cell.spec.fewshot_sampler for cell in cells} == {"first_n"}
    assert len(prompts) == 2
    for asked in prompts:  # two requests a document
        # The first two documents are nobody's own example: theirs are others.
        assert len({examples(prompt) for prompt in asked[4:]}) == 1
        assert len({examples(prompt) for prompt in asked}) == 3
        assert all(examples(asked[-1]).count("\n\n") == 1 for prompt in asked)
    cells, prompts = sweep(tmp_path / "default")
    assert {cell.spec.fewshot_sampler for cell in cells} == {"default"}
    assert len({examples(prompt) for prompt in prompts[0][4:]}) > 5


def test_a_task_loaded_with_another_sampler_is_refused():
    (spec,) = plan_cells(config(shots=[2], limit=3, fewshot_sampler="first_n"))
    task = load_tasks([spec.task], num_fewshot=2)[spec.task]
    with pytest.raises(RuntimeError, match="loaded with a ContextSampler, not with first_n"):
        evaluate_cell(spec, FakeLM(), task)
    with pytest.raises(RuntimeError, match="loaded with a FirstNSampler, not with default"):
        task = load_tasks([spec.task], num_fewshot=2, fewshot_sampler="first_n")[spec.task]
        evaluate_cell(dataclasses.replace(spec, fewshot_sampler="default"), FakeLM(), task)


def test_both_ways_lie_in_one_folder_and_old_cells_still_read(tmp_path):
    before, _ = sweep(tmp_path)
    both, _ = sweep(tmp_path / "other", fewshot_sampler="first_n", strategies=["full"])
    assert not {cell.cell_id for cell in before} & {cell.cell_id for cell in both}
    # A cell written before there was a choice has no such field; its checksum covers what is there.
    folder = before[0].folder
    content = json.loads((folder / "cell.json").read_text())
    del content["spec"]["fewshot_sampler"]
    content["record_sha256"] = sha256_of_record(content)
    (folder / "cell.json").write_text(json.dumps(content))
    assert results.read_cell(folder).spec.fewshot_sampler == "default"


# ---------------------------------------------------- comparisons and tables


def test_full_of_another_sampler_is_no_baseline():
    full = make_cell(shots=5)
    other = sampled(make_cell("h2o", LOST_THREE_GAINED_ONE, budget="0.2", shots=5))
    row = row_of(build([full, other]), "h2o")
    assert row.difference is None
    assert row.why_no_difference == "full ran with fewshot_sampler default, this with first_n"
    compared = row_of(build([sampled(full), other]), "h2o")
    # 3 lost, 1 gained of 10.
    assert (compared.difference, compared.flips_lost, compared.flips_gained) == (-20.0, 3, 1)


def test_the_leaderboard_keeps_both_apart():
    cells = [
        way(make_cell(strategy, correct, budget=budget, task=task, shots=5))
        for way in (lambda cell: cell, sampled)
        for task in ("piqa", "copa")
        for strategy, correct, budget in (
            ("full", [1, 1, 1, 1, 1, 1, 1, 1, 0, 0], None),
            ("h2o", LOST_THREE_GAINED_ONE, "0.2"),
        )
    ]
    rows = build(cells)
    assert len({row.group for row in rows}) == 4
    assert all(row.difference == -20 for row in rows if not row.is_full)
    text = to_markdown(rows)
    assert "## tiny (float32), piqa, 5-shot: 10 items" in text
    assert "## tiny (float32), piqa, 5-shot first_n: 10 items" in text
    found = averages(rows)
    assert [(entry.fewshot_sampler, entry.label, entry.tasks) for entry in found] == [
        (sampler, label, ["copa", "piqa"])
        for sampler in ("default", "first_n")
        for label in ("full", "h2o")
    ]  # fmt: skip
    assert "5-shot first_n, 2 benchmark tasks: copa, piqa" in text
    assert {row["fewshot_sampler"] for row in json.loads(to_json(rows))["rows"]} == {"default", "first_n"}
    assert ",first_n," in to_csv(rows)


def test_pictures_and_filters_of_the_page_name_the_sampler():
    from kvacc.page.table import filters, sections
    from kvacc.plots.figure import about_row, title_of

    rows = build([make_cell(shots=5), sampled(make_cell(shots=5))])
    assert [about_row(row, "stream")["shots"] for row in rows] == ["5-shot", "5-shot first_n"]
    assert title_of(rows[1], "stream") == "tiny, piqa, 5-shot first_n, stream"
    assert {found["name"]: found["choices"] for found in filters(rows)}["shots"] == [
        "5-shot",
        "5-shot first_n",
    ]
    assert [section.shots for section in sections(rows, set())] == ["5-shot", "5-shot first_n"]


# ------------------------------------------------------------------- store


def test_results_tell_and_group_by_the_sampler(tmp_path):
    for name, sampler in (("a", "default"), ("b", "first_n")):
        right = (1.0, 0.0) if sampler == "default" else (1.0, 1.0)
        stored(tmp_path, f"{name}1", right=right, spec={"shots": 5, "fewshot_sampler": sampler})
    store = Store.open(tmp_path)
    means = {row["fewshot_sampler"]: row["mean"] for row in store.aggregate()}
    assert means == {"default": 0.5, "first_n": 1.0}
    assert [cell.cell_id for cell in store.select("fewshot_sampler = 'first_n'").cells] == ["b1"]
    listed = CliRunner().invoke(cli, ["results", "list", str(tmp_path)], env={"COLUMNS": "200"}).output
    assert "5 first_n" in listed
    differing = CliRunner().invoke(cli, ["results", "diff", f"{tmp_path}/a1", f"{tmp_path}/b1"]).output
    assert "piqa 5-shot first_n" in differing and "spec.fewshot_sampler" in differing


@pytest.mark.parametrize(("sampler", "there"), [("default", False), ("first_n", True)])
def test_a_readable_table_has_the_sampler_where_it_tells_something(tmp_path, sampler, there):
    stored(tmp_path, spec={"shots": 5, "fewshot_sampler": sampler})
    words = ["results", "export", str(tmp_path), "--format", "markdown"]
    assert ("fewshot_sampler" in CliRunner().invoke(cli, words).output.replace("\\", "")) is there


# -------------------------------------------------------------------- gate


def test_the_gate_compares_only_cells_of_one_sampler(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = make_gate_cell([1] * 8, shots=5)
    write_run(tmp_path / "before", plain)
    write_run(tmp_path / "now", sampled(make_gate_cell([1] * 8, shots=5)))

    def kvacc(*words):
        return CliRunner().invoke(cli, words)

    made = kvacc("baseline", "create", "before", "--output", "base.json", "--reason", "first")
    assert made.exit_code == 0, made.output
    # Baselines of lm-eval's own sampler are what they were before there was a choice.
    assert "fewshot_sampler" not in (tmp_path / "base.json").read_text()
    same = kvacc("check", "--baseline", "base.json", "--results", "before", "--margin", "10")
    assert same.exit_code == 0, same.output
    other = kvacc("check", "--baseline", "base.json", "--results", "now", "--margin", "10")
    assert other.exit_code == 2
    assert "piqa 5-shot is missing from the results" in other.stderr
    assert "piqa 5-shot first_n is not in the baseline" in other.stderr
    made = kvacc("baseline", "create", "now", "--output", "first.json", "--reason", "first")
    assert made.exit_code == 0, made.output
    same = kvacc(
        "check", "--baseline", "first.json", "--results", "now", "--margin", "10", "--summary", "s.md"
    )
    assert same.exit_code == 0, same.output
    assert "piqa 5-shot first_n" in same.stdout
