"""A backend without a model, for tests of what stands above it. As a script, a sweep with it:

python fake_backend.py CONFIG OUTPUT SECONDS_PER_CELL
"""

from __future__ import annotations

import hashlib
import sys
import time
from types import SimpleNamespace

from lm_eval.api.model import LM

from kvacc.records import RequestRecord

WORDS_CONTEXT = 40


class FakeLM(LM):
    """Scores by a hash of the text, and of the strategy once a prompt is longer than its budget.

    Tokens are words. Prompts of more than ``WORDS_CONTEXT`` words are cut from the left.
    """

    def __init__(self, seconds_per_cell: float = 0.0, constant: float | None = None) -> None:
        super().__init__()
        self._device = "cpu"
        self.records: list[RequestRecord] = []
        self.progress = None
        self.used: list[tuple] = []
        self.prompts: list[list[str]] = []
        self.seconds_per_cell, self.constant = seconds_per_cell, constant
        self.model = SimpleNamespace(name="fake")

    def use(self, strategy, protocol, tail_tokens=32):
        self.strategy, self.protocol = strategy, protocol
        self.used.append((strategy, protocol, tail_tokens))

    def clear_records(self):
        self.records = []

    def loglikelihood(self, requests):
        self.prompts.append([request.args[0] for request in requests])
        answers = []
        for number, request in enumerate(requests):
            time.sleep(self.seconds_per_cell / len(requests))
            context, continuation = request.args
            acted, salt = self._record(request, context, len(continuation.split()))
            value = self.constant if self.constant is not None else -_unit(context + continuation + salt) * 9
            answers.append((value, value > -1))
            if self.progress:
                self.progress(number + 1, len(requests))
        return answers

    def generate_until(self, requests):
        self.prompts.append([request.args[0] for request in requests])
        for request in requests:
            self._record(request, request.args[0], 3)
        # Right for every third document.
        return [
            str(request.doc.get("target", request.doc.get("answer")))
            if request.doc_id % 3 == 0
            else "nothing"
            for request in requests
        ]

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError

    def _record(self, request, context, scored):
        words = len(context.split())
        seen = min(words, WORDS_CONTEXT)
        budget = self.strategy.budget.entries(prompt=seen) if self.strategy.has_budget else None
        acted = budget is not None and budget < seen
        self.records.append(
            RequestRecord(
                task=request.task_name,
                doc_id=request.doc_id,
                option=request.idx,
                kind=request.request_type,
                prompt_tokens=seen,
                scored_tokens=scored,
                truncated_tokens=words - seen,
                budget_entries=budget,
                kept_fraction=budget / seen if acted else 1.0,
                acted=acted,
                unreachable_tokens=1 if self.protocol == "serve" else 0,
            )
        )
        return acted, repr(self.strategy) + self.protocol if acted else ""


def _unit(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


if __name__ == "__main__":
    from rich.console import Console

    import kvacc.evaluation
    from kvacc.config import load_config
    from kvacc.sweep import run_sweep

    kvacc.evaluation.fingerprint_of = lambda lm, spec: {"name": spec.model.pretrained}
    seconds = float(sys.argv[3])
    run_sweep(
        load_config(sys.argv[1]),
        sys.argv[2],
        console=Console(),
        load_model=lambda model, config: FakeLM(seconds),
    )
