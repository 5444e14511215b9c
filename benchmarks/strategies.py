"""What a strategy's accuracy costs in time beside the full cache, on the parallel path.

    python benchmarks/strategies.py --data-dir DATA

Times of ``h2o`` and ``infinigen`` (protocol ``stream``, budget 0.2) over ``full``'s on the same
items, and of six budgets in one sweep over one budget. These are times of *scoring*; no
latency of the strategies themselves follows from them.
"""

from __future__ import annotations

import argparse

from common import emit, evaluation, machine, paired, quiet

BUDGETS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--limit", type=int, default=16, help="documents of the 5-shot tasks")
    parser.add_argument("--strategies", default="h2o,infinigen,streaming_llm,quest")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="part of a measurement's name")
    arguments = parser.parse_args()
    quiet()

    from kvacc.backend import KvaccLM
    from kvacc.strategy import make_strategy

    lm = KvaccLM(arguments.model)
    emit(measurement="machine", **machine())

    def score(strategy, task: str, shots: int, limit: int, **options):
        # The task is loaded before time is taken.
        ready = evaluation(lm, task, limit, shots, arguments.data_dir, **options)

        def run():
            lm.use(strategy, "stream")
            return ready()

        return run

    full = make_strategy("full")
    cases = (
        ("piqa 0-shot", "piqa", 0, 4 * arguments.limit, {}),
        ("piqa 5-shot", "piqa", 5, arguments.limit, {}),
        ("passkey of 1,024 tokens", "kvacc_passkey", 0, arguments.limit // 2, {"length": 1024}),
    )
    for name in arguments.strategies.split(","):
        strategy = make_strategy(name, 0.2)
        for words, task, shots, limit, options in cases:
            label = f"{name} / full, stream, {words}"
            if arguments.only not in label:
                continue
            # The first use prepares the strategy (compiling, calibration).
            score(strategy, task, shots, 1, **options)()
            times = paired(
                score(strategy, task, shots, limit, **options),
                score(full, task, shots, limit, **options),
                arguments.repeats,
                same_requests,
            )
            emit(measurement=label, limit=limit, **times)
    label = "six budgets / one budget, h2o, stream, piqa 5-shot"
    if arguments.only in label:
        one = score(make_strategy("h2o", 0.2), "piqa", 5, arguments.limit)
        six = [score(make_strategy("h2o", budget), "piqa", 5, arguments.limit) for budget in BUDGETS]
        base = score(full, "piqa", 5, arguments.limit)
        for words, first in (("", []), (", full in both", [base])):
            times = paired(
                lambda first=first: [run() for run in [*first, *six]],
                lambda first=first: [run() for run in [*first, one]],
                arguments.repeats,
                lambda *answers: None,
            )
            emit(measurement=label + words, limit=arguments.limit, **times)


def same_requests(one, other) -> None:
    """The strategies may answer otherwise, but must have been asked the same."""
    if one[0].keys() != other[0].keys():
        raise SystemExit("the two strategies were asked different requests")


if __name__ == "__main__":
    main()
