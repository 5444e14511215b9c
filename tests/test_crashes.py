"""kill -9 at any moment, and several sweeps in one folder: no row lost, none double, and the next run completes."""

from __future__ import annotations

import json
import random
import shutil
import time

import crash_child
import pytest

from kvacc import results
from kvacc.errors import KvaccError
from kvacc.store import Store
from kvacc.store.merge import merge

SETTINGS = {
    "models": ["fake"],
    "strategies": ["full", {"name": "recent", "budgets": [2, 0.5]}],
    "tasks": ["kvacc_mini_copa"],
    "limit": 4,
}
MANY = {
    **SETTINGS,
    "strategies": ["full", {"name": "recent", "budgets": [2, 3, 0.5, 0.7]}],
    "tasks": ["kvacc_mini_copa", "kvacc_mini_piqa"],
    "shots": [0, 1],
}
KILLED = -9


@pytest.fixture(scope="module")
def forked():
    """Starts a sweep in a process of its own; ends what a failing test left running."""
    context = crash_child.context()
    started = []

    def start(settings, folder, **options):
        process = context.Process(target=crash_child.sweep, args=(settings, str(folder)), kwargs=options)
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        if process.is_alive():
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def undisturbed(forked, tmp_path_factory):
    """What a sweep gives that nothing disturbs, and how many operations on files and seconds it takes."""
    known = {}

    def run(name, settings):
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            finish(forked(SETTINGS, folder / "warm"))
            begin = time.monotonic()
            finish(forked(settings, folder / "out", count_into=str(folder / "count")))
            seconds = time.monotonic() - begin
            known[name] = contents(folder / "out"), int((folder / "count").read_text()), seconds
        return known[name]

    return run


def finish(process, code=0):
    process.join(120)
    assert process.exitcode == code


def whole_cells(folder):
    """Cells under their final names; what is being written has a name with a dot."""
    return [path for path in folder.rglob("cell.json") if not path.parent.name.startswith(".")]


def contents(folder):
    """Every cell's results without times, by id."""
    cells = results.read_cells(folder)
    assert len(cells) == len(whole_cells(folder))
    return {
        cell.cell_id: (cell.spec, cell.task, cell.scores, cell.measured, cell.load_samples().to_pylist())
        for cell in cells
    }


def finished_in(folder):
    """Results of the cells that are there; each of them must be whole."""
    try:
        return contents(folder)
    except KvaccError as error:
        assert "does not exist" in str(error) or "holds no finished cell" in str(error), error
        return {}


def assert_complete(folder, expected):
    assert contents(folder) == expected
    Store.open(folder)
    hidden = [path.name for path in folder.rglob(".*")]
    assert hidden == []
    assert len(json.loads((folder / "run.json").read_text())["runs"]) == 1


def kill_at_operations(numbers, settings, expected, forked, tmp_path):
    for number in numbers:
        folder = tmp_path / f"at{number}"
        finish(forked(settings, folder, die_at=number), KILLED)
        left = finished_in(folder)
        assert left.items() <= expected.items(), number
        finish(forked(settings, folder))
        assert_complete(folder, expected)
        shutil.rmtree(folder)


def test_a_sweep_killed_before_an_operation_on_a_file_goes_on(forked, undisturbed, tmp_path):
    expected, operations, _ = undisturbed("small", SETTINGS)
    assert len(expected) == 3 and operations > 30
    numbers = sorted(random.Random(1).sample(range(1, operations + 1), 4))
    kill_at_operations(numbers, SETTINGS, expected, forked, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_sweep_killed_before_every_operation_on_a_file_goes_on(forked, undisturbed, tmp_path):
    expected, operations, _ = undisturbed("small", SETTINGS)
    kill_at_operations(range(1, operations + 1), SETTINGS, expected, forked, tmp_path)


def kill_at_moments(kills, settings, expected, seconds, forked, tmp_path, seed):
    """Kill and resume the same sweep until it is complete, then another one, until ``kills`` have hit."""
    draw = random.Random(seed)
    done, hit, sweeps = {}, 0, 0
    folder = tmp_path / "0"
    while hit < kills:
        process = forked(settings, folder)
        process.join(draw.uniform(0, seconds))
        hit += process.is_alive()
        process.kill()
        process.join()
        now = finished_in(folder)
        assert done.items() <= now.items() <= expected.items()
        done = now
        if process.exitcode == 0:
            assert_complete(folder, expected)
            done, sweeps = {}, sweeps + 1
            folder = tmp_path / str(sweeps)
    finish(forked(settings, folder))
    assert_complete(folder, expected)


def test_a_sweep_killed_at_random_moments_completes(forked, undisturbed, tmp_path):
    expected, _, seconds = undisturbed("small", SETTINGS)
    kill_at_moments(3, SETTINGS, expected, seconds, forked, tmp_path, seed=2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_sweep_killed_at_fifty_random_moments_completes(forked, undisturbed, tmp_path):
    expected, _, seconds = undisturbed("many", MANY)
    assert len(expected) == 20
    kill_at_moments(50, MANY, expected, seconds, forked, tmp_path, seed=3)


def test_two_sweeps_in_one_folder_one_of_them_killed(forked, undisturbed, tmp_path):
    expected, _, seconds = undisturbed("small", SETTINGS)
    both = [forked(SETTINGS, tmp_path / "out", seconds_per_cell=0.1) for _ in range(2)]
    time.sleep(seconds / 2)
    both[0].kill()
    both[0].join()
    finish(both[1])
    assert both[0].exitcode == KILLED
    # What the killed one was writing is removed by whoever writes next, or by the next run.
    finish(forked(SETTINGS, tmp_path / "out"))
    assert_complete(tmp_path / "out", expected)


@pytest.mark.slow
def test_many_sweeps_in_one_folder(forked, undisturbed, tmp_path):
    expected, _, seconds = undisturbed("many", MANY)
    draw = random.Random(4)
    for number in range(5):
        folder = tmp_path / str(number)
        sweeps = [forked(MANY, folder) for _ in range(4)]
        for victim in sweeps[:2]:
            victim.join(draw.uniform(0, seconds))
            victim.kill()
            victim.join()
        for survivor in sweeps[2:]:
            finish(survivor)
        finish(forked(MANY, folder))
        assert_complete(folder, expected)


def test_two_sweeps_that_extend_one_folder_are_both_remembered(forked, tmp_path):
    one = {**SETTINGS, "strategies": ["full", {"name": "recent", "budget": 3}]}
    two = {**SETTINGS, "strategies": ["full", {"name": "recent", "budget": 4}]}
    finish(forked(SETTINGS, tmp_path / "out"))
    for sweep in [forked(settings, tmp_path / "out", extend=True) for settings in (one, two)]:
        finish(sweep)
    runs = json.loads((tmp_path / "out" / "run.json").read_text())["runs"]
    assert [len(run["cells"]) for run in runs] == [3, 2, 2]
    assert {cell for run in runs for cell in run["cells"]} == set(contents(tmp_path / "out"))


def test_a_merge_of_a_sweep_that_still_writes_takes_finished_cells_only(forked, undisturbed, tmp_path):
    expected, _, _ = undisturbed("small", SETTINGS)
    process = forked(SETTINGS, tmp_path / "out", seconds_per_cell=0.2)
    while not whole_cells(tmp_path):
        assert process.is_alive()
        time.sleep(0.01)
    first = merge([tmp_path / "out"], tmp_path / "merged")
    assert contents(tmp_path / "merged").items() <= expected.items()
    finish(process)
    again = merge([tmp_path / "out"], tmp_path / "merged")
    assert set(first.copied) | set(again.copied) == set(expected) and not set(first.copied) & set(
        again.copied
    )
    assert_complete(tmp_path / "merged", expected)
