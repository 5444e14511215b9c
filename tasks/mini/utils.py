"""Loads the embedded items for lm-eval. The YAML files beside this one call it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def read_items(mini_format: str) -> list[dict[str, Any]]:
    """The items of one format (``piqa``, ``boolq``, ...), with the benchmark's field names."""
    text = (FOLDER / f"{mini_format}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def load(mini_format: str, **_: Any) -> dict[str, Any]:
    """lm-eval's ``custom_dataset``: the split ``test``.

    lm-eval passes the task's metadata and, on its command line, the model's
    arguments as further keywords; the items depend on none of them.
    """
    from datasets import Dataset

    return {"test": Dataset.from_list(read_items(mini_format))}
