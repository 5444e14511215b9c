"""What a strategy's accuracy costs in time beside the full cache, on the parallel path.

    python benchmarks/strategies.py --data-dir DATA

Times of ``h2o`` and ``infinigen`` (protocol ``stream``, budget 0.2) over ``full``'s on the same
items, and of six budgets in one sweep over one budget. These are times of *scoring*; no
latency of the strategies themselves follows from them.
"""

from __future__ import annotations

import argparse

from common import emit, evaluate, machine, paired, quiet

BUDGETS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="part of a measurement's name")
    arguments = parser.parse_args()
    quiet()

    from kvacc.backend import KvaccLM
    from kvacc.strategy import make_strategy

    lm = KvaccLM(arguments.model)
    emit(measurement="machine", **machine())

    def score(strategy, task: str, shots: int, **options):
        def run():
            lm.use(strategy, "stream")
            return evaluate(lm, task, arguments.limit, shots, arguments.data_dir, **options)

        return run

    full = make_strategy("full")
    for name in ("h2o", "infinigen", "quest", "streaming_llm"):
        strategy = make_strategy(name, 0.2)
        for task, shots in (("piqa", 0), ("piqa", 5), ("kvacc_passkey", 0)):
            label = f"{name} / full, stream, {task} {shots}-shot"
            if arguments.only not in label:
                continue
            # The first use prepares the strategy (compiling, calibration).
            score(strategy, task, shots)()
            times = paired(
                score(strategy, task, shots), score(full, task, shots), arguments.repeats, same_requests
            )
            emit(measurement=label, limit=arguments.limit, **times)
    label = "six budgets / one budget, h2o, stream, piqa 5-shot"
    if arguments.only in label:
        one = score(make_strategy("h2o", 0.2), "piqa", 5)
        six = [score(make_strategy("h2o", budget), "piqa", 5) for budget in BUDGETS]
        times = paired(lambda: [run() for run in six], one, arguments.repeats, lambda *answers: None)
        emit(measurement=label, limit=arguments.limit, **times)


def same_requests(one, other) -> None:
    """The strategies may answer otherwise, but must have been asked the same."""
    if one[0].keys() != other[0].keys():
        raise SystemExit("the two strategies were asked different requests")


if __name__ == "__main__":
    main()
