"""Written cells for the gate's tests: two options per item, right where ``correct`` says so."""

from __future__ import annotations

import hashlib
import json

from kvacc.results import CellResult, write_cell


def make_cell(
    correct,
    *,
    strategy="h2o",
    budget="0.2",
    options=None,
    protocol="stream",
    task="piqa",
    kind="benchmark",
    shots=0,
    seed=1234,
    limit=None,
    version="1.0",
    data="data",
    prompt="prompt",
    model="tiny",
    content="weights",
    torch="2.13",
    shift=0.0,
    clusters=None,
    depths=None,
    metric="acc",
    kl=None,
    agreement=None,
    response=None,
):
    """One cell of a run; ``shift`` moves every log-likelihood."""
    full = strategy == "full"
    budget = None if full else budget
    correct = [float(value) for value in correct]
    spec = {
        "model": {"pretrained": model, "dtype": "float32"},
        "strategy": strategy,
        "options": options or {},
        "budget": budget,
        "protocol": protocol,
        "task": task,
        "shots": shots,
        "limit": limit,
        "seed": seed,
    }
    samples = []
    for i, value in enumerate(correct):
        for option in range(2):
            row = {
                "doc_id": i,
                "doc_hash": f"doc{i}",
                "prompt_hash": f"{prompt}{i}",
                "target_hash": f"target{i}",
                "cluster": f"c{i}" if clusters is None else clusters[i],
                "option": option,
                "kind": "loglikelihood" if response is None else "generate_until",
                "loglikelihood": -float(i) - option + shift if response is None else None,
                "greedy": False,
                "response": None if response is None else f"{response}{i}",
                "target": "0",
                "kept_fraction": 1.0 if full else 0.2,
                "acted": not full,
                "prompt_tokens": 100,
                "scored_tokens": 4,
                "unreachable_tokens": 0,
                "truncated_tokens": 0,
                "budget_entries": None if full else 20,
                "bos_tokens": 0,
                f"metric_{metric}": value,
            }
            if kl is not None:
                row["kl"] = kl[i]
            if agreement is not None:
                row["agreement"] = agreement[i]
            for depth in sorted(set(depths or [])):
                row[f"metric_{metric}_depth_{depth}"] = value if depths[i] == depth else None
            samples.append(row)
    identity = json.dumps([spec, data, version, content], sort_keys=True)
    return CellResult(
        cell_id=hashlib.sha256(identity.encode()).hexdigest()[:16],
        spec=spec,
        task={
            "name": task,
            "version": version,
            "kind": kind,
            "source": "embedded",
            "data_fingerprint": data,
            "num_items": len(correct),
            "metrics": [metric],
            "primary_metric": metric,
            "chance": 0.25,
        },
        model={"name": model, "content": content, "dtype": "float32"},
        scores={metric: {"value": sum(correct) / len(correct), "stderr": 0.1}},
        measured={
            "kept_fraction": 1.0 if full else 0.2,
            "acted_share": float(not full),
            "acted_items": 0 if full else len(correct),
        },
        strategy={"causal": True, "physical_eviction": True, "repr": f"{strategy}({budget})"},
        environment={
            "kvacc": "0.1",
            "torch": torch,
            "transformers": "5",
            "lm_eval": "0.4",
            "python": "3.11",
            "platform": "Linux",
            "processor": "x86",
            "device": "cpu, 2 threads",
        },
        timing={"seconds": 1.0, "started": "2026-01-01T00:00:00+00:00"},
        samples=samples,
    )


def write_run(folder, *cells):
    """The cells as a run's folder."""
    for cell in cells:
        write_cell(folder / "cells", cell)
    return folder
