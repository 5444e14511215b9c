"""Each cell's configuration for the page: parts that cells share are written once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from kvacc.leaderboard_rows import Row
from kvacc.results import Cell

PARTS = ("spec", "task", "model", "scores", "measured", "fidelity", "strategy", "environment")
"""Of a cell's record. Not the time it took: scoring is masked, so that is no latency figure."""
_WHERE = ("device", "device_map", "path")
"""Says where a model lay, not what was run."""
_LONG = ("mass_by_layer", "recall_by_layer", "mass_by_layer_and_head", "by_position")
"""Tables by layer or position; they stay in cell.json."""


def configurations(cells: Mapping[str, Cell], rows: Sequence[Row]) -> dict[str, Any]:
    """``{"parts": [...], "of": {cell_id: {part: place in parts}}}``, with warnings where there are any."""
    places: dict[str, int] = {}
    parts: list[Any] = []
    of: dict[str, dict[str, Any]] = {}
    for row in rows:
        record = cells[row.cell_id].record()
        entry: dict[str, Any] = {}
        for name in PARTS:
            if record.get(name) is None:
                continue
            content = _plain(record[name])
            key = json.dumps(content, sort_keys=True)
            if key not in places:
                places[key] = len(parts)
                parts.append(content)
            entry[name] = places[key]
        if record["warnings"]:
            entry["warnings"] = record["warnings"]
        of[row.cell_id] = entry
    return {"parts": parts, "of": of}


def _plain(part: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is unknown or empty, and without paths of the machine that ran it."""
    return {
        name: _shown(name, _plain(value) if isinstance(value, dict) else value)
        for name, value in sorted(part.items())
        if value not in (None, {}, []) and name not in _WHERE and name not in _LONG
    }


def _shown(name: str, value: Any) -> Any:
    if (
        name in ("pretrained", "name", "gguf_file")
        and isinstance(value, str)
        and PurePath(value).is_absolute()
    ):
        return PurePath(value).name
    # Finer digits differ between machines, and are far below any standard error.
    return float(f"{value:.6g}") if isinstance(value, float) else value
