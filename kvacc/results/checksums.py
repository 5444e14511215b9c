"""Checksums by which a truncated or edited file is told."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def is_unedited(content: dict[str, Any]) -> bool:
    return sha256_of_record(content) == content.get("record_sha256")


def sha256_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_record(record: dict[str, Any]) -> str:
    text = json.dumps({**record, "record_sha256": ""}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
