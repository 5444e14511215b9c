"""The calibration text: long enough, original, readable from a file, and of no evaluated task."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvacc.calibration
from kvacc.calibration import calibration_digest, calibration_text
from kvacc.errors import KvaccError
from kvacc.task_catalog import BENCHMARKS, tasks_folder

DATA = os.environ.get("KVACC_TEST_DATA_DIR")
"""A folder of benchmark files. Not KVACC_DATA_DIR, which tests/conftest.py takes away so that
no other test depends on it."""
ROOT = Path(__file__).parent.parent


def sequences(text: str, length: int = 8) -> set[tuple[str, ...]]:
    """Every run of ``length`` words, whatever their case and punctuation."""
    words = re.findall(r"[a-z0-9]+(?:'[a-z]+)?", text.lower())
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def strings(value) -> Iterator[str]:
    """Every text inside a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


def found_in(files: list[Path]) -> set[tuple[str, ...]]:
    """Eight-word runs of the calibration text that stand in ``files``."""
    ours, found = sequences(calibration_text()), set()
    for file in files:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".jsonl":
            for line in text.splitlines():
                for part in strings(json.loads(line)):
                    found |= ours & sequences(part)
        else:
            found |= ours & sequences(text)
    return found


def test_no_text_of_our_own_tasks():
    files = [file for file in tasks_folder().rglob("*") if file.suffix in (".jsonl", ".py", ".yaml")]
    assert {"copa.jsonl", "filler.py", "kvacc_passkey.yaml"} <= {file.name for file in files}
    assert found_in(files) == set()


@pytest.mark.skipif(DATA is None, reason="KVACC_TEST_DATA_DIR names no folder of benchmark files")
def test_no_text_of_the_benchmarks():
    folders = [Path(DATA, name) for name in BENCHMARKS]
    files = [file for folder in folders for file in folder.glob("*.jsonl")]
    assert {file.parent for file in files} == set(folders) and len(folders) == 6
    assert found_in(files) == set()


def test_borrowed_text_would_be_found(tmp_path):
    borrowed = " ".join(calibration_text().split()[200:210])
    (tmp_path / "a.jsonl").write_text(json.dumps({"ctx": {"parts": ["Once:", borrowed.upper()]}}) + "\n")
    (tmp_path / "b.py").write_text(f"x = '{borrowed}'")
    for name in ("a.jsonl", "b.py"):
        assert len(found_in([tmp_path / name])) >= 3


def test_it_is_plain_varied_prose():
    text = calibration_text()
    assert text.isascii() and text.endswith("\n") and "  " not in text and "\t" not in text
    paragraphs = [line for line in text.splitlines() if line]
    assert len(set(paragraphs)) == len(paragraphs) > 40
    assert any(line.startswith('"') for line in paragraphs)  # dialogue
    assert any(line.startswith("- ") for line in paragraphs)  # a list
    assert len(re.findall(r"\d+", text)) >= 20
    for task_like in (
        "answer:",
        "question:",
        "choice",
        "premise",
        "because of what",
        "pass key",
        "magic number",
    ):
        assert task_like not in text.lower()


def test_it_is_the_text_that_results_were_made_with():
    """Another text moves every row of a strategy that is calibrated: change it knowingly."""
    assert calibration_digest() == "f7453846232eda19"


@pytest.mark.slow
def test_length(smollm2_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(smollm2_folder))
    count = len(tokenizer(calibration_text())["input_ids"])
    assert 2000 <= count <= 2300
    assert f"{count:,} tokens of SmolLM2's tokenizer" in Path(kvacc.calibration.__file__).read_text()


def test_it_is_in_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "kvacc.calibration" in settings["packages"]
    assert settings["package-data"]["kvacc.calibration"] == ["*.txt"]


def test_a_file(tmp_path):
    file = tmp_path / "ours.txt"
    file.write_bytes("Größe zählt.\n".encode())
    assert calibration_text(str(file)) == "Größe zählt.\n"
    # sha256 of "Größe zählt.\n" in UTF-8
    assert calibration_digest(str(file)) == "742037b65cc9167f"
    assert calibration_digest(str(file)) != calibration_digest()


def test_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.txt").write_text("Some words.")
    assert calibration_text("~/mine.txt") == "Some words."


MEND = "give the path of a UTF-8 text file, or 'prose' for the text that comes with kvacc"


@pytest.mark.parametrize(
    "content, reason",
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"caf\xe9 au lait", r"is not UTF-8 \(byte 3\)"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, content, reason):
    file = tmp_path / "mine.txt"
    if content is not None:
        file.write_bytes(content)
    for ask in (calibration_text, calibration_digest):
        with pytest.raises(KvaccError, match=f"^calibration text '{file}' {reason}; {MEND}$"):
            ask(str(file))


def test_a_folder_and_a_name_that_no_file_can_have(tmp_path):
    with pytest.raises(KvaccError, match=f"cannot be read .*; {MEND}$"):
        calibration_text(str(tmp_path))
    with pytest.raises(KvaccError, match="cannot be read .*null byte") as raised:
        calibration_text("a\0b")
    assert "\n" not in str(raised.value)
