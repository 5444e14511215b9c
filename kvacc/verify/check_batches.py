"""Invariants 5 and 6: neither neighbours, padding nor earlier requests change a result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from kvacc.engine.plan import Request
from kvacc.engine.scoring import Score, score_documents
from kvacc.verify.bench import Bench, Case
from kvacc.verify.results import Failure, Result, Tally
from kvacc.verify.runs import PATHS_AGREE, Difference, Run, Text, first_difference, parallel_runs, step_runs

_SAME_SCORE = 1e-4
_OTHER_SEED = 31


def check_batches(bench: Bench) -> Result:
    """5. A text alone, beside shorter and longer ones (right padding on the parallel path, left
    padding on the step path), and behind padding of its own, in chunks or not."""
    tally = Tally(5, bench.subject.label)
    for case in bench.cases:
        batch = _neighbours(bench, case)
        found = parallel_runs(bench.subject, case.strategy, [c.text for c in batch])
        failure = _compare(bench, tally, batch, found, bench.parallel, "in a right-padded batch")
        if failure is None and bench.is_causal:
            found = step_runs(bench.subject, case.strategy, [c.text for c in batch])
            failure = _compare(bench, tally, batch, found, bench.step, "in a left-padded batch")
        if failure is None and bench.is_causal:
            for padding, chunk in _paddings(bench, case):
                how = f"behind {padding} padding columns, in chunks of {chunk}"
                run = bench.step(case, chunk, padding)
                failure = failure or _compare(bench, tally, [case], [run], bench.step, how)
        if failure is not None:
            return tally.result(failure)
    for case in _one_per_protocol(bench):
        documents = _documents(bench, case)
        apart = score_documents(bench.subject.wrapped, documents, case.strategy, batch_tokens=1)
        failure = _same_scores(bench, tally, case, documents, apart, "one row at a time")
        if failure is not None and bench.repeats(case):
            return tally.result(failure)
    if not bench.is_causal:
        tally.reasons.append("no left padding: there is no step path")
    return tally.result()


def _neighbours(bench: Bench, case: Case) -> list[Case]:
    """The case between a shorter and a longer text of other words, read in the same way."""
    batch = [case]
    for length, seed in ((max(2, len(case.text) // 2), _OTHER_SEED), (len(case.text) + 5, _OTHER_SEED + 1)):
        text = bench.text(length, case.protocol, seed)
        batch.append(
            dataclasses.replace(case, text=dataclasses.replace(text, compressed=case.text.compressed))
        )
    return [batch[1], batch[0], batch[2]]


def _paddings(bench: Bench, case: Case) -> list[tuple[int, int]]:
    """(columns, chunk): padding that ends inside a chunk, and alone in the first one."""
    if case.strategy is not bench.main_case.strategy and len(case.text) == bench.tokens:
        return []
    whole = [(3, len(case.text) + 3)]
    if bench.thorough:
        return [(1, 1), (5, 3), *whole]
    return [(5, 3), *whole] if bench.subject.is_tiny else whole


def _compare(
    bench: Bench,
    tally: Tally,
    batch: Sequence[Case],
    found: Sequence[Run],
    alone: Callable[[Case], Run],
    how: str,
) -> Failure | None:
    for case, run in zip(batch, found, strict=True):
        expected = alone(case)
        difference = first_difference(expected, run, bench.tolerance(case.text, PATHS_AGREE))
        if difference is None:
            tally.cases += 1
        elif bench.rounding_first(case, expected, run):
            tally.undecided += 1
        elif not bench.repeats(case):
            tally.reasons.append("two runs of the same text differ, so batches cannot be compared (see 6)")
        else:
            tally.cases += 1
            return bench.failure(case, difference, f"expected is the text alone, found is it {how}")
    return None


def check_leaks(bench: Bench) -> Result:
    """6. The same run again is bitwise the same, the full cache before and after too; the order
    of requests and of their options does not matter; nothing stays on the model."""
    tally = Tally(6, bench.subject.label)
    before = _Traces(bench)
    for case in bench.cases:
        failure = _repeated(bench, tally, case)
        if failure is not None:
            return tally.result(failure)
    for case in _one_per_protocol(bench):
        failure = _in_any_order(bench, tally, case)
        if failure is not None:
            return tally.result(failure)
    tally.cases += 1
    difference = before.difference()
    if difference is not None:
        why = "before the strategy ran, and after"
        return tally.result(bench.failure(bench.main_case, difference, why))
    return tally.result()


def _repeated(bench: Bench, tally: Tally, case: Case) -> Failure | None:
    """The same text again, after others."""
    other = dataclasses.replace(case, text=bench.text(len(case.text) + 3, case.protocol, _OTHER_SEED))
    paths = {"parallel path": (bench.parallel, bench.parallel_again)}
    if bench.is_causal and (bench.thorough or case is bench.main_case):
        paths["step path"] = (bench.step, bench.step_again)
    for name, (once, now) in paths.items():
        first = once(case)
        now(other)
        tally.cases += 1
        difference = first_difference(first, now(case), tolerance=0.0)
        if difference is not None:
            why = f"expected is the first run of the {name}, found a later one, after other texts"
            return bench.failure(case, difference, why)
    return None


def _one_per_protocol(bench: Bench) -> list[Case]:
    return list({case.protocol: case for case in reversed(bench.long_cases)}.values())


def _in_any_order(bench: Bench, tally: Tally, case: Case) -> Failure | None:
    documents = _documents(bench, case)
    turned = [document[::-1] for document in documents[::-1]]
    backward = score_documents(bench.subject.wrapped, turned, case.strategy)
    mirrored = [scores[::-1] for scores in backward[::-1]]
    return _same_scores(bench, tally, case, documents, mirrored, "in reverse order")


def _same_scores(
    bench: Bench,
    tally: Tally,
    case: Case,
    documents: list[list[Request]],
    found: list[list[Score]],
    how: str,
) -> Failure | None:
    together = score_documents(bench.subject.wrapped, documents, case.strategy)
    for number, (expected, scores) in enumerate(zip(together, found, strict=True)):
        for option, (one, other) in enumerate(zip(expected, scores, strict=True)):
            tally.cases += 1
            difference = _score_difference(one, other)
            if difference is not None:
                why = f"document {number}, option {option}: expected is all in order, found {how}"
                return bench.failure(case, difference, why)
    return None


def _documents(bench: Bench, case: Case) -> list[list[Request]]:
    """Three contexts of other lengths, each with three options that share their first token or not."""
    out = []
    for number, length in enumerate((len(case.text), len(case.text) // 2, 2 * len(case.text) // 3)):
        text = bench.text(length, case.protocol, _OTHER_SEED + number)
        options = ((5, 6, 7), (5, 8, 9, 10), (11,))
        dense = length if case.protocol == "serve" else text.dense
        out.append([Request((*text.tokens, *o[:-1]), o, dense, length) for o in options])
    return out


def _score_difference(one: Score, other: Score) -> Difference | None:
    if abs(one.loglikelihood - other.loglikelihood) > _SAME_SCORE * max(1.0, abs(one.loglikelihood)):
        values = f"{one.loglikelihood:.6f}", f"{other.loglikelihood:.6f}"
        return Difference("log-likelihood", None, *values)
    if abs(one.kept_fraction - other.kept_fraction) > 1e-9:
        return Difference("kept fraction", None, f"{one.kept_fraction:.6f}", f"{other.kept_fraction:.6f}")
    if one.hidden != other.hidden:
        return Difference("an entry was hidden", None, str(one.hidden), str(other.hidden))
    return None


class _Traces:
    """What a strategy could leave behind on a model: hooks, weights, the full cache's results."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.text: Text = bench.main_case.text
        self.hooks = self._hooks()
        self.weights = self._weights()
        self.full = self._full()

    def difference(self) -> Difference | None:
        for before, after in zip(self.full, self._full(), strict=True):
            found = first_difference(before, after, tolerance=0.0)
            if found is not None:
                return dataclasses.replace(found, what=f"full cache's {found.what}")
        if self._hooks() != self.hooks:
            return Difference("hooks on the model", None, str(self.hooks), str(self._hooks()))
        for name, value in self._weights().items():
            if value != self.weights[name]:
                return Difference(f"sum of {name}", None, str(self.weights[name]), str(value))
        return None

    def _full(self) -> list[Run]:
        return [
            *parallel_runs(self.bench.subject, self.bench.full, [self.text]),
            *step_runs(self.bench.subject, self.bench.full, [self.text], chunk=len(self.text)),
        ]

    def _hooks(self) -> int:
        modules = self.bench.subject.wrapped.model.modules()
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)

    def _weights(self) -> dict[str, float]:
        state = self.bench.subject.wrapped.model.state_dict()
        return {name: float(value.sum(dtype=torch.float64)) for name, value in state.items()}
