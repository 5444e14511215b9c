"""Probe records whose every number is chosen by the test, without running anything."""

from __future__ import annotations

import hashlib
import json

from kvacc.probes.records import (
    Distribution,
    LatencyRecord,
    MemoryRecord,
    ProbeCase,
    ProbeRecord,
)

MODEL = {"pretrained": "tiny", "dtype": "float32"}
ENVIRONMENT = {
    "kvacc": "0.1", "torch": "2", "transformers": "5", "lm_eval": "0.4", "python": "3.11",
    "platform": "Linux", "processor": "x86", "device": "cpu",
}  # fmt: skip


def distribution(median, spread=0.1, count=5):
    """Median with an interval of ``spread`` of it on both sides."""
    low, high = median * (1 - spread), median * (1 + spread)
    values = [low, *[median] * (count - 2), high]
    return Distribution(median=median, low=low, high=high, p95=high, p99=high, count=count, values=values)


def make_latency(per_token=0.02, first=0.5, spread=0.1):
    """Seconds for each token, and to the first."""
    return LatencyRecord(
        time_to_first_token=distribution(first, spread),
        time_per_output_token=None if per_token is None else distribution(per_token, spread),
        tokens_per_second=distribution(1 / (per_token or 1), spread),
        warmup=1,
        clock="processor",
    )


def make_memory(kv=1000, host=0, weights=5000, activations=3000, decode=200, summaries=0, state=0, **values):
    """Bytes; peaks follow from the parts."""
    held = weights + kv + summaries + state
    fields = {
        "weights": weights,
        "kv_device": kv,
        "kv_host": host,
        "summaries": summaries,
        "state": state,
        "kv_device_end": kv,
        "kv_host_end": host,
        "prefill_peak": held + activations,
        "decode_peak": held + decode,
        "prefill_activations": activations,
        "reserved": held + activations,
        "fragmentation": 0,
        "method": "chosen",
    }
    return MemoryRecord(**{**fields, **values})


def make_probe(strategy="full", budget=None, *, latency=True, memory=True, failure=None, **changes):
    """A record; ``latency`` and ``memory`` may be records, True for the usual ones, or None."""
    environment = {**ENVIRONMENT, **changes.pop("environment", {})}
    fingerprint = changes.pop("fingerprint", {})
    case = ProbeCase(
        **{
            "model": MODEL, "strategy": strategy, "options": {}, "budget": budget, "prompt_tokens": 1024,
            "output_tokens": 32, **changes,
        }
    )  # fmt: skip
    text = json.dumps([case.model_dump(), environment["device"]], sort_keys=True)
    return ProbeRecord(
        case_id=hashlib.sha256(text.encode()).hexdigest()[:16],
        case=case,
        fingerprint=fingerprint,
        latency=_chosen(latency, failure, make_latency),
        memory=_chosen(memory, failure, make_memory),
        failure=failure,
        environment=environment,
    )


def _chosen(value, failure, usual):
    if value is True:
        return None if failure else usual()
    return value
