"""The texts of ``kvacc_longtext``: files of the user's, or prose that comes with kvacc."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvacc.calibration import calibration_text
from kvacc.errors import KvaccError

FIELDS = ("text", "page")
"""Fields of a ``.jsonl`` line that can hold its text; ``page`` is WikiText's by whole pages."""
SUFFIXES = (".txt", ".jsonl")


def documents(texts: str | None = None, characters: int | None = None) -> list[dict[str, Any]]:
    """One document per text.

    Args:
        texts: a ``.txt`` file (one text), a ``.jsonl`` file (one text per line, in the field ``text``
            or ``page``), or a folder with such files; None is the prose that comes with kvacc.
        characters: use at most so many of each text, from its start.

    Returns:
        Dicts with ``name`` (file, and line of a ``.jsonl``) and ``text``.

    Raises:
        KvaccError: no such file, no text in it, or text that is not UTF-8 or not JSON.
    """
    if characters is not None and (not isinstance(characters, int) or characters < 1):
        raise KvaccError(f"characters {characters!r} is not a whole number of at least 1")
    if texts is None:
        found = [{"name": "prose", "text": calibration_text()}]
    else:
        found = [document for file in _files(Path(texts).expanduser()) for document in _read(file)]
    if not found:
        raise KvaccError(f"texts {texts!r} holds no text; name a file or folder with some")
    return [{**document, "text": document["text"][:characters]} for document in found]


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise KvaccError(f"folder {str(path)!r} has no .txt or .jsonl file; name a folder with texts")
        return files
    if not path.is_file():
        raise KvaccError(
            f"texts {str(path)!r} does not exist; name a .txt or .jsonl file, or a folder of them"
        )
    return [path]


def _read(file: Path) -> Iterator[dict[str, Any]]:
    try:
        content = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise KvaccError(f"{file} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise KvaccError(f"{file} cannot be read: {error.strerror}") from None
    if file.suffix != ".jsonl":
        if content.strip():
            yield {"name": file.stem, "text": content}
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            text = next(values[field] for field in FIELDS if isinstance(values.get(field), str))
        except (ValueError, AttributeError, StopIteration):
            raise KvaccError(
                f"{file}:{number}: no JSON object with a text in the field {' or '.join(FIELDS)}"
            ) from None
        if text.strip():
            yield {"name": f"{file.stem}:{number}", "text": text}
