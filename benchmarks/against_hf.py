"""kvacc's ``full`` against lm-eval's own ``hf`` backend: the same items, equal answers, less time.

    python benchmarks/against_hf.py --data-dir DATA --shots 0
    python benchmarks/against_hf.py --data-dir DATA --shots 5 --sampler first_n

One JSON line per benchmark and block of documents, then one for the whole set: both times, their
ratio (and the least and the greatest of a block), and the share of the floor that kvacc reached: the
time that the matrix multiplications of the tokens that it read, and of the logits that it scored,
take on this machine with nothing between them. kvacc multiplies by prepacked weights, which is
faster, so its share of the floor by those is given, too.
"""

from __future__ import annotations

import argparse
import statistics

from common import (
    BENCHMARKS,
    emit,
    evaluate,
    evaluation,
    head_operations_per_token,
    layer_operations_per_token,
    machine,
    matrix_multiply_speed,
    quiet,
    require_equal_answers,
    timed,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--limit", type=int, default=200, help="documents of each benchmark in a block")
    parser.add_argument("--blocks", type=int, default=1, help="blocks, each of other documents")
    parser.add_argument("--shots", type=int, default=0)
    parser.add_argument("--sampler", choices=("default", "first_n"), default="default")
    parser.add_argument("--tasks", default=",".join(BENCHMARKS))
    parser.add_argument("--batch-size", type=int, default=8, help="of the hf backend; 8 is its best here")
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
    for lm in (stock, ours):  # what only a first call does
        evaluate(lm, "copa", 4, 0, arguments.data_dir)
    speeds, packed_speeds, totals = [], [], []
    for block in range(arguments.blocks):
        sums = {"hf": 0.0, "kvacc": 0.0, "tokens": 0, "scored": 0}
        speeds.append(matrix_multiply_speed(ours.model))
        packed_speeds.append(matrix_multiply_speed(ours.model, prepacked=True))
        for number, name in enumerate(arguments.tasks.split(",")):

            def run(lm, name=name, block=block):
                return evaluation(
                    lm, name, arguments.limit, arguments.shots, arguments.data_dir, arguments.sampler,
                    first=block * arguments.limit,
                )  # fmt: skip

            read.clear()
            # In turns, so that a drifting clock favours neither.
            pair = [("hf", stock), ("kvacc", ours)][:: (-1) ** (block + number)]
            ready = {key: run(lm) for key, lm in pair}
            if ready["hf"] is None:
                continue  # fewer documents than blocks ask for
            found = {key: timed(each) for key, each in ready.items()}
            require_equal_answers(found["hf"][1], found["kvacc"][1])
            tokens, scored = (sum(each) for each in zip(*read, strict=True))
            for key in ("hf", "kvacc"):
                sums[key] += found[key][0]
            sums["tokens"] += tokens
            sums["scored"] += scored
            emit(
                measurement="hf / kvacc full",
                task=name,
                shots=arguments.shots,
                sampler=arguments.sampler,
                block=block,
                tokens_read=tokens,
                tokens_scored=scored,
                seconds_one=round(found["hf"][0], 2),
                seconds_other=round(found["kvacc"][0], 2),
                ratio=round(found["hf"][0] / found["kvacc"][0], 3),
            )
        speeds.append(matrix_multiply_speed(ours.model))
        packed_speeds.append(matrix_multiply_speed(ours.model, prepacked=True))
        totals.append(sums)
    speed, packed_speed = statistics.median(speeds), statistics.median(packed_speeds)
    layer, head = layer_operations_per_token(ours.model), head_operations_per_token(ours.model)
    ratios = [sums["hf"] / sums["kvacc"] for sums in totals]
    whole = {key: sum(sums[key] for sums in totals) for key in totals[0]}
    operations = whole["tokens"] * layer + whole["scored"] * head
    emit(
        measurement="hf / kvacc full, whole set",
        shots=arguments.shots,
        sampler=arguments.sampler,
        limit=arguments.limit,
        pairs=len(totals),
        seconds_one=round(whole["hf"], 1),
        seconds_other=round(whole["kvacc"], 1),
        ratio=round(whole["hf"] / whole["kvacc"], 3),
        ratio_min=round(min(ratios), 3),
        ratio_max=round(max(ratios), 3),
        matrix_multiply_gflops=round(speed / 1e9, 1),
        share_of_floor=round(operations / speed / whole["kvacc"], 3),
        prepacked_gflops=round(packed_speed / 1e9, 1),
        share_of_prepacked_floor=round(operations / packed_speed / whole["kvacc"], 3),
    )


def watch_tokens(lm) -> list[tuple[int, int]]:
    """Tokens read and tokens scored in every forward pass from now on, padding left out."""
    counts: list[tuple[int, int]] = []
    original = lm.wrapped.parallel

    def parallel(plan, *args, **kwargs):
        counts.append((int((plan.segment >= 0).sum()), int(plan.counted.sum())))
        return original(plan, *args, **kwargs)

    lm.wrapped.parallel = parallel
    return counts


if __name__ == "__main__":
    main()
