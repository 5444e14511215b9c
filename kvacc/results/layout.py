"""Names and columns of a cell's two files."""

from __future__ import annotations

SCHEMA_VERSION = 1
CELL_FILE = "cell.json"
SAMPLES_FILE = "samples.parquet"
METRIC_PREFIX = "metric_"

SAMPLE_COLUMNS: dict[str, str] = {
    "doc_id": "int64",
    "doc_hash": "string",
    "prompt_hash": "string",
    "target_hash": "string",
    "cluster": "string",
    "option": "int64",
    "kind": "string",
    "loglikelihood": "float64",
    "greedy": "bool",
    "response": "string",
    "target": "string",
    "kept_fraction": "float64",
    "acted": "bool",
    "prompt_tokens": "int64",
    "scored_tokens": "int64",
    "unreachable_tokens": "int64",
    "truncated_tokens": "int64",
    "budget_entries": "int64",
    "bos_tokens": "int64",
    "moved_bytes": "float64",
    "attention_mass": "float64",
    "recall": "float64",
    "kl": "float64",
    "agreement": "float64",
    "loglikelihood_difference": "float64",
    "depth": "float64",
    "length": "int64",
}
"""Columns that every samples.parquet has, with their types; any may hold nulls."""
WHERE = ("depth", "length")
"""Of a retention task: where the asked fact lies in the haystack, 0 to 1 (null where that means
nothing), and the prompt's length as asked for, in tokens. Null for other tasks."""
