"""Peak memory of reading a long prompt at once and in chunks, under a kernel of transformers.

    python benchmarks/chunked_prefill.py

Each reading has a process of its own; what is reported is the peak of its resident memory above
what it held before the prompt. ``eager`` makes a square of logits for each head, so there the
length of a pass and not the cache bounds the prompt.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from common import emit, machine, timed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--kernel", default="eager")
    parser.add_argument("--child", type=int, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(json.dumps(child(arguments, arguments.child or None)))
        return
    emit(measurement="machine", **machine())
    whole, chunks = (in_a_process(arguments, chunk) for chunk in (0, arguments.chunk))
    emit(
        measurement=f"prefill peak, {arguments.kernel}, {arguments.tokens} tokens: at once / in chunks",
        chunk=arguments.chunk,
        memory_ratio=round(whole["peak_bytes"] / chunks["peak_bytes"], 2),
        peak_mib=[round(found["peak_bytes"] / 2**20) for found in (whole, chunks)],
        cache_mib=round(whole["cache_bytes"] / 2**20),
        largest_logit_difference=max(
            abs(a - b) for a, b in zip(whole["logits"], chunks["logits"], strict=True)
        ),
        ratio=round(whole["seconds"] / chunks["seconds"], 3),
        seconds_one=round(whole["seconds"], 1),
        seconds_other=round(chunks["seconds"], 1),
    )


def in_a_process(arguments: argparse.Namespace, chunk: int) -> dict:
    """What :func:`child` says, run by another interpreter; chunk 0 reads all at once."""
    words = [sys.executable, __file__, "--child", str(chunk)]
    for name in ("model", "tokens", "kernel"):
        words += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def child(arguments: argparse.Namespace, chunk: int | None) -> dict:
    """Read one prompt: seconds, bytes, and the first 100 logits after it."""
    import torch

    from kvacc.calibration import calibration_text
    from kvacc.models import load_model, load_tokenizer
    from kvacc.probes.decoder import make_decoder
    from kvacc.strategy import make_strategy

    model = load_model(arguments.model).eval()
    text = load_tokenizer(arguments.model)(calibration_text("prose"))["input_ids"]
    text = (text * (arguments.tokens // len(text) + 1))[: arguments.tokens]

    def decoder(tokens: int):
        return make_decoder(model, make_strategy("full"), tokens, 1, kernel=arguments.kernel)

    decoder(64).prefill(torch.tensor([text[:64]]))  # what only a first pass does
    reading = decoder(arguments.tokens)
    before = _status("VmRSS")
    seconds, logits = timed(lambda: reading.prefill(torch.tensor([text]), chunk))
    return {
        "seconds": seconds,
        "peak_bytes": _status("VmHWM") - before,
        "cache_bytes": reading.kv_bytes().device,
        "logits": logits[0, :100].tolist(),
    }


def _status(name: str) -> int:
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


if __name__ == "__main__":
    main()
