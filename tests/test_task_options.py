"""Options of tasks, from the configuration to the leaderboard: nothing is mixed, nothing gets lost."""

from __future__ import annotations

import io
import json

import pytest
from click.testing import CliRunner
from fake_backend import FakeLM
from rich.console import Console

from kvacc import evaluation, results, sweep
from kvacc.cli import cli
from kvacc.config import config_from, load_config, plan_cells
from kvacc.errors import KvaccError
from kvacc.leaderboard import to_csv, to_json, to_markdown
from kvacc.leaderboard_rows import averages, build
from kvacc.sweep import run_sweep
from kvacc.task_catalog import GROUPS

HEAD = "models: [tiny]\nstrategies: [full, {name: recent, budget: 0.2}]\nprotocols: [context]\n"


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("KVACC_DATA_DIR", raising=False)
    monkeypatch.setattr(evaluation, "fingerprint_of", lambda lm, spec: {"name": spec.model.pretrained})


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "cfg.yaml"
        path.write_text(HEAD + text, encoding="utf-8")
        return str(path)

    return write


def specs(tasks, **changes):
    values = {"models": ["tiny"], "strategies": ["full"], "tasks": tasks, **changes}
    return plan_cells(config_from(values))


# ----------------------------------------------------------- configuration


def test_options_stand_beside_the_name_and_lengths_multiply():
    planned = specs(["kvacc_mini_copa", {"name": "kvacc_needle", "length": [512, 1024], "depths": [0.5]}])
    assert [(spec.task, spec.task_options) for spec in planned] == [
        ("kvacc_mini_copa", {}),
        ("kvacc_needle", {"depths": [0.5]}),  # 512 is the default
        ("kvacc_needle", {"length": 1024, "depths": [0.5]}),
    ]
    assert planned[2].label == "tiny full stream kvacc_needle length=1024 depths=0.5 0-shot"
    assert planned[2].asked()["task_options"] == {"length": 1024, "depths": [0.5]}


def test_ids_without_options_are_those_of_before():
    (plain,) = specs(["kvacc_passkey"], models=["smollm2-135m"])
    # As published in leaderboard/quickstart before there were options.
    assert plain.cell_id == "2200ea99c794c44e"
    assert "task_options" not in plain.asked()
    (same,) = specs([{"name": "kvacc_passkey", "length": 512, "items": 20}], models=["smollm2-135m"])
    assert same.cell_id == plain.cell_id
    ids = {
        spec.cell_id
        for options in ({}, {"length": 600}, {"items": 3}, {"depths": [0]}, {"data_seed": 2})
        for spec in specs([{"name": "kvacc_passkey", **options}])
    }
    assert len(ids) == 5


def test_the_group_stands_for_its_tasks_with_the_options_that_they_take():
    planned = specs([{"name": "retention", "length": 1024, "depths": [0.25]}])
    assert [spec.task for spec in planned] == list(GROUPS["retention"])
    options = {spec.task: spec.task_options for spec in planned}
    assert options["kvacc_needle"] == {"length": 1024, "depths": [0.25]}
    assert options["kvacc_word_count_generate"] == {"length": 1024}
    assert len(specs(["retention"])) == len(specs(["retention", "kvacc_needle"])) == 22


def test_mistakes_are_named_with_their_place(write):
    path = write(
        """\
tasks:
  - name: kvacc_needle
    lenght: 512
  - name: kvacc_keyvalue
    length: [512, 100]
    facts: 6
  - {name: piqa, length: 512}
  - {nam: kvacc_needle}
  - {name: retention, depth: [0.5]}
  - {name: auto, length: 512}
  - kvacc_neddle
"""
    )
    with pytest.raises(KvaccError) as caught:
        load_config(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 9, lines
    for place, what in [
        ("6:5: tasks.0.lenght", "did you mean 'length'"),
        ("8:19: tasks.1.length.1", "length=100 is refused"),
        ("9:5: tasks.1.facts", "facts=6 is refused for kvacc_keyvalue"),
        ("10:18: tasks.2.length", "piqa takes no options"),
        ("11:5: tasks.3.name", "is missing"),
        ("12:23: tasks.4.depth", "did you mean 'depths'"),
        ("13:18: tasks.5.length", "tasks: auto takes no options"),
        ("14:5: tasks.6", "did you mean 'kvacc_needle'"),
    ]:
        assert any(f"cfg.yaml:{place}: " in line and what in line for line in lines), (place, lines)


def test_task_options_of_the_command_line_go_to_the_tasks_that_take_them(write):
    path = write("tasks: [piqa, kvacc_needle, {name: kvacc_multi_needle, length: 300, facts: 5}]\n")
    loaded = load_config(path, task_options=["length=1024", "facts=6", "depths=[0,1]"])
    assert loaded.asked_tasks() == [
        ("piqa", {}),
        ("kvacc_needle", {"length": 1024, "depths": [0, 1]}),
        ("kvacc_multi_needle", {"length": 1024, "facts": 6, "depths": [0, 1]}),
    ]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("length", "--task-option length: write OPTION=VALUE"),
        ("lenght=512", "has the option 'lenght' (did you mean 'length'?)"),
        ("length=[", "--task-option length=[: "),
        ("length=7", "--task-option length=7: tasks.1.length: length=7 is refused"),
        ("facts=4", "has the option 'facts'"),
    ],
)
def test_wrong_task_options_of_the_command_line(write, word, says):
    with pytest.raises(KvaccError) as caught:
        load_config(write("tasks: [piqa, kvacc_needle]\n"), task_options=[word])
    assert says in str(caught.value)
    with pytest.raises(KvaccError, match="kvacc_mini_copa takes no options"):
        load_config(write("tasks: kvacc_mini_copa\n"), task_options=["length=512"])


def test_filler_is_known_by_its_content_and_not_by_its_place(tmp_path, write):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("It rained all day. " * 900)
    path = write("tasks: [{name: kvacc_passkey, filler: books}]\n")
    (spec,) = [spec for spec in plan_cells(load_config(path)) if spec.strategy.name == "full"]
    assert spec.task_options["filler"].startswith("books@") and str(tmp_path) not in str(spec.asked())
    assert spec.task_settings == {"filler": str(tmp_path / "books")}
    with pytest.raises(KvaccError, match=r"cfg.yaml:4:31: tasks.0.filler: no file or folder .*nowhere"):
        load_config(write("tasks: [{name: kvacc_passkey, filler: nowhere}]\n"))


# ------------------------------------------------------------ from end to end


class WordTokenizer:
    """Counts words; ``size`` tokens each."""

    def __init__(self, size: int) -> None:
        self.size = size

    def encode(self, text: str) -> list[int]:
        return [0] * (self.size * len(text.split()))


def run(tasks, folder, monkeypatch, **changes):
    values = {"models": ["one"], "strategies": ["full", {"name": "recent", "budget": 0.2}], **changes}
    config = config_from({**values, "protocols": ["context"], "tasks": tasks})
    monkeypatch.setattr(sweep, "_load_model", lambda model, config: FakeLM())
    monkeypatch.setattr(
        sweep, "_load_tokenizer", lambda model: WordTokenizer({"one": 1, "two": 2}[model.pretrained])
    )
    report = run_sweep(config, folder, console=Console(file=io.StringIO()))
    assert not report.failed
    return results.read_cells(folder)


def test_each_model_gets_documents_of_its_own_tokens(tmp_path, monkeypatch):
    tasks = [{"name": "kvacc_needle", "items": 2, "length": 300}]
    cells = run(tasks, tmp_path, monkeypatch, models=["one", "two"])
    prints = {cell.spec.model["pretrained"]: cell.task.data_fingerprint for cell in cells}
    assert len(cells) == 4 and prints["one"] != prints["two"]
    # The fake backend cuts prompts to 40 words: what was cut and kept is the whole prompt.
    for cell in cells:
        size = {"one": 1, "two": 2}[cell.spec.model["pretrained"]]
        for row in cell.load_samples().to_pylist():
            assert 294 <= size * (row["prompt_tokens"] + row["truncated_tokens"]) <= 300


def test_a_cell_says_where_facts_lay_and_how_long_the_prompt_was(tmp_path, monkeypatch):
    tasks = [
        {"name": "kvacc_passkey", "items": 2, "length": 300, "depths": [0, 0.25]},
        {"name": "kvacc_word_count", "items": 1, "length": 300},
        "kvacc_mini_copa",
    ]
    by_task = {cell.task.name: cell for cell in run(tasks, tmp_path, monkeypatch, limit=4)}
    passkey = by_task["kvacc_passkey"]
    assert passkey.spec.task_options == {"length": 300, "depths": [0, 0.25], "items": 2}
    table = passkey.load_samples()
    assert table["depth"].to_pylist() == [d for d in (0.0, 0.25, 0.0, 0.25) for _ in range(4)]
    assert set(table["length"].to_pylist()) == {300}
    assert {"acc", "graded", "acc_depth_0", "graded_depth_25"} <= set(passkey.scores)
    assert passkey.task.chance == 0.25 and passkey.task.version == "2.0"
    words = by_task["kvacc_word_count"].load_samples()
    assert set(words["depth"].to_pylist()) == {None} and set(words["length"].to_pylist()) == {300}
    copa = by_task["kvacc_mini_copa"]
    assert set(copa.load_samples()["length"].to_pylist()) == {None} and copa.spec.task_options == {}


def test_finished_cells_are_found_again_and_changed_documents_refused(tmp_path, monkeypatch):
    tasks = [{"name": "kvacc_passkey", "items": 1, "length": [300, 400]}]
    before = run(tasks, tmp_path, monkeypatch)
    assert run(tasks, tmp_path, monkeypatch) == before and len(before) == 4
    # The same model with another tokenizer has other documents.
    monkeypatch.setattr(sweep, "_load_tokenizer", lambda model: WordTokenizer(2))
    config = config_from(
        {"models": ["one"], "strategies": ["full", {"name": "recent", "budgets": [0.2, 0.4]}],
         "protocols": ["context"], "tasks": tasks}
    )  # fmt: skip
    with pytest.raises(KvaccError, match="documents of task 'kvacc_passkey' have changed"):
        run_sweep(config, tmp_path, console=Console(file=io.StringIO()), extend=True)


def test_lengths_are_never_compared_or_averaged_together(tmp_path, monkeypatch):
    tasks = [
        {"name": name, "items": 2, "length": [300, 400]}
        for name in ("kvacc_passkey", "kvacc_needle_generate")
    ]
    rows = build(run(tasks, tmp_path, monkeypatch))
    assert len({row.group for row in rows}) == 4 and len(rows) == 8
    assert all(row.graded is not None for row in rows)
    for row in rows:
        assert row.is_full or row.difference is not None, row.why_no_difference
    text = to_markdown(rows)
    assert "## one (), kvacc_passkey length=300 items=2, 0-shot" in text.replace("float32", "")
    found = averages(rows)
    assert [(entry.task_options["length"], entry.label) for entry in found] == [
        (300, "full"), (300, "recent"), (400, "full"), (400, "recent"),
    ]  # fmt: skip
    for entry in found:
        mine = [
            row for row in rows
            if row.task_options["length"] == entry.task_options["length"] and row.label == entry.label
        ]  # fmt: skip
        assert entry.tasks == ["kvacc_needle_generate", "kvacc_passkey"]
        assert entry.graded == pytest.approx(100 * sum(row.graded for row in mine) / 2, abs=1e-4)
        assert entry.score == pytest.approx(100 * sum(row.score for row in mine) / 2, abs=1e-4)
    assert json.loads(to_json(rows))["rows"][0]["task_options"] == {"length": 300, "items": 2}
    assert '"{""items"": 2, ""length"": 300}"' in to_csv(rows)


def test_a_row_says_when_full_ran_at_another_length(tmp_path, monkeypatch):
    here, there = tmp_path / "a", tmp_path / "b"
    run([{"name": "kvacc_passkey", "items": 1, "length": 300}], here, monkeypatch, strategies=["full"])
    run(
        [{"name": "kvacc_passkey", "items": 1, "length": 400}], there, monkeypatch,
        strategies=[{"name": "recent", "budget": 0.2}],
    )  # fmt: skip
    rows = build(results.read_cells([here, there]))
    (row,) = [row for row in rows if not row.is_full]
    assert row.why_no_difference == (
        "full ran with task options length=300 items=1, this with length=400 items=1"
    )


def test_the_command_line_takes_task_options(tmp_path, write, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "_load_model", lambda model, config: FakeLM())
    monkeypatch.setattr(sweep, "_load_tokenizer", lambda model: WordTokenizer(1))
    words = ["run", write("tasks: kvacc_passkey\n"), "--output", "out"]
    done = CliRunner().invoke(cli, [*words, "--task-option", "length=300", "--task-option", "items=1"])
    assert done.exit_code == 0, done.output
    assert "kvacc_passkey length=300 items=1" in done.stdout
    wrong = CliRunner().invoke(cli, [*words, "--task-option", "length=3"])
    assert wrong.exit_code == 2 and "length=3 is refused" in wrong.stderr


def test_the_packaged_suite_asks_for_two_hundred_prompts():
    planned = plan_cells(load_config("retention"))
    strategies = {repr(spec.strategy) for spec in planned}
    assert len(strategies) == 4 and len(planned) == 4 * len(GROUPS["retention"])
    assert {spec.task_options["length"] for spec in planned} == {1024}
    assert all(spec.task_options["items"] == 3 for spec in planned)


def test_tasks_shows_options_and_an_example():
    shown = CliRunner().invoke(cli, ["tasks", "kvacc_multi_needle"]).output
    for part in ("4 to 64 needles", "256 to 131072", "0.1, 0.5, 0.9", "right: ", "wrong: ", "office is"):
        assert part in shown, shown
    assert "kvacc_word_count_generate" in CliRunner().invoke(cli, ["tasks", "retention"]).output
