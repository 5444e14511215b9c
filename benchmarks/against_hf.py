"""kvacc's ``full`` against lm-eval's own ``hf`` backend: the same items, equal answers, less time.

    python benchmarks/against_hf.py --data-dir DATA --shots 0
    python benchmarks/against_hf.py --data-dir DATA --shots 5 --sampler first_n

One JSON line per benchmark, then one for the whole set: the sums of both times, their ratio,
and the share of the machine's matrix-multiply speed that kvacc reached on the tokens that
have to be read at least once.
"""

from __future__ import annotations

import argparse

from common import (
    BENCHMARKS,
    emit,
    evaluate,
    layer_operations_per_token,
    machine,
    matrix_multiply_speed,
    paired,
    quiet,
    require_equal_answers,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--shots", type=int, default=0)
    parser.add_argument("--sampler", choices=("default", "first_n"), default="default")
    parser.add_argument("--tasks", default=",".join(BENCHMARKS))
    parser.add_argument("--batch-size", type=int, default=8, help="of the hf backend; 8 is its best here")
    parser.add_argument("--repeats", type=int, default=1, help="pairs for each benchmark")
    arguments = parser.parse_args()
    quiet()

    from lm_eval.models.huggingface import HFLM

    from kvacc.backend import KvaccLM
    from kvacc.models import load_model, load_tokenizer

    tokenizer = load_tokenizer(arguments.model)
    stock = HFLM(load_model(arguments.model), tokenizer=tokenizer, batch_size=arguments.batch_size)
    ours = KvaccLM(load_model(arguments.model), tokenizer=tokenizer)
    read = watch_tokens(ours)
    emit(measurement="machine", **machine())
    speed = matrix_multiply_speed()
    each = layer_operations_per_token(ours.model)
    sums = {"hf": 0.0, "kvacc": 0.0, "tokens": 0}
    for name in arguments.tasks.split(","):

        def run(lm, name=name):
            return evaluate(lm, name, arguments.limit, arguments.shots, arguments.data_dir, arguments.sampler)

        read.clear()
        times = paired(lambda: run(stock), lambda: run(ours), arguments.repeats, require_equal_answers)
        tokens = sum(read) // arguments.repeats
        sums["hf"] += times["seconds_one"]
        sums["kvacc"] += times["seconds_other"]
        sums["tokens"] += tokens
        emit(
            measurement="hf / kvacc full",
            task=name,
            shots=arguments.shots,
            sampler=arguments.sampler,
            tokens_read=tokens,
            share_of_floor=round(tokens * each / speed / times["seconds_other"], 3),
            **times,
        )
    emit(
        measurement="hf / kvacc full, whole set",
        shots=arguments.shots,
        sampler=arguments.sampler,
        limit=arguments.limit,
        seconds_hf=round(sums["hf"], 1),
        seconds_kvacc=round(sums["kvacc"], 1),
        ratio=round(sums["hf"] / sums["kvacc"], 3),
        tokens_read=sums["tokens"],
        matrix_multiply_gflops=round(speed / 1e9, 1),
        share_of_floor=round(sums["tokens"] * each / speed / sums["kvacc"], 3),
    )


def watch_tokens(lm) -> list[int]:
    """Tokens of every forward pass from now on, padding left out."""
    counts: list[int] = []
    original = lm.wrapped.parallel

    def parallel(plan, *args, **kwargs):
        counts.append(int((plan.segment >= 0).sum()))
        return original(plan, *args, **kwargs)

    lm.wrapped.parallel = parallel
    return counts


if __name__ == "__main__":
    main()
