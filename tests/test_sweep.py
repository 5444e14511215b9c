"""Sweeps: resumable at any time, harmless side by side, and never mixed up."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from kvacc import evaluation, results, sweep, sweep_progress
from kvacc.config import config_from, plan_cells
from kvacc.errors import KvaccError
from kvacc.sweep import run_sweep
from kvacc.sweep_progress import SweepProgress, as_duration

BACKEND = Path(__file__).with_name("fake_backend.py")
FakeLM = runpy.run_path(str(BACKEND))["FakeLM"]
NOBODY = 65534


@pytest.fixture(autouse=True)
def fingerprint(monkeypatch):
    """What the loaded model is; change it to change the model."""
    found = {"name": "fake"}
    monkeypatch.delenv("KVACC_DATA_DIR", raising=False)
    monkeypatch.setattr(
        evaluation, "fingerprint_of", lambda lm, spec: {**found, "name": spec.model.pretrained}
    )
    return found


def config_of(**changes):
    return config_from(
        {
            "models": ["fake"],
            "strategies": [{"name": "recent", "budgets": [2, 0.5]}, "full"],
            "tasks": ["kvacc_mini_copa", "kvacc_mini_piqa"],
            "limit": 6,
            **changes,
        }
    )


class Loader:
    """Stands for loading models, and counts."""

    def __init__(self, make=FakeLM):
        self.make, self.loaded, self.backends = make, [], []

    def __call__(self, model, config):
        self.loaded.append(model.pretrained)
        self.backends.append(self.make())
        return self.backends[-1]


def go(config, folder, load=None, **options):
    """Runs a sweep; returns its report and what it printed."""
    text = io.StringIO()
    report = run_sweep(
        config, folder, console=Console(file=text, width=80), load_model=load or Loader(), **options
    )
    return report, text.getvalue()


def contents(folder):
    """Every cell's results, without times."""
    return {
        cell.cell_id: (cell.scores, cell.measured, cell.spec, cell.load_samples().to_pylist())
        for cell in results.read_cells(folder)
    }


def test_a_sweep_computes_every_planned_cell_with_full_first_and_one_load_per_model(tmp_path):
    config = config_of(models=["one", "two"])
    load = Loader()
    report, text = go(config, tmp_path / "out", load)
    planned = plan_cells(config)
    assert report.computed == [spec.cell_id for spec in planned]
    assert (report.planned, report.skipped, report.failed) == (12, [], {})
    assert load.loaded == ["one", "two"]
    names = [strategy.name for strategy, _, _ in load.backends[0].used]
    assert names == ["full"] * 2 + ["recent"] * 4
    assert {cell.cell_id for cell in results.read_cells(tmp_path / "out")} == set(report.computed)
    assert "data: kvacc_mini_copa, kvacc_mini_piqa from kvacc itself: embedded in kvacc" in text
    assert re.search(
        r"\[12/12\] two recent 0\.5 stream kvacc_mini_piqa 0-shot: acc 0\.\d+ ± 0\.\d+, kept 0\.\d+", text
    )


def test_the_line_of_a_cell_says_what_was_moved_only_where_something_was(tmp_path):
    class Selecting(FakeLM):
        def _record(self, request, context, scored):
            answer = super()._record(request, context, scored)
            if self.strategy.has_budget:
                record = dataclasses.replace(self.records[-1], moved_bytes=1536.0, recall=0.934)
                self.records[-1] = record
            return answer

    _, text = go(config_of(), tmp_path, Loader(Selecting))
    lines = " ".join(text.split()).split("[")
    moved = [line for line in lines if ", moved 1.5 KiB/token, recall 93.4%, acted on" in line]
    assert len(moved) == 4 and all(" recent " in line for line in moved)
    assert text.count("moved") == 4


def test_run_json_says_what_was_asked_for_before_anything_is_computed(tmp_path):
    seen = {}

    def load(model, config):
        seen.update(json.loads((tmp_path / "run.json").read_text()))
        return FakeLM()

    config = config_of()
    go(config, tmp_path, load)
    (run,) = seen["runs"]
    assert set(run["cells"]) == {spec.cell_id for spec in plan_cells(config)}
    assert run["config"]["limit"] == 6 and run["config"]["strategies"][0]["budgets"] == [2, 0.5]


def test_finished_cells_are_skipped_and_no_model_is_loaded_for_nothing(tmp_path):
    first, _ = go(config_of(), tmp_path)
    before = contents(tmp_path)
    load = Loader()
    second, text = go(config_of(), tmp_path, load)
    assert load.loaded == [] and second.computed == []
    assert set(second.skipped) == set(first.computed)
    assert "6 of 6 cells are finished already" in text
    assert contents(tmp_path) == before


def test_a_damaged_cell_is_named_and_computed_again(tmp_path):
    report, _ = go(config_of(), tmp_path)
    before = contents(tmp_path)
    edited, truncated = (tmp_path / "cells" / cell_id for cell_id in report.computed[:2])
    (edited / "cell.json").write_text((edited / "cell.json").read_text().replace('"limit": 6', '"limit": 7'))
    samples = (truncated / "samples.parquet").read_bytes()
    (truncated / "samples.parquet").write_bytes(samples[: len(samples) // 2])
    again, text = go(config_of(), tmp_path)
    assert set(again.computed) == {edited.name, truncated.name}
    assert len(again.damaged) == 2 and f"computed again: {edited / 'cell.json'} was edited" in text
    assert contents(tmp_path) == before


class Interrupted(FakeLM):
    """Stopped from the keyboard in the third cell."""

    def loglikelihood(self, requests):
        if len(self.prompts) == 2:
            raise KeyboardInterrupt
        return super().loglikelihood(requests)


def test_an_interrupted_sweep_keeps_finished_cells_and_goes_on(tmp_path):
    text = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        run_sweep(config_of(), tmp_path, console=Console(file=text), load_model=Loader(Interrupted))
    assert "stopped with 2 of 6 cells done; the same command goes on from here" in " ".join(
        text.getvalue().split()
    )
    assert len(contents(tmp_path)) == 2
    report, _ = go(config_of(), tmp_path)
    assert len(report.computed) == 4 and len(report.skipped) == 2
    go(config_of(), tmp_path / "whole")
    assert contents(tmp_path / "cells") == contents(tmp_path / "whole")


YAML = """
models: [fake]
strategies: [full, {name: recent, budgets: [2, 0.5]}]
tasks: [kvacc_mini_copa, kvacc_mini_piqa]
shots: [2]
limit: 6
"""


def start(config: Path, folder: Path, seconds: float) -> subprocess.Popen:
    command = [sys.executable, str(BACKEND), str(config), str(folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_a_sweep_killed_in_a_cell_resumes_to_an_equal_result(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(YAML)
    folder = tmp_path / "out"
    process = start(config, folder, seconds=1.0)
    deadline = time.monotonic() + 120
    while len(list(folder.glob("cells/*/cell.json"))) < 2:
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.02)
    time.sleep(0.3)  # into the next cell
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = set(contents(folder))
    assert 2 <= len(done) < 6
    resumed = start(config, folder, seconds=0.0)
    output, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, output
    assert f"{len(done)} of 6 cells are finished already" in output
    whole = start(config, tmp_path / "whole", seconds=0.0)
    assert whole.wait(timeout=120) == 0
    assert contents(folder) == contents(tmp_path / "whole")
    assert not list(folder.rglob(".*"))


@pytest.mark.slow
def test_two_sweeps_at_once_in_one_folder_do_no_harm(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(YAML)
    folder = tmp_path / "out"
    both = [start(config, folder, seconds=0.1) for _ in range(2)]
    outputs = [process.communicate(timeout=240)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    alone = start(config, tmp_path / "alone", seconds=0.0)
    assert alone.wait(timeout=120) == 0
    assert contents(folder) == contents(tmp_path / "alone")
    assert len(json.loads((folder / "run.json").read_text())["runs"]) == 1
    assert not list(folder.rglob(".*"))


def test_a_cell_that_another_sweep_finishes_meanwhile_is_not_computed_again(tmp_path):
    class Slow(FakeLM):
        def loglikelihood(self, requests):
            if not self.prompts:
                go(config_of(), tmp_path)
            return super().loglikelihood(requests)

    load = Loader(Slow)
    report, text = go(config_of(), tmp_path, load)
    assert len(load.backends[0].prompts) == 1
    assert len(report.skipped) == 5
    assert "finished by another sweep" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limit": 5}, "limit is 5 here but 6 there"),
        ({"seed": 1}, "seed is 1 here but 1234 there"),
        ({"shots": [0, 1]}, r"shots\.1 is 1 here but absent there"),
        (
            {"strategies": [{"name": "recent", "budgets": [2, 0.25]}, "full"]},
            r"budgets\.1 is 0\.25 here but 0\.5",
        ),
        ({"models": ["fake", "other"]}, r"models\.1\.pretrained is \"other\" here but absent there"),
    ],
)
def test_a_folder_of_another_configuration_is_refused(tmp_path, change, message):
    go(config_of(), tmp_path)
    before = contents(tmp_path)
    load = Loader()
    with pytest.raises(
        KvaccError, match=rf"holds a run of another configuration \(.*{message}.*--extend"
    ) as error:
        go(config_of(**change), tmp_path, load)
    assert "\n" not in str(error.value)
    assert load.loaded == [] and contents(tmp_path) == before


def test_settings_that_change_no_cell_are_not_another_configuration(tmp_path):
    go(config_of(), tmp_path)
    models = [{"pretrained": "fake", "device": "cpu"}]
    report, _ = go(config_of(name="renamed", models=models, max_batch_tokens=512), tmp_path)
    assert len(report.skipped) == 6


def test_extend_adds_cells_and_both_configurations_then_own_the_folder(tmp_path):
    go(config_of(), tmp_path)
    longer = config_of(strategies=["full", {"name": "recent", "budgets": [2, 0.5, 0.25]}])
    report, _ = go(longer, tmp_path, extend=True)
    assert len(report.computed) == 2 and len(report.skipped) == 6
    assert len(json.loads((tmp_path / "run.json").read_text())["runs"]) == 2
    for config in (config_of(), longer):
        assert go(config, tmp_path)[0].computed == []


def test_a_folder_of_another_version_of_kvacc_is_refused(tmp_path, monkeypatch):
    go(config_of(), tmp_path)
    monkeypatch.setattr(sweep.kvacc, "__version__", "99.0")
    with pytest.raises(KvaccError, match="holds a run of kvacc .*, and this is 99.0"):
        go(config_of(), tmp_path, extend=True)


def test_a_damaged_run_file_is_refused(tmp_path):
    (tmp_path / "run.json").write_text('{"schema_version": 1')
    with pytest.raises(KvaccError, match=r"run\.json is damaged"):
        go(config_of(), tmp_path)


def test_a_changed_model_or_changed_documents_are_refused(tmp_path, fingerprint, monkeypatch):
    go(config_of(), tmp_path)
    longer = config_of(strategies=["full", {"name": "recent", "budgets": [2, 0.5, 0.25]}])
    fingerprint["content"] = "retrained"
    with pytest.raises(KvaccError, match="model 'fake' has changed since cell"):
        go(longer, tmp_path, extend=True)
    monkeypatch.setattr(sweep.task_catalog, "data_fingerprint", lambda task, limit=None: "edited")
    with pytest.raises(KvaccError, match="documents of task 'kvacc_mini_copa' have changed since cell"):
        go(longer, tmp_path, extend=True)


def test_an_unwritable_folder_is_refused_before_a_model_is_loaded(tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    tmp_path.chmod(0o755)
    load = Loader()
    is_root = os.geteuid() == 0
    if is_root:
        # Permissions bind everyone but root.
        for parent in tmp_path.parents:
            if not parent.stat().st_mode & 0o005:
                parent.chmod(parent.stat().st_mode | 0o005)
        os.seteuid(NOBODY)
    try:
        with pytest.raises(KvaccError, match="cannot write to output folder .*: Permission denied; choose"):
            go(config_of(), folder / "out", load)
        with pytest.raises(KvaccError, match="cannot write to output folder .*: Permission denied; choose"):
            go(config_of(), folder, load)
    finally:
        if is_root:
            os.seteuid(0)
    assert load.loaded == []


def test_an_output_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(KvaccError, match="is a file"):
        go(config_of(), tmp_path / "out")
    with pytest.raises(KvaccError, match="cannot write|is a file"):
        go(config_of(), tmp_path / "out" / "deeper")


def test_what_is_wrong_with_a_task_shows_before_the_folder_is_taken(tmp_path):
    load = Loader()
    with pytest.raises(KvaccError, match="ask for at most 47"):
        go(config_of(shots=[60]), tmp_path / "out", load)
    assert load.loaded == [] and not (tmp_path / "out").exists()


class Failing(FakeLM):
    def loglikelihood(self, requests):
        if self.strategy.name == "recent" and self.strategy.budget.is_fraction:
            raise KvaccError("this cell cannot be computed")
        return super().loglikelihood(requests)


def test_a_cell_that_fails_is_listed_and_the_others_are_computed(tmp_path):
    report, text = go(config_of(), tmp_path, Loader(Failing))
    assert len(report.computed) == 4
    assert list(report.failed) == [
        "fake recent 0.5 stream kvacc_mini_copa 0-shot",
        "fake recent 0.5 stream kvacc_mini_piqa 0-shot",
    ]
    assert "failed: fake recent 0.5 stream kvacc_mini_copa 0-shot: this cell cannot be computed" in text
    again, _ = go(config_of(), tmp_path)
    assert len(again.computed) == 2 and not again.failed


def test_running_out_of_memory_is_explained(tmp_path):
    import torch

    class Exhausted(FakeLM):
        def loglikelihood(self, requests):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    report, _ = go(config_of(tasks=["kvacc_mini_copa"]), tmp_path, Loader(Exhausted))
    assert len(report.failed) == 3
    assert all("set max_batch_tokens lower" in reason for reason in report.failed.values())


def test_a_defect_is_no_failed_cell(tmp_path):
    class Broken(FakeLM):
        def loglikelihood(self, requests):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        go(config_of(), tmp_path, Loader(Broken))


def test_the_backend_gets_what_the_configuration_says(monkeypatch, tmp_path):
    import kvacc.backend

    given = []

    def backend(**arguments):
        given.append(arguments)
        return FakeLM()

    monkeypatch.setattr(kvacc.backend, "KvaccLM", backend)
    models = [{"pretrained": "fake", "dtype": "bfloat16", "revision": "v2"}]
    run_sweep(config_of(models=models, max_batch_tokens=99), tmp_path, console=Console(file=io.StringIO()))
    expected = {"pretrained": "fake", "dtype": "bfloat16", "revision": "v2", "trust_remote_code": False}
    assert given == [{**expected, "max_batch_tokens": 99}]


def test_a_log_gets_plain_lines_with_time_left(monkeypatch, tmp_path):
    monkeypatch.setattr(sweep_progress, "PLAIN_INTERVAL_S", 0.0)
    _, text = go(config_of(), tmp_path)
    assert "\x1b" not in text
    assert re.search(
        r"^\[1/6\] fake full stream kvacc_mini_copa 0-shot: 6/12 requests, about [\d.]+ s left$", text, re.M
    )


def test_a_terminal_gets_bars_with_time_left(tmp_path):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    run_sweep(config_of(), tmp_path, console=console, load_model=Loader(lambda: FakeLM(0.3)))
    assert "all cells" in text.getvalue() and "━" in text.getvalue()
    assert re.search(r"about [\d.]+ s left", text.getvalue())
    assert re.search(r"\[6/6\].*acc", text.getvalue())


def test_time_left_is_reckoned_in_work(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(sweep_progress.time, "monotonic", lambda: clock[0])
    with SweepProgress(Console(file=io.StringIO()), cells=2, work=40) as progress:
        assert progress.seconds_left() is None
        progress.start_cell("small", 10)
        clock[0] += 5
        progress.requests(1, 2)  # 5 of 40 in 5 seconds
        assert progress.seconds_left() == pytest.approx(35)
        progress.finish_cell("done")
        progress.start_cell("large", 30)
        clock[0] += 5  # 10 of 40 in 10 seconds
        assert progress.seconds_left() == pytest.approx(30)
        progress.requests(2, 2)
        assert progress.seconds_left() == 0
    durations = [as_duration(seconds) for seconds in (-1, 0.44, 9.96, 59.6, 200, 7500)]
    assert durations == ["0.0 s", "0.4 s", "10 s", "1 min 00 s", "3 min 20 s", "2 h 05 min"]
