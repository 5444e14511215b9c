"""What the benchmark scripts share: paired timing, one JSON line per measurement, the floor.

Times mean something only beside others of the same run: machines are shared and clocks
drift. So two programs are timed in turns (a b, b a, a b, ...), and what is reported is the
median of the ratios of neighbours.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

BENCHMARKS = ("piqa", "hellaswag", "copa", "winogrande", "openbookqa", "boolq")


def emit(**record: Any) -> dict[str, Any]:
    """Print one measurement as a line of JSON, and return it."""
    print(json.dumps(record), flush=True)
    return record


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch
    import transformers

    return {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load_before": round(os.getloadavg()[0], 2),
    }


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of wall time, and what ``run`` returned."""
    gc.collect()
    start = time.perf_counter()
    answer = run()
    return time.perf_counter() - start, answer


def paired(
    one: Callable[[], Any], other: Callable[[], Any], repeats: int, same: Callable[[Any, Any], None]
) -> dict[str, float]:
    """Time two programs in turns.

    Args:
        one, other: give their answers.
        repeats: pairs.
        same: raises unless the two answers are equal; a fast wrong answer is worth nothing.

    Returns:
        median seconds of each, and median, minimum and maximum of ``one / other`` over the pairs.
    """
    ones, others = [], []
    for turn in range(repeats):
        # In turns, so that a drifting clock favours neither.
        order = [(one, ones), (other, others)]
        answers = {}
        for run, times in order if turn % 2 == 0 else reversed(order):
            seconds, answers[run] = timed(run)
            times.append(seconds)
        same(answers[one], answers[other])
    ratios = [a / b for a, b in zip(ones, others, strict=True)]
    return {
        "seconds_one": round(statistics.median(ones), 3),
        "seconds_other": round(statistics.median(others), 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "pairs": repeats,
    }


def matrix_multiply_speed(model, rows: int = 1024, repeats: int = 5, prepacked: bool = False) -> float:
    """Floating-point operations per second of the layers' own matrix multiplications, one after
    the other for ``rows`` tokens and nothing between them: what no forward pass can beat here.
    As PyTorch multiplies, or by weights ``prepacked`` as they are while kvacc computes answers."""
    import torch

    from kvacc.engine.prepacked import PrepackedWeights

    weights = {id(matrix) for matrix in _layer_matrices(model)}
    layers = [module for module in model.modules() if id(getattr(module, "weight", None)) in weights]
    inputs = {size: torch.randn(rows, size) for size in {layer.weight.shape[1] for layer in layers}}
    seconds = []
    packed = PrepackedWeights(model).used() if prepacked else contextlib.nullcontext()
    with torch.inference_mode(), packed:
        for _ in range(repeats + 1):
            start = time.perf_counter()
            for layer in layers:
                layer(inputs[layer.weight.shape[1]])
            seconds.append(time.perf_counter() - start)
    return rows * layer_operations_per_token(model) / statistics.median(seconds[1:])


def layer_operations_per_token(model) -> int:
    """Multiplications and additions of one token in the layers' matrices, the vocabulary
    projection and attention over other tokens left out."""
    return 2 * sum(matrix.numel() for matrix in _layer_matrices(model))


def head_operations_per_token(model) -> int:
    """The same of the vocabulary projection, which only scored positions need."""
    return 2 * model.get_output_embeddings().weight.numel()


def _layer_matrices(model) -> list:
    ends = {id(model.get_output_embeddings().weight), id(model.get_input_embeddings().weight)}
    return [p for p in {id(p): p for p in model.parameters() if p.ndim == 2}.values() if id(p) not in ends]


def answers_of(samples: list[dict[str, Any]]) -> dict[tuple[int, int], float]:
    """Log-likelihood by document and option, from lm-eval's samples."""
    return {
        (sample["doc_id"], option): float(response[0][0])
        for sample in samples
        for option, response in enumerate(sample["resps"])
    }


def evaluation(
    lm,
    name: str,
    limit: int | None,
    shots: int,
    data_dir: str | None,
    sampler: str | None = None,
    first: int = 0,
    **options: Any,
) -> Callable[[], tuple[dict[tuple[int, int], float], float]] | None:
    """What evaluates ``limit`` documents of one task, from ``first`` on: (answers, accuracy). The
    task is loaded here, once for each call of the result, so that loading it is not timed. None
    where the task has no more documents."""
    from lm_eval.evaluator import evaluate as run

    from kvacc.task_catalog import load_tasks

    tasks = load_tasks(
        [name],
        data_dir=data_dir,
        num_fewshot=shots,
        fewshot_sampler=sampler,
        options=options or None,
        tokenizer=lm.tokenizer if options else None,
    )
    task = tasks[name]
    split = task.config.test_split if task.has_test_docs() else task.config.validation_split
    documents = task.dataset[split]
    if first >= len(documents):
        return None
    last = len(documents) if limit is None else min(len(documents), first + limit)
    task.dataset[split] = documents.select(range(first, last))

    def evaluate():
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars
            out = run(lm, task_dict=tasks, bootstrap_iters=0)
        return answers_of(out["samples"][name]), out["results"][name]["acc,none"]

    return evaluate


def evaluate(*args: Any, **options: Any):
    """The same at once."""
    return evaluation(*args, **options)()


def require_equal_answers(one, other, tolerance: float = 1e-3) -> None:
    """Exit unless both have the same requests, the same log-likelihoods and accuracy."""
    answers, accuracy = one
    others, other_accuracy = other
    if answers.keys() != others.keys():
        sys.exit("the two backends answered different requests")
    worst = max(abs(answers[key] - others[key]) for key in answers)
    if worst > tolerance or accuracy != other_accuracy:
        sys.exit(
            f"different answers: log-likelihoods by {worst:.2e}, accuracy {accuracy} and {other_accuracy}"
        )


def quiet() -> None:
    """Progress bars of the backends would cost time and fill the log."""
    import logging

    os.environ.setdefault("TQDM_DISABLE", "1")
    for name in ("lm_eval", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
