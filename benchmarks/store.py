"""How long a million samples take: opening and checking every file, and averaging them.

    python benchmarks/store.py [--cells 200] [--rows 5000] [--folder FOLDER]

Writes the cells with ``write_cell``, as a sweep does, then prints one JSON line: the
median of five runs of opening (checksums, NaN, double rows, scores against their
documents), of the aggregate, and of both in a fresh store; of both also the processor
time, which another load on the machine does not lengthen.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import duckdb
import numpy
import pyarrow

from kvacc.results import CellResult, write_cell
from kvacc.store import Store

OPTIONS = 2
RUNS = 5
STRATEGIES = ("full", "h2o", "streaming_llm", "random")
BUDGETS = ("0.8", "0.5", "0.2", "0.1", "0.05")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=200)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--folder", type=Path, help="Kept; by default a temporary folder.")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        begin = time.perf_counter()
        for number in range(asked.cells):
            write_cell(folder, make_cell(number, asked.rows))
        written = time.perf_counter() - begin
        opening, averaging, both, processor = [], [], [], []
        for _ in range(RUNS):
            begin, used = time.perf_counter(), time.process_time()
            store = Store.open(folder)
            opened = time.perf_counter()
            groups = store.aggregate()
            done = time.perf_counter()
            opening.append(opened - begin)
            averaging.append(done - opened)
            both.append(done - begin)
            processor.append(time.process_time() - used)
        rows = sum(group["requests"] for group in groups)
        assert rows == asked.cells * asked.rows and len(groups) == asked.cells, (rows, len(groups))
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    found = {
        "samples": rows,
        "cells": asked.cells,
        "megabytes": round(size / 1e6, 1),
        "write_s": round(written, 2),
        "open_and_check_s": round(statistics.median(opening), 3),
        "aggregate_s": round(statistics.median(averaging), 3),
        "both_s": round(statistics.median(both), 3),
        "both_processor_s": round(statistics.median(processor), 3),
        "duckdb": duckdb.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
    json.dump(found, sys.stdout)
    print()


def make_cell(number: int, rows: int) -> CellResult:
    """A cell of ``rows`` requests, two a document, with random answers."""
    draw = numpy.random.default_rng(number)
    documents = rows // OPTIONS
    index = numpy.repeat(numpy.arange(documents), OPTIONS)
    right = draw.integers(0, 2, documents).astype(float)
    text = numpy.char.mod("%064x", index * 2654435761 % 2**61)
    strategy, budget = STRATEGIES[number % 4], BUDGETS[number // 4 % 5]
    kept = draw.uniform(0.1, 0.9, rows)
    scored = draw.integers(1, 30, rows)
    columns = {
        "doc_id": index,
        "doc_hash": text,
        "prompt_hash": text,
        "target_hash": text,
        "cluster": numpy.char.mod("task/%d", index),
        "option": numpy.tile(numpy.arange(OPTIONS), documents),
        "kind": numpy.full(rows, "loglikelihood"),
        "loglikelihood": -draw.uniform(0.1, 50, rows),
        "greedy": draw.integers(0, 2, rows).astype(bool),
        "response": pyarrow.nulls(rows, pyarrow.string()),
        "target": numpy.full(rows, " an answer of some words"),
        "kept_fraction": kept,
        "acted": numpy.ones(rows, bool),
        "prompt_tokens": draw.integers(20, 900, rows),
        "scored_tokens": scored,
        "unreachable_tokens": numpy.zeros(rows, int),
        "truncated_tokens": numpy.zeros(rows, int),
        "budget_entries": draw.integers(4, 400, rows),
        "bos_tokens": numpy.zeros(rows, int),
        "metric_acc": numpy.repeat(right, OPTIONS),
    }
    return CellResult(
        cell_id=f"{number:016x}",
        spec={
            "model": {"pretrained": "generated", "dtype": "float32"},
            "strategy": strategy,
            "options": {},
            "budget": None if strategy == "full" else budget,
            "protocol": "stream",
            "task": f"task{number // 20:02d}",
            "shots": number % 4 if strategy == "full" else number // 20,
            "seed": number,
        },
        task={
            "name": f"task{number // 20:02d}",
            "version": "1",
            "kind": "benchmark",
            "source": "folder",
            "data_fingerprint": "f00d",
            "num_items": documents,
            "metrics": ["acc"],
            "primary_metric": "acc",
            "chance": 0.5,
        },
        model={"name": f"generated{number}", "content": "beef"},
        scores={"acc": {"value": float(right.mean()), "stderr": 0.01}},
        measured={
            "kept_fraction": float((kept * scored).sum() / scored.sum()),
            "acted_share": 1.0,
            "acted_items": documents,
        },
        strategy={"causal": True, "physical_eviction": True, "repr": strategy},
        environment={
            name: "0"
            for name in (
                "kvacc", "torch", "transformers", "lm_eval", "python", "platform", "processor", "device",
            )
        },
        timing={"seconds": 1.0, "started": "2026-01-01T00:00:00+00:00"},
        samples=pyarrow.table(columns),
    )  # fmt: skip


if __name__ == "__main__":
    main()
