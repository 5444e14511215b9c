"""Does `full` through kvacc give lm-eval's own answers?

Runs lm-eval's ``hf`` backend and kvacc's ``full`` strategy on the same requests and
compares every log-likelihood. One JSON line per task, then a table. Times are those of
this one run: a ratio, not a benchmark (that is ``make benchmarks``).

    python benchmarks/equal_to_hf.py --data-dir DATA [--limit 200] [--tasks piqa:0,piqa:5]
"""

from __future__ import annotations

import argparse
import json
import sys
import time

DEFAULT = "piqa:0,hellaswag:0,copa:0,winogrande:0,openbookqa:0,boolq:0,piqa:5,copa:5"
TOLERANCE = 1e-3


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--tasks", default=DEFAULT, help="task:shots, comma-separated")
    parser.add_argument("--batch-size", type=int, default=8, help="of the hf backend")
    arguments = parser.parse_args()

    from lm_eval.models.huggingface import HFLM

    from kvacc.backend import KvaccLM
    from kvacc.models import load_model, load_tokenizer

    tokenizer = load_tokenizer(arguments.model)
    stock = HFLM(load_model(arguments.model), tokenizer=tokenizer, batch_size=arguments.batch_size)
    ours = KvaccLM(load_model(arguments.model), tokenizer=tokenizer)
    rows = []
    for item in arguments.tasks.split(","):
        name, shots = item.split(":")
        row = compare(name, int(shots), arguments, stock, ours)
        print(json.dumps(row), flush=True)
        rows.append(row)
    print(
        f"\n{'task':<12}{'shots':>6}{'requests':>10}{'largest difference':>20}"
        f"{'acc hf':>9}{'acc kvacc':>11}{'time hf / kvacc':>17}"
    )
    for r in rows:
        print(
            f"{r['task']:<12}{r['shots']:>6}{r['requests']:>10}{r['largest_difference']:>20.1e}"
            f"{r['acc_hf']:>9.4f}{r['acc_kvacc']:>11.4f}{r['seconds_hf'] / r['seconds_kvacc']:>17.2f}"
        )
    different = [r for r in rows if r["largest_difference"] > TOLERANCE or r["acc_hf"] != r["acc_kvacc"]]
    print("equal" if not different else f"DIFFERENT: {[r['task'] for r in different]}")
    return bool(different)


def compare(name: str, shots: int, arguments, stock, ours) -> dict:
    from lm_eval.evaluator import evaluate

    from kvacc.task_catalog import load_tasks

    def run(lm):
        tasks = load_tasks([name], data_dir=arguments.data_dir, num_fewshot=shots)
        start = time.perf_counter()
        out = evaluate(lm, task_dict=tasks, limit=arguments.limit, bootstrap_iters=0)
        seconds = time.perf_counter() - start
        answers = {
            (sample["doc_id"], option): float(response[0][0])
            for sample in out["samples"][name]
            for option, response in enumerate(sample["resps"])
        }
        return answers, out["results"][name]["acc,none"], seconds

    theirs, their_accuracy, their_seconds = run(stock)
    mine, my_accuracy, my_seconds = run(ours)
    if theirs.keys() != mine.keys():
        raise SystemExit(f"{name}: the two backends answered different requests")
    return {
        "task": name,
        "shots": shots,
        "requests": len(theirs),
        "largest_difference": max(abs(theirs[k] - mine[k]) for k in theirs),
        "acc_hf": their_accuracy,
        "acc_kvacc": my_accuracy,
        "seconds_hf": round(their_seconds, 2),
        "seconds_kvacc": round(my_seconds, 2),
    }


if __name__ == "__main__":
    sys.exit(main())
