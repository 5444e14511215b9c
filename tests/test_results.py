"""Result folders: written in one step, checked when read, damage named."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pyarrow
import pytest
from pydantic import ValidationError

from kvacc.errors import KvaccError
from kvacc.records import SELECTION
from kvacc.results import (
    SAMPLE_COLUMNS,
    SCHEMA_VERSION,
    Cell,
    CellResult,
    find_cell,
    read_cell,
    read_cells,
    remove_leftovers,
    samples_table,
    write_cell,
)


def sample(doc_id, option=0, **values):
    """One request's row, every column filled."""
    row = {
        "doc_id": doc_id,
        "doc_hash": f"d{doc_id}",
        "prompt_hash": f"p{doc_id}",
        "target_hash": f"t{doc_id}",
        "cluster": f"c{doc_id}",
        "option": option,
        "kind": "loglikelihood",
        "loglikelihood": -1.5,
        "greedy": True,
        "response": None,
        "target": "0",
        "kept_fraction": 0.25,
        "acted": True,
        "prompt_tokens": 40,
        "scored_tokens": 3,
        "unreachable_tokens": 0,
        "truncated_tokens": 0,
        "budget_entries": 8,
        "bos_tokens": 0,
        "metric_acc": 1.0,
    }
    return {**row, **values}


def make_result(cell_id="abc123", value=0.5, samples=None, **changes):
    """A small complete result."""
    fields = {
        "cell_id": cell_id,
        "spec": {
            "model": {"pretrained": "tiny", "dtype": "float32"},
            "strategy": "h2o",
            "options": {"recent_fraction": 0.5},
            "budget": "0.2",
            "protocol": "stream",
            "task": "piqa",
            "shots": 0,
            "limit": 2,
        },
        "task": {
            "name": "piqa",
            "version": 1.0,
            "kind": "benchmark",
            "source": "folder",
            "data_fingerprint": "f00d",
            "num_items": 2,
            "metrics": ["acc"],
            "primary_metric": "acc",
            "chance": 0.5,
        },
        "model": {"name": "tiny", "content": "beef"},
        "scores": {"acc": {"value": value, "stderr": 0.5}},
        "measured": {"kept_fraction": 0.25, "acted_share": 1.0, "acted_items": 2},
        "strategy": {"causal": True, "physical_eviction": True, "repr": "H2O(budget=Budget('0.2'))"},
        "environment": {
            "kvacc": "0.1",
            "torch": "2",
            "transformers": "5",
            "lm_eval": "0.4",
            "python": "3.11",
            "platform": "Linux",
            "processor": "x86",
            "device": "cpu",
        },
        "timing": {"seconds": 1.0, "started": "2026-01-01T00:00:00+00:00"},
        "samples": [sample(0), sample(1)] if samples is None else samples,
    }
    return CellResult(**{**fields, **changes})


def one_line(error):
    """The message, which must be one line that ends with a mend."""
    message = str(error.value)
    assert "\n" not in message
    return message


# --- round trip --------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path):
    result = make_result()
    folder = write_cell(tmp_path / "run", result)
    assert folder == tmp_path / "run" / "abc123"
    assert sorted(path.name for path in folder.iterdir()) == ["cell.json", "samples.parquet"]
    cell = read_cell(folder)
    assert cell.record() == result.record()
    assert type(cell) is Cell and cell.folder == folder
    assert cell.load_samples().equals(result.load_samples())
    assert cell.task.version == "1.0"
    assert read_cell(folder / "cell.json").record() == cell.record()


def test_cell_json_has_the_documented_layout(tmp_path):
    content = json.loads((write_cell(tmp_path, make_result()) / "cell.json").read_text())
    assert set(content) == {
        "schema_version",
        "cell_id",
        "spec",
        "task",
        "model",
        "scores",
        "measured",
        "strategy",
        "environment",
        "timing",
        "fidelity",
        "curve",
        "samples_sha256",
        "warnings",
        "record_sha256",
    }
    assert content["schema_version"] == SCHEMA_VERSION


def test_every_field_has_a_line_of_documentation():
    pending, seen = [Cell], set()
    while pending:
        model = pending.pop()
        seen.add(model.__name__)
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
            if hasattr(field.annotation, "model_fields"):
                pending.append(field.annotation)
    assert "MeasuredRecord" in seen


def test_samples_are_typed_and_sorted():
    rows = [sample(1, 1, extra="x"), sample(1, 0), sample(0, response=7, loglikelihood=None, cluster=None)]
    table = samples_table(rows)
    assert table["doc_id"].to_pylist() == [0, 1, 1]
    assert table["option"].to_pylist() == [0, 0, 1]
    assert table["response"].to_pylist() == ["7", None, None]
    assert table.schema.field("loglikelihood").type == pyarrow.float64()
    assert table["extra"].to_pylist() == [None, None, "x"]
    assert samples_table(table).equals(table)


def test_samples_of_a_selection_are_numbers_or_null():
    rows = [sample(0, moved_bytes=2048, attention_mass=0.5, recall=0.25), sample(1, moved_bytes=None)]
    table = samples_table(rows)
    assert table["moved_bytes"].to_pylist() == [2048.0, None]
    assert table["attention_mass"].to_pylist() == [0.5, None]
    assert table["recall"].to_pylist() == [0.25, None]
    assert {table.schema.field(name).type for name in SELECTION} == {pyarrow.float64()}


def older_cell(folder, **changes):
    """A cell as written before anything was known of selections."""
    import hashlib

    import pyarrow.parquet

    path = write_cell(folder, make_result(**changes))
    table = samples_table([sample(0), sample(1)]).drop_columns(list(SELECTION))
    pyarrow.parquet.write_table(table, path / "samples.parquet", compression="zstd")
    content = json.loads((path / "cell.json").read_text())
    for name in ("moved_bytes_per_token", "attention_mass", "recall", "mass_by_layer", "recall_by_layer"):
        assert content["measured"].pop(name) is None
    assert content["strategy"].pop("offloads") is False
    samples = (path / "samples.parquet").read_bytes()
    content |= {"samples_sha256": hashlib.sha256(samples).hexdigest(), "record_sha256": ""}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["record_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "cell.json").write_text(json.dumps(content))
    return path


def test_older_cells_are_read_and_equal_new_ones(tmp_path):
    old = read_cell(older_cell(tmp_path / "old"))
    assert old.measured.moved_bytes_per_token is None and old.measured.mass_by_layer is None
    assert old.strategy.offloads is False
    table = old.load_samples()
    assert [table[name].to_pylist() for name in SELECTION] == [[None, None]] * 3
    write_cell(tmp_path / "new", make_result())
    assert [cell.cell_id for cell in read_cells([tmp_path / "old", tmp_path / "new"])] == ["abc123"]


def test_what_a_selection_measured_is_read_back(tmp_path):
    measured = {
        "kept_fraction": 0.25, "acted_share": 1.0, "acted_items": 2, "moved_bytes_per_token": 1536.5,
        # One more than 1, by float32's rounding.
        "attention_mass": 1.0000001, "recall": 0.5,
        "mass_by_layer": [None, 1.0000001], "recall_by_layer": (None, 0.5),
    }  # fmt: skip
    cell = read_cell(write_cell(tmp_path, make_result(measured=measured)))
    assert cell.measured.moved_bytes_per_token == 1536.5 and cell.measured.attention_mass == 1.0000001
    assert cell.measured.mass_by_layer == [None, 1.0000001] and cell.measured.recall_by_layer == [None, 0.5]
    for name, value in [("recall", 1.1), ("attention_mass", float("nan")), ("mass_by_layer", [None, -0.1]),
                        ("moved_bytes_per_token", float("inf")), ("moved_bytes_per_token", -1)]:  # fmt: skip
        with pytest.raises(ValidationError, match=f"measured.{name}"):
            make_result(measured={**measured, name: value})


def test_no_samples_still_have_columns():
    assert set(samples_table([]).column_names) == set(SAMPLE_COLUMNS)


def test_impossible_answers_are_minus_infinity(tmp_path):
    cell = read_cell(write_cell(tmp_path, make_result(samples=[sample(0, loglikelihood=float("-inf"))])))
    assert cell.load_samples()["loglikelihood"].to_pylist() == [float("-inf")]


# --- refusals on writing -----------------------------------------------------------------


@pytest.mark.parametrize("column", ["loglikelihood", "metric_acc", "kept_fraction", "recall"])
def test_nan_samples_are_refused_and_leave_nothing(tmp_path, column):
    result = make_result(samples=[sample(0), sample(3, 1, **{column: float("nan")})])
    with pytest.raises(KvaccError, match=f"{column} is NaN for document 3, option 1") as error:
        write_cell(tmp_path, result)
    assert "float32" in one_line(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_scores_are_refused(value):
    with pytest.raises(ValidationError, match="not a finite number"):
        make_result(value=value)


def test_missing_columns_and_wrong_types_are_named():
    row = sample(0)
    del row["cluster"], row["acted"]
    with pytest.raises(KvaccError, match="lack the columns cluster, acted"):
        samples_table([row])
    with pytest.raises(KvaccError, match="'doc_id' has a wrong value"):
        samples_table([sample("first")])


def test_primary_metric_must_have_a_score():
    with pytest.raises(ValidationError, match="scores lack the primary metric 'acc'"):
        make_result(scores={"acc_norm": {"value": 0.5}})


@pytest.mark.parametrize("cell_id", ["../up", "a/b", ".hidden", "", "a@b"])
def test_cell_ids_are_plain_names(cell_id):
    with pytest.raises(ValidationError):
        make_result(cell_id)


def test_unknown_fields_are_refused():
    with pytest.raises(ValidationError):
        make_result(surprise=1)


def test_unwritable_folder_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KvaccError) as error:
        write_cell(tmp_path / "file" / "run", make_result())
    assert "cannot write results to" in one_line(error) and "choose another output folder" in one_line(error)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_read_only_folder_is_one_clear_line(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(KvaccError, match="Permission denied; choose another output folder"):
            write_cell(tmp_path, make_result())
    finally:
        tmp_path.chmod(0o700)


# --- atomicity ---------------------------------------------------------------------------


def test_first_valid_cell_wins(tmp_path):
    folder = write_cell(tmp_path, make_result(value=0.5))
    assert write_cell(tmp_path, make_result(value=0.75)) == folder
    assert read_cell(folder).scores["acc"].value == 0.5
    assert [path.name for path in tmp_path.iterdir()] == ["abc123"]


def test_damaged_cell_is_replaced(tmp_path):
    folder = write_cell(tmp_path, make_result(value=0.5))
    (folder / "samples.parquet").write_bytes(b"")
    write_cell(tmp_path, make_result(value=0.75))
    assert read_cell(folder).scores["acc"].value == 0.75
    assert [path.name for path in tmp_path.iterdir()] == ["abc123"]


def test_empty_folder_of_that_name_is_filled(tmp_path):
    (tmp_path / "abc123").mkdir()
    assert read_cell(write_cell(tmp_path, make_result())).cell_id == "abc123"


def test_cell_of_a_newer_version_is_not_replaced(tmp_path):
    folder = write_cell(tmp_path, make_result())
    path = folder / "cell.json"
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 99'))
    before = path.read_bytes()
    with pytest.raises(KvaccError, match="schema_version 99 is newer than 1.*update kvacc"):
        write_cell(tmp_path, make_result())
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["abc123"]


def test_failure_while_writing_leaves_nothing(tmp_path, monkeypatch):
    import pyarrow.parquet

    def disk_full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", disk_full)
    with pytest.raises(KvaccError, match="No space left on device"):
        write_cell(tmp_path, make_result())
    assert list(tmp_path.iterdir()) == []


def test_killed_writer_leaves_no_cell_and_is_cleaned_up(tmp_path):
    """REPORTS 57: kill -9 in the middle, run again, equal result."""
    tests = os.path.dirname(os.path.abspath(__file__))
    script = textwrap.dedent(
        f"""
        import sys, time
        sys.path.insert(0, {tests!r})
        import pyarrow.parquet
        from test_results import make_result
        from kvacc.results import write_cell
        real = pyarrow.parquet.write_table
        def slow(*args, **kwargs):
            real(*args, **kwargs)
            print("written", flush=True)
            time.sleep(60)
        pyarrow.parquet.write_table = slow
        write_cell({str(tmp_path)!r}, make_result())
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == 1 and left[0].startswith(".writing-abc123@")
    assert find_cell(tmp_path, "abc123") is None
    with pytest.raises(KvaccError, match="holds no finished cell"):
        read_cells(tmp_path)
    folder = write_cell(tmp_path, make_result())
    assert [path.name for path in tmp_path.iterdir()] == ["abc123"]
    assert read_cell(folder).record() == make_result_record(tmp_path)


def make_result_record(tmp_path):
    """What an undisturbed run writes."""
    return read_cell(write_cell(tmp_path / "undisturbed", make_result())).record()


def test_only_abandoned_leftovers_are_removed(tmp_path):
    import kvacc.results as module

    own = tmp_path / module.temporary_name("mine")
    host = own.name.split("@")[1]
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    alive = tmp_path / f".writing-x@{host}@{os.getppid()}@ff"
    earlier = tmp_path / f".writing-x@{host}@{os.getpid()}@another-process-of-this-id"
    gone = tmp_path / f".writing-x@{host}@{dead.pid}@ff"
    elsewhere = tmp_path / ".writing-x@elsewhere@1@ff"
    old = tmp_path / ".writing-x@elsewhere@2@ff"
    for path in (own, alive, earlier, gone, elsewhere, old):
        path.mkdir()
    os.utime(old, (time.time() - 90_000,) * 2)
    assert set(remove_leftovers(tmp_path)) == {earlier, gone, old}
    assert set(tmp_path.iterdir()) == {own, alive, elsewhere}


def test_many_writers_of_one_cell(tmp_path):
    """Whoever comes first wins; nobody fails, nothing is left over."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda i: write_cell(tmp_path, make_result(value=i / 8)), range(8)))
    assert folders == {tmp_path / "abc123"}
    assert [path.name for path in tmp_path.iterdir()] == ["abc123"]
    read_cell(tmp_path / "abc123")


# --- damage ------------------------------------------------------------------------------


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["cell.json", "samples.parquet"])
@pytest.mark.parametrize("damage", [truncate, flip_a_byte, os.unlink, lambda path: path.write_bytes(b"")])
def test_damage_is_one_line_with_file_and_mend(tmp_path, name, damage):
    folder = write_cell(tmp_path, make_result())
    damage(folder / name)
    for read in (
        lambda: read_cell(folder),
        lambda: read_cells(tmp_path),
        lambda: find_cell(tmp_path, "abc123"),
    ):
        with pytest.raises(KvaccError) as error:
            read()
        message = one_line(error)
        assert str(folder / name) in message
        assert f"delete the folder {folder} and run the same command again" in message


def test_edited_score_is_noticed(tmp_path):
    path = write_cell(tmp_path, make_result()) / "cell.json"
    content = json.loads(path.read_text())
    content["scores"]["acc"]["value"] = 0.99
    path.write_text(json.dumps(content))
    with pytest.raises(KvaccError, match="was edited after it was written"):
        read_cell(path.parent)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[]", "holds no JSON object"),
        ("{}", "schema_version None is not a version"),
        ('{"schema_version": true}', "schema_version True is not a version"),
        ('{"schema_version": 1}', "cell_id: Field required"),
    ],
)
def test_other_json_is_refused(tmp_path, text, complaint):
    folder = write_cell(tmp_path, make_result())
    (folder / "cell.json").write_text(text)
    with pytest.raises(KvaccError, match=complaint):
        read_cell(folder)


def test_nan_in_the_file_is_refused(tmp_path):
    path = write_cell(tmp_path, make_result()) / "cell.json"
    path.write_text(path.read_text().replace('"value": 0.5', '"value": NaN'))
    with pytest.raises(KvaccError, match="scores.acc.value: .*not a finite number"):
        read_cell(path.parent)


def test_renamed_folder_is_noticed(tmp_path):
    folder = write_cell(tmp_path, make_result())
    folder.rename(tmp_path / "other")
    with pytest.raises(KvaccError, match="is cell abc123, but its folder is named 'other'; rename"):
        read_cell(tmp_path / "other")


def test_samples_damaged_after_reading_are_noticed(tmp_path):
    cell = read_cell(write_cell(tmp_path, make_result()))
    flip_a_byte(cell.folder / "samples.parquet")
    with pytest.raises(KvaccError, match="truncated or was edited"):
        cell.load_samples()


# --- several folders ---------------------------------------------------------------------


def test_cells_of_several_runs_are_merged_and_sorted(tmp_path):
    write_cell(tmp_path / "one", make_result("b"))
    write_cell(tmp_path / "two" / "nested", make_result("a"))
    (tmp_path / "one" / "notes.txt").write_text("not a cell")
    assert [cell.cell_id for cell in read_cells([tmp_path / "one", tmp_path / "two"])] == ["a", "b"]
    assert [cell.cell_id for cell in read_cells(str(tmp_path))] == ["a", "b"]
    assert [cell.cell_id for cell in read_cells(tmp_path / "one" / "b")] == ["b"]


def test_identical_duplicates_count_once_whatever_their_time(tmp_path):
    write_cell(tmp_path / "one", make_result())
    write_cell(tmp_path / "two", make_result(timing={"seconds": 9.0, "started": "2027"}))
    assert len(read_cells([tmp_path / "one", tmp_path / "two"])) == 1
    assert len(read_cells([tmp_path / "one", tmp_path / "one"])) == 1


@pytest.mark.parametrize(
    "changes", [{"value": 0.75}, {"samples": [sample(0), sample(1, loglikelihood=-9.0)]}]
)
def test_different_duplicates_are_refused_naming_both(tmp_path, changes):
    first = write_cell(tmp_path / "one", make_result())
    second = write_cell(tmp_path / "two", make_result(**changes))
    with pytest.raises(KvaccError) as error:
        read_cells([tmp_path / "one", tmp_path / "two"])
    assert str(first) in one_line(error) and str(second) in one_line(error)


def test_copied_run_is_a_merge(tmp_path):
    write_cell(tmp_path / "one", make_result("a"))
    write_cell(tmp_path / "two", make_result("b"))
    shutil.copytree(tmp_path / "two" / "b", tmp_path / "one" / "b")
    assert [cell.cell_id for cell in read_cells(tmp_path / "one")] == ["a", "b"]


def test_absent_folders_say_what_to_do(tmp_path):
    with pytest.raises(KvaccError, match="does not exist; make it with: kvacc run CONFIG"):
        read_cells(tmp_path / "nowhere")
    with pytest.raises(KvaccError, match="holds no finished cell"):
        read_cells(tmp_path)
    with pytest.raises(KvaccError, match="no results folder given"):
        read_cells([])


def test_find_cell(tmp_path):
    assert find_cell(tmp_path, "abc123") is None
    write_cell(tmp_path, make_result())
    assert find_cell(tmp_path, "abc123").cell_id == "abc123"
