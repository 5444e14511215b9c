"""Configurations: every mistake is reported with its place; cells have stable, distinct ids."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest

from kvacc import config, task_catalog
from kvacc.config import config_from, load_config, loading, plan_cells
from kvacc.errors import KvaccError
from kvacc.strategy import make_strategy

MINIMAL = "models: [tiny]\nstrategies: [full]\ntasks: [kvacc_mini_copa]\n"


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("KVACC_DATA_DIR", raising=False)


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "cfg.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def error_of(path: str, *overrides: str) -> str:
    with pytest.raises(KvaccError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def base(**changes):
    values = {
        "models": ["tiny"],
        "strategies": ["full", {"name": "h2o", "budgets": [0.5, 8]}],
        "tasks": ["kvacc_mini_copa"],
        **changes,
    }
    return config_from(values)


def test_a_minimal_file_gets_the_defaults(write):
    loaded = load_config(write(MINIMAL))
    assert loaded.name == "cfg"
    assert loaded.models[0].pretrained == "tiny"
    assert loaded.models[0].dtype == "float32" and loaded.models[0].trust_remote_code is False
    assert (loaded.protocols, loaded.shots, loaded.limit, loaded.seed) == (["stream"], [0], None, 1234)


def test_every_kind_of_mistake_is_reported_once_with_its_place(write):
    path = write(
        "models:\n"  # 1
        "  - {pretrained: tiny, dtpye: float32}\n"  # 2
        "  - pretrained: other\n"
        "    dtype: float23\n"  # 4
        "strategies:\n"
        "  - name: h2o\n"  # 6
        "    budgets: [0.5, 2.0, 0]\n"
        "    recent_fracton: 0.5\n"  # 8
        "  - {name: h20, budget: 0.2}\n"
        "protocols: [stram]\n"  # 10
        "tasks: [piqaa]\n"
        "limit: ten\n"  # 12
        "shotz: [0]\n"
    )
    lines = error_of(path).splitlines()
    assert lines[0] == f"10 mistakes in {path}:"
    found = [line.removeprefix(f"{path}:") for line in lines[1:]]
    assert found[0].startswith("2:24: models.0.dtpye: unknown key (did you mean 'dtype'?)")
    assert found[1].startswith("4:5: models.1.dtype: unknown dtype 'float23' (did you mean 'float32'?)")
    assert found[2].startswith("8:5: strategies.0.recent_fracton: strategy 'h2o' has no option")
    assert "(did you mean 'recent_fraction'?)" in found[2]
    assert found[3].startswith("7:20: strategies.0.budgets.1: budget 2 as a fraction is above 1")
    assert found[4].startswith("7:25: strategies.0.budgets.2: budget 0 keeps nothing")
    assert found[5].startswith("9:6: strategies.1.name: unknown strategy 'h20' (did you mean 'h2o'?)")
    assert found[6].startswith("10:13: protocols.0: unknown protocol 'stram' (did you mean 'stream'?)")
    assert found[7].startswith("11:9: tasks.0: unknown task 'piqaa' (did you mean 'piqa'?)")
    assert found[8].startswith("12:1: limit: 'ten' is refused: input should be a valid integer")
    assert found[9].startswith("13:1: shotz: unknown key (did you mean 'shots'?)")
    assert len(found) == 10


@pytest.mark.parametrize(
    ("edit", "place", "message"),
    [
        ("limit: 0", "4:1: limit", "greater than or equal to 1"),
        ("limit: true", "4:1: limit", "True is refused"),
        ("limit: 2.5", "4:1: limit", "valid integer"),
        ("shots: [0, -1]", "4:12: shots.1", "greater than or equal to 0"),
        ("shots: [0, 5, 0]", "4:15: shots.2", "0 is listed twice; keep one"),
        ("protocols: []", "4:1: protocols", "at least 1 item"),
        ("shotz: [0]", "4:1: shotz", "unknown key (did you mean 'shots'?)"),
        ("seed: null", "4:1: seed", "None is refused"),
        ("name: {a: 1}", "4:1: name", "valid string"),
        ("limit: 5\nlimit: 6", "5:1: limit", "given twice, first at"),
        ("7: x", "4:1", "7 is no name"),
        ("limit: !!python/name:os.system x", "4:1: limit", "not YAML: could not determine a constructor"),
        ("seed: &a [*a]", "4:7: seed.0", "refers to itself"),
        ("limit: [1", "5:1", "not YAML"),
        ("name: x\n\tlimit: 3", "5:1", "indent with spaces"),
        ("data_dir: nowhere", "4:1: data_dir", "no folder"),
    ],
)
def test_one_mistake_is_one_line_that_names_its_place(write, edit, place, message):
    path = write(MINIMAL + edit + "\n")
    error = error_of(path)
    assert error.startswith(f"{path}:{place}: "), error
    assert message in error
    assert "\n" not in error


@pytest.mark.parametrize(
    ("entry", "place", "message"),
    [
        ("{name: h2o}", "1:15: strategies.0", "needs a budget"),
        ("{name: h2o, budget: 0}", "1:27: strategies.0.budget", "keeps nothing"),
        ("{name: h2o, budget: -0.2}", "1:27: strategies.0.budget", "keeps nothing"),
        ("{name: h2o, budget: 1.2}", "1:27: strategies.0.budget", "above 1"),
        ("{name: h2o, budget: 120%}", "1:27: strategies.0.budget", "above 1"),
        ("{name: h2o, budget: many}", "1:27: strategies.0.budget", "is not a number"),
        ("{name: h2o, budgets: []}", "1:27: strategies.0.budgets", "at least 1 item"),
        ("{name: h2o, budgets: [0.5, 50%]}", "1:42: strategies.0.budgets.1", "the same as 0.5"),
        ("{name: h2o, budget: 0.5, budgets: [0.5]}", "1:40: strategies.0.budgets", "not both"),
        (
            "{name: h2o, budget: 0.5, budget_of: promt}",
            "1:40: strategies.0.budget_of",
            "did you mean 'prompt'",
        ),
        ("{name: h2o, budget: 0.5, scores: globl}", "1:40: strategies.0.scores", "did you mean 'global'"),
        (
            "{name: h2o, budget: 0.5, recent_fraction: 3}",
            "1:40: strategies.0.recent_fraction",
            "between 0 and 1",
        ),
        (
            "{name: h2o, budget: 0.5, recent_fraction: no}",
            "1:40: strategies.0.recent_fraction",
            "valid number",
        ),
        (
            "{name: h2o, budget: 0.5, recent_fraction: '1'}",
            "1:40: strategies.0.recent_fraction",
            "valid number",
        ),
        ("{name: streaming_llm, budget: 4}", "1:37: strategies.0.budget", "fewer than 4 sinks + 1 recent"),
        ("{name: streaming_llm, budget: 9, sinks: 9}", "1:37: strategies.0.budget", "fewer than 9 sinks"),
        ("{name: full, budget: 0.5}", "1:28: strategies.0.budget", "keeps every entry"),
        ("{budget: 0.5}", "1:15: strategies.0.name", "is missing"),
        ("fulll", "1:15: strategies.0.name", "did you mean 'full'"),
        ("full, {name: full}", "1:21: strategies.1", "also planned by strategies.0"),
    ],
)
def test_a_wrong_strategy_is_refused_before_anything_runs(write, entry, place, message):
    path = write(f"strategies: [ {entry} ]\nmodels: [tiny]\ntasks: [kvacc_mini_copa]\n")
    error = error_of(path)
    assert error.startswith(f"{path}:{place}: "), error
    assert message in error and "\n" not in error


def test_a_protocol_that_a_strategy_lacks_is_refused(write):
    path = write(
        "models: [tiny]\nprotocols: [stream, serve]\ntasks: [kvacc_mini_copa]\n"
        "strategies:\n  - full\n  - {name: h2o, budget: 0.5, scores: global}\n"
    )
    error = error_of(path)
    assert error.startswith(f"{path}:6:5: strategies.1: ")
    assert "does not support protocol 'serve'; it supports: stream" in error


def test_one_entry_needs_no_list(write):
    loaded = load_config(
        write("models: tiny\nstrategies: full\nprotocols: serve\ntasks: kvacc_mini_copa\nshots: 5\n")
    )
    assert loaded.strategies[0].name == "full"
    assert (loaded.protocols, loaded.tasks, loaded.shots) == (["serve"], ["kvacc_mini_copa"], [5])


def test_anchors_and_merged_keys_work(write):
    text = MINIMAL.replace(
        "[full]",
        "\n  - &h {name: h2o, budget: 0.5}\n  - {<<: *h, budget: 0.2}\n  - {<<: *h, recent_fracton: 1}",
    )
    error = error_of(write(text))
    assert re.search(r":5:14: strategies\.2\.recent_fracton", error)
    loaded = load_config(write(text.replace("recent_fracton: 1", "recent_fraction: 1")))
    assert [str(e.strategies()[0].budget) for e in loaded.strategies] == ["0.5", "0.2", "0.5"]
    assert loaded.strategies[2].strategies()[0].recent_fraction == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("- a\n- b\n", "is no mapping"),
        ("a: b: c\n", "not YAML"),
        ("x: 1\n---\ny: 2\n", "not YAML"),
    ],
)
def test_a_file_that_is_no_configuration(write, text, message):
    error = error_of(write(text))
    assert message in error and "\n" not in error


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "cfg.yaml").write_bytes(b"name: \xff\n")
    assert "is not UTF-8" in error_of(str(tmp_path / "cfg.yaml"))
    assert "is a folder" in error_of(str(tmp_path))


def test_a_missing_file_names_the_packaged_ones(tmp_path, monkeypatch):
    folder = tmp_path / "packaged"
    folder.mkdir()
    (folder / "quickstart.yaml").write_text(MINIMAL)
    monkeypatch.setattr(loading, "packaged_configs", lambda: {"quickstart": folder / "quickstart.yaml"})
    monkeypatch.chdir(tmp_path)
    assert "did you mean 'quickstart'?" in error_of("quickstrat")
    assert "no configuration file" in error_of("somewhere/quickstart.yaml")
    for name in ("quickstart", "quickstart.yaml", "configs/quickstart.yaml"):
        assert load_config(name).name == "quickstart"
    assert error_of("quickstart", "limit=x").startswith("--set limit=x: limit: ")


def test_every_packaged_configuration_is_valid():
    for name in config.packaged_configs():
        assert load_config(name).name == name


def test_overrides(write):
    path = write(MINIMAL.replace("[full]", "[full, {name: h2o, budgets: [0.5]}]"))
    loaded = load_config(
        path,
        [
            "strategies.1.budgets=[0.25, 16]",
            "strategies.1.budgets.0=20%",
            "strategies.1.recent_fraction=1",
            "strategies.2={name: recent, budget: 0.5}",
            "limit=7",
            "models.0=other",
            "shots=[0, 5]",
        ],
    )
    assert [str(s.budget) for s in loaded.strategies[1].strategies()] == ["0.2", "16"]
    assert loaded.strategies[1].strategies()[0].recent_fraction == 1.0
    assert loaded.strategies[2].name == "recent"
    assert (loaded.limit, loaded.models[0].pretrained, loaded.shots) == (7, "other", [0, 5])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("limit", "write PATH=VALUE"),
        ("=3", "write PATH=VALUE"),
        ("a..b=3", "write PATH=VALUE"),
        ("limit=[1", "not YAML"),
        ("limt=3", "limt: unknown key (did you mean 'limit'?)"),
        ("strategies.4.budget=0.5", "'4' is not one of its 1 entries"),
        ("strategies.-1=full", "'-1' is not one of its 1 entries"),
        ("tasks.0.name=x", "has no part 'name'; set tasks.0 itself"),
        ("strategies.0={name: h2o, budget: 2.0}", "strategies.0.budget: budget 2 as a fraction is above 1"),
    ],
)
def test_a_wrong_override_is_named(write, override, message):
    error = error_of(write(MINIMAL), override)
    assert error.startswith(f"--set {override}: "), error
    assert message in error and "\n" not in error


def test_folders_stand_relative_to_the_file_and_overrides_to_the_working_folder(write, tmp_path, monkeypatch):
    for folder in ("data", "models/m", "elsewhere/data"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = write(MINIMAL.replace("[tiny]", "[models/m, ./gone, org/name]") + "data_dir: ./data\n")
    loaded = load_config(path)
    assert loaded.data_dir == str(tmp_path / "data")
    names = [model.pretrained for model in loaded.models]
    assert names == [str(tmp_path / "models/m"), str(tmp_path / "gone"), "org/name"]
    assert load_config(path, ["data_dir=data"]).data_dir == str(tmp_path / "elsewhere/data")
    monkeypatch.setenv("KVACC_DATA_DIR", str(tmp_path / "elsewhere/data"))
    assert load_config(path).data_dir == str(tmp_path / "data")
    assert load_config(path, ["data_dir=null"]).data_dir == str(tmp_path / "elsewhere/data")
    monkeypatch.setenv("KVACC_DATA_DIR", str(tmp_path / "nowhere"))
    assert error_of(path, "data_dir=null").startswith(
        "environment variable KVACC_DATA_DIR: data_dir: no folder"
    )


def test_the_plan_multiplies_out_with_full_first_and_once():
    loaded = base(
        models=["a", "b"],
        strategies=[{"name": "h2o", "budgets": [0.5, 8]}, "full"],
        protocols=["context", "stream"],
        shots=[0, 5],
    )
    cells = plan_cells(loaded)
    one_model = cells[: len(cells) // 2]
    assert {cell.model.pretrained for cell in one_model} == {"a"}
    # full: 2 shots under one protocol; h2o: 2 budgets x 2 protocols x 2 shots.
    assert [cell.strategy.name for cell in one_model] == ["full"] * 2 + ["h2o"] * 8
    assert {cell.protocol for cell in one_model[:2]} == {"context"}
    assert len({cell.cell_id for cell in cells}) == len(cells) == 20


def test_an_id_depends_on_everything_that_was_asked_for_and_on_nothing_else():
    (cell,) = plan_cells(base(strategies=[{"name": "h2o", "budget": 0.5}]))
    assert re.fullmatch(r"[0-9a-f]{16}", cell.cell_id)
    other_strategies = [
        make_strategy("h2o", 0.25),
        make_strategy("h2o", 1),
        make_strategy("h2o", 1.0),
        make_strategy("h2o", 0.5, "seen"),
        make_strategy("h2o", 0.5, recent_fraction=0.25),
        make_strategy("h2o", 0.5, scores="full_row"),
        make_strategy("recent", 0.5),
        make_strategy("full"),
    ]
    changed = [dataclasses.replace(cell, strategy=strategy) for strategy in other_strategies]
    for change in (
        {"protocol": "serve"},
        {"task": "kvacc_mini_piqa"},
        {"shots": 1},
        {"limit": 3},
        {"seed": 1},
        {"tail_tokens": 8},
        {"source": "hub"},
        {"model": cell.model.model_copy(update={"revision": "abc"})},
        {"model": cell.model.model_copy(update={"dtype": "bfloat16"})},
        {"model": cell.model.model_copy(update={"pretrained": "other"})},
    ):
        changed.append(dataclasses.replace(cell, **change))
    ids = [cell.cell_id, *(c.cell_id for c in changed)]
    assert len(set(ids)) == len(ids)
    same = [
        dataclasses.replace(cell, strategy=make_strategy("h2o", "50%")),
        dataclasses.replace(cell, strategy=make_strategy("h2o", 0.5, recent_fraction=0.5)),
        dataclasses.replace(cell, why_source="because"),
        dataclasses.replace(cell, model=cell.model.model_copy(update={"device": "cuda:1"})),
    ]
    assert {c.cell_id for c in same} == {cell.cell_id}


def test_an_id_is_the_same_in_another_process(write):
    path = write(MINIMAL.replace("[full]", "[{name: h2o, budget: 0.5}]"))
    code = "import sys; from kvacc.config import *; print(plan_cells(load_config(sys.argv[1]))[0].cell_id)"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == plan_cells(load_config(path))[0].cell_id


def test_reading_a_configuration_imports_neither_torch_nor_transformers():
    heavy = "{'torch', 'transformers', 'datasets'}"
    code = f"import sys, kvacc.config, kvacc.sweep; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_auto_takes_the_benchmarks_of_the_data_folder(tmp_path):
    (tmp_path / "copa").mkdir()
    (tmp_path / "copa" / "validation.jsonl").write_text("{}\n")
    cells = plan_cells(base(strategies=["full"], tasks="auto", data_dir=str(tmp_path)))
    assert [(cell.task, cell.source) for cell in cells] == [("copa", "folder")]
    assert str(tmp_path) in cells[0].why_source


def test_auto_takes_the_hub_when_it_answers_and_else_the_embedded_tasks_and_asks_once(monkeypatch):
    asked = []

    def answer(*arguments):
        asked.append(arguments)
        return (len(asked) == 1, "the hub answers" if len(asked) == 1 else "no network")

    monkeypatch.setattr(task_catalog, "hub_reachable", answer)
    loaded = base(strategies=["full"], tasks=["auto", "kvacc_mini_copa"])
    cells = plan_cells(loaded)
    assert [cell.task for cell in cells] == [*task_catalog.BENCHMARKS, "kvacc_mini_copa"]
    assert {cell.why_source for cell in cells[:-1]} == {"the hub answers"}
    cells = plan_cells(loaded)
    assert {cell.task for cell in cells} == set(task_catalog.SMOKE_TESTS)
    assert {cell.source for cell in cells} == {"embedded"}
    assert "no benchmark can be reached: no network" in cells[0].why_source
    assert len(asked) == 2


def test_a_task_that_the_data_folder_lacks_is_named(tmp_path):
    with pytest.raises(KvaccError, match=r"has no piqa/validation\.jsonl.*kvacc_mini_piqa"):
        plan_cells(base(tasks=["piqa"], data_dir=str(tmp_path)))


def test_values_given_in_python_are_checked_alike():
    with pytest.raises(KvaccError, match=r"^configuration: strategies.0.budget: budget 0 keeps nothing"):
        base(strategies=[{"name": "h2o", "budget": 0}])
