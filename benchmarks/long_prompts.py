"""Time and peak memory of scoring long prompts: a strategy beside the full cache.

    python benchmarks/long_prompts.py

Each measurement runs in a process of its own. Memory is the peak of all live tensors above the
weights, counted in a pass of its own; the peak of the process's resident memory stands beside it,
but depends on what the allocator did before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

from common import emit, machine, quiet

CASES = (
    # (label, strategy, budget, protocol, tokens, layers)
    ("prefill of 3,800 tokens, then compress", "h2o", 0.5, "context", 3800, None),
    ("8,000 tokens, stream", "h2o", 0.2, "stream", 8000, None),
    # Beyond the model's context, so the scores mean nothing; memory needs no more than a few layers.
    ("32,000 tokens, stream, four layers", "h2o", 0.2, "stream", 32000, 4),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="part of a measurement's name")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    quiet()
    if arguments.child:
        print(json.dumps(child(arguments.model, *json.loads(arguments.child))))
        return
    emit(measurement="machine", **machine())
    for label, name, budget, protocol, tokens, layers in CASES:
        if arguments.only not in label:
            continue
        seconds, peaks, resident = [], [], []
        for turn in range(arguments.repeats):
            cases = [(name, budget, protocol, tokens, layers), ("full", None, protocol, tokens, layers)]
            found = {
                case[0]: in_a_process(arguments.model, case) for case in (cases if turn % 2 else cases[::-1])
            }
            seconds.append(found[name]["seconds"] / found["full"]["seconds"])
            peaks.append(found[name]["peak_bytes"] / found["full"]["peak_bytes"])
            resident.append(found[name]["resident_bytes"] / found["full"]["resident_bytes"])
        emit(
            measurement=f"{name} / full: {label}",
            ratio=round(statistics.median(seconds), 3),
            memory_ratio=round(statistics.median(peaks), 3),
            resident_ratio=round(statistics.median(resident), 3),
            peak_mib=round(found[name]["peak_bytes"] / 2**20),
            peak_mib_full=round(found["full"]["peak_bytes"] / 2**20),
            seconds_one=round(found[name]["seconds"], 2),
            seconds_other=round(found["full"]["seconds"], 2),
            pairs=arguments.repeats,
        )


def in_a_process(model: str, case: tuple) -> dict[str, float]:
    """What :func:`child` says, run by another interpreter."""
    command = [sys.executable, __file__, "--model", model, "--child", json.dumps(case)]
    return json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    )


def child(model: str, name: str, budget, protocol: str, tokens: int, layers: int | None) -> dict[str, float]:
    """Score four tokens after a prompt of ``tokens``, by prepacked weights as in an evaluation."""
    import resource
    import time

    from kvacc.backend import KvaccLM
    from kvacc.calibration import calibration_text
    from kvacc.engine.plan import Request
    from kvacc.engine.scoring import score_documents
    from kvacc.models import load_model, load_tokenizer
    from kvacc.probes.memory import MemoryMeter
    from kvacc.strategy import make_strategy

    whole = load_model(model)
    if layers:
        whole.model.layers = whole.model.layers[:layers]
        whole.config.num_hidden_layers = layers
    lm = KvaccLM(whole, tokenizer=load_tokenizer(model))
    strategy = make_strategy(name, budget)
    text = (lm.tok_encode(calibration_text("prose")) * (tokens // 1000 + 1))[: tokens + 4]

    def score(length: int) -> None:
        part = text[: length + 4]
        dense = length if protocol == "context" else 0
        request = Request(tuple(part[:-1]), tuple(part[-4:]), dense, length)
        score_documents(lm.wrapped, [[request]], strategy)

    with lm.wrapped.prepacked.used():
        score(64)  # compiled, warm
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        score(tokens)
        seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with MemoryMeter(lm.device, held=lm.model) as meter:
            start_bytes = meter.current_bytes
            score(tokens)
            peak = meter.peak_bytes - start_bytes
    return {"seconds": seconds, "peak_bytes": peak, "resident_bytes": 1024 * (after - before)}


if __name__ == "__main__":
    main()
