"""The parallel path against the step path, which reads one token per forward pass.

    python benchmarks/step_path.py

Both score the same continuations under ``h2o`` (``stream``) and must agree. The parallel path runs as
it does in an evaluation, by prepacked weights; the step path as it is measured in probes, as PyTorch
multiplies. Then once more with neither, and with both, prepacked.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys

from common import emit, machine, paired, quiet


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    quiet()

    from kvacc.backend import KvaccLM
    from kvacc.calibration import calibration_text
    from kvacc.engine.plan import Request
    from kvacc.engine.scoring import score_by_steps, score_documents
    from kvacc.strategy import make_strategy

    lm = KvaccLM(arguments.model)
    strategy = make_strategy("h2o", 0.2)
    text = lm.tok_encode(calibration_text("prose"))
    emit(measurement="machine", **machine())
    for rows in (1, 16):
        draw = random.Random(rows)
        requests = []
        for _ in range(rows):
            first = draw.randrange(len(text) - arguments.tokens)
            tokens = text[first : first + arguments.tokens]
            requests.append(Request(tuple(tokens[:-1]), tuple(tokens[-4:]), 0, len(tokens) - 4))
        for words, packed, repeats in (
            ("", (False, True), arguments.repeats),
            (", neither prepacked", (False, False), 1),
            (", both prepacked", (True, True), 1),
        ):

            def steps(requests=requests, packed=packed):
                with lm.wrapped.prepacked.used() if packed[0] else contextlib.nullcontext():
                    return score_by_steps(lm.wrapped, requests, strategy)[0]

            def parallel(requests=requests, packed=packed):
                with lm.wrapped.prepacked.used() if packed[1] else contextlib.nullcontext():
                    scored = score_documents(lm.wrapped, [[r] for r in requests], strategy)
                return [document[0] for document in scored]

            parallel()
            emit(
                measurement=f"step path / parallel path, h2o 0.2 stream, batch {rows}{words}",
                tokens=arguments.tokens,
                **paired(steps, parallel, repeats, agree),
            )


def agree(steps, parallel) -> None:
    """Exit unless both paths scored the same."""
    worst = max(abs(a.loglikelihood - b.loglikelihood) for a, b in zip(steps, parallel, strict=True))
    if worst > 1e-2:
        sys.exit(f"the two paths differ by {worst:.2e}")


if __name__ == "__main__":
    main()
