"""Workloads for the planner's tests."""

from __future__ import annotations

from fractions import Fraction

from kvacc.planner.memory import Workload

PROMPT = 384


def workload(**changes) -> Workload:
    settings = {
        "prompt_tokens": PROMPT, "output_tokens": 2, "batch": 1, "protocol": "serve", "prefill_chunk": None,
        "kernel": "sdpa", "weight_bytes": Fraction(4), "activation_bytes": 4, "kv_bytes": Fraction(4),
        "reserve": 0,
    }  # fmt: skip
    return Workload(**{**settings, **changes})


def half(**changes) -> Workload:
    two = Fraction(2)
    return workload(**{"weight_bytes": two, "activation_bytes": 2, "kv_bytes": two, **changes})
