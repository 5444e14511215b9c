"""Texts scored as a whole: where they come from, and what is made of their log-likelihood."""

from __future__ import annotations

import json
import math

import pytest
from kvacc.tasks.longtext.settings import problems
from kvacc.tasks.longtext.task import scores
from kvacc.tasks.longtext.texts import documents

from kvacc import task_catalog
from kvacc.calibration import calibration_text
from kvacc.errors import KvaccError
from kvacc.task_catalog import TaskSource

NAME = "kvacc_longtext"


def load(data_dir=None, **options):
    return task_catalog.load_tasks([NAME], data_dir=data_dir, options=options)[NAME]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.txt").write_text("A book.\n\nIt ends.", encoding="utf-8")
    lines = [{"page": "first page"}, {"text": "second"}, {"page": "  "}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    (tmp_path / "notes.md").write_text("not a text", encoding="utf-8")
    return tmp_path


def test_texts_of_a_folder_in_order(folder):
    assert documents(str(folder)) == [
        {"name": "a:1", "text": "first page"},
        {"name": "a:2", "text": "second"},
        {"name": "b", "text": "A book.\n\nIt ends."},
    ]
    assert [d["text"] for d in documents(str(folder), characters=3)] == ["fir", "sec", "A b"]
    assert [d["name"] for d in documents(str(folder / "b.txt"))] == ["b"]


def test_the_prose_that_comes_with_kvacc_is_there_offline():
    task = load()
    assert [doc["text"] for doc in task.eval_docs] == [calibration_text()]
    assert task_catalog.find_task(NAME).source(None) is TaskSource.EMBEDDED


def test_a_data_folder_gives_its_pages(tmp_path):
    (tmp_path / "wikitext").mkdir()
    pages = [{"page": f"= page {i} = "} for i in range(3)]
    (tmp_path / "wikitext" / "test.jsonl").write_text("\n".join(map(json.dumps, pages)), encoding="utf-8")
    assert [doc["text"] for doc in load(tmp_path).eval_docs] == [page["page"] for page in pages]
    assert task_catalog.find_task(NAME).source(tmp_path) is TaskSource.FOLDER
    assert len(load(tmp_path, characters=4).eval_docs[0]["text"]) == 4
    # A data folder without them is no fault.
    (tmp_path / "empty").mkdir()
    assert len(load(tmp_path / "empty").eval_docs) == 1


def test_texts_of_the_users_own_go_before_those_of_the_data_folder(folder, tmp_path):
    assert len(load(folder, texts=str(folder)).eval_docs) == 3


def test_a_request_is_the_whole_text(folder):
    task = load(texts=str(folder))
    task.build_all_requests()
    assert [instance.args[0] for instance in task.instances] == [doc["text"] for doc in task.eval_docs]
    assert {instance.request_type for instance in task.instances} == {"loglikelihood_rolling"}


def test_metrics_by_hand():
    text = "two words, ünd"  # 3 words, 15 bytes
    found = scores({"text": text}, [-30.0])
    assert found["mean_bits_per_byte"] == pytest.approx(30 / math.log(2) / 15)
    assert found["word_perplexity"] == (-30.0, 3)
    assert found["byte_perplexity"] == found["bits_per_byte"] == (-30.0, 15)
    aggregate = load().aggregation()
    both = [(-30.0, 3), (-10.0, 1)]
    assert aggregate["word_perplexity"](both) == pytest.approx(math.exp(40 / 4))
    assert aggregate["bits_per_byte"]([(-30.0, 15), (-10.0, 5)]) == pytest.approx(40 / 20 / math.log(2))


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\xff\xfe", "not UTF-8"), (b"[1, 2]\n", ":1: no JSON object"), (b'{"page": 3}', "text or page")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, said):
    file = tmp_path / "x.jsonl"
    file.write_bytes(content)
    with pytest.raises(KvaccError, match=said) as raised:
        documents(str(file))
    assert str(file) in str(raised.value) and "\n" not in str(raised.value)


def test_nothing_to_read_is_an_error(tmp_path):
    with pytest.raises(KvaccError, match=r"has no \.txt or \.jsonl file"):
        documents(str(tmp_path))
    (tmp_path / "empty.txt").write_text(" \n", encoding="utf-8")
    with pytest.raises(KvaccError, match="holds no text"):
        documents(str(tmp_path))
    with pytest.raises(KvaccError, match="does not exist"):
        documents(str(tmp_path / "missing.txt"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"windo": 8}, "did you mean 'window'"),
        ({"window": 1}, "window 1 is not a whole number of at least 2"),
        ({"window": True}, "window True"),
        ({"characters": "ten"}, "characters 'ten'"),
        ({"texts": "/no/such/file.txt"}, "does not exist"),
    ],
)
def test_wrong_options_are_named(options, said):
    [(name, what)] = problems(options)
    assert name in options and said in what
    with pytest.raises(KvaccError):
        load(**options)
