"""Small results on disk whose every number can be worked out by hand, and ways to damage them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from kvacc.results import CellResult, write_cell

OPTIONS = 2


def row(document, option, right, **values):
    """One request; log-likelihoods are -1 for option 0 and -2 for option 1."""
    return {
        "doc_id": document,
        "doc_hash": f"d{document}",
        "prompt_hash": f"p{document}",
        "target_hash": f"t{document}",
        "cluster": f"c{document}",
        "option": option,
        "kind": "loglikelihood",
        "loglikelihood": -1.0 - option,
        "greedy": option == 0,
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
        "metric_acc": right,
        **values,
    }


def make_cell(cell_id="a1", right=(1.0, 0.0, 1.0, 1.0), rows=None, spec=None, metric="acc", **changes):
    """A cell of as many documents as ``right`` has values, two options each."""
    rows = rows or [
        row(document, option, value) for document, value in enumerate(right) for option in range(OPTIONS)
    ]
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
            **(spec or {}),
        },
        "task": {
            "name": (spec or {}).get("task", "piqa"),
            "version": "1",
            "kind": "benchmark",
            "source": "folder",
            "data_fingerprint": "f00d",
            "num_items": len(right),
            "metrics": [metric],
            "primary_metric": metric,
            "chance": 0.5,
        },
        "model": {"name": "tiny", "content": "beef"},
        "scores": {metric: {"value": sum(right) / len(right), "stderr": 0.25}},
        "measured": {"kept_fraction": 0.25, "acted_share": 1.0, "acted_items": len(right)},
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
        "timing": {"seconds": 1.5, "started": "2026-01-01T00:00:00+00:00"},
        "samples": rows,
    }
    return CellResult(**{**fields, **changes})


def stored(folder, *arguments, **options) -> Path:
    """The folder of a cell that has just been written."""
    return write_cell(folder, make_cell(*arguments, **options))


def sign(folder: Path, **changes) -> None:
    """Give cell.json other values, and checksums that are right for what is there now."""
    path = folder / "cell.json"
    content = {**json.loads(path.read_text()), **changes}
    samples = (folder / "samples.parquet").read_bytes()
    content |= {"samples_sha256": hashlib.sha256(samples).hexdigest(), "record_sha256": ""}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["record_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(content))


def rewrite(folder: Path, change) -> None:
    """Replace the samples by ``change`` of them, with right checksums: as a faulty writer would."""
    import pyarrow.parquet

    path = folder / "samples.parquet"
    pyarrow.parquet.write_table(change(pyarrow.parquet.read_table(path)), path)
    sign(folder)
