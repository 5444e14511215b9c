"""Invariant 2: changing a later token never changes an earlier logit or decision."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvacc.verify.bench import Bench, Case
from kvacc.verify.check_equality import SAME_LOGITS
from kvacc.verify.results import Failure, Result, Tally
from kvacc.verify.runs import PATHS_AGREE, Difference, Run, Text, first_difference, positions

_OTHER_SEED = 77


def check_causality(bench: Bench) -> Result:
    """2. On the parallel path, where later tokens are there to be read: other tokens at the
    end, or no tokens there at all, leave everything before as it was."""
    tally = Tally(2, bench.subject.label)
    for case in bench.cases:
        run = bench.parallel(case)
        future = _reads_later(run)
        if future is not None:
            tally.cases += 1
            return tally.result(bench.failure(case, future, "a query reads a token that comes after it"))
        for first in _changed_from(bench, len(case.text)):
            for found, tolerance, how in (
                (_with_other_end(bench, case, first), SAME_LOGITS, "other"),
                (_without_end(bench, case, first), PATHS_AGREE, "no"),
            ):
                failure = _compare(bench, tally, case, first, run, found, tolerance, how)
                if failure is not None:
                    return tally.result(failure)
    return tally.result()


def _changed_from(bench: Bench, count: int) -> range:
    """Places from which on the text changes: the last one, and some before."""
    return range(count - 1, 0, -3 if bench.subject.is_tiny else -max(1, count // 3))


def _compare(
    bench: Bench, tally: Tally, case: Case, first: int, run: Run, found: Run, tolerance: float, how: str
) -> Failure | None:
    difference = first_difference(run, found, bench.tolerance(case.text, tolerance), before=first)
    if difference is None:
        tally.cases += 1
        return None
    if difference.what == "entries read" and bench.is_rounding(case, difference):
        tally.undecided += 1
        return None
    if not bench.repeats(case):
        tally.reasons.append("two runs of the same text differ, so nothing can be compared (see 6)")
        return None
    tally.cases += 1
    why = f"found is the same text with {how} tokens from position {first} on"
    if not bench.is_causal:
        why += "; the strategy says of itself that it is not causal"
    return bench.failure(case, difference, why)


def _reads_later(run: Run) -> Difference | None:
    for layer, read in sorted(run.reads.items()):
        later = (read & ~torch.ones_like(read).tril()).any(-1)
        if later.any():
            head, position = min(later.nonzero().tolist(), key=lambda place: place[1])
            expected = f"nothing after {position}"
            return Difference(
                "entries read", position, expected, positions(read[head, position]), layer, head
            )
    return None


def _with_other_end(bench: Bench, case: Case, first: int) -> Run:
    tokens = case.text.tokens
    vocabulary = bench.subject.wrapped.config.vocab_size
    drawn = bench.subject.draw_tokens(len(tokens) - first, _OTHER_SEED)
    # Every later token is another one.
    end = tuple(
        new if new != old else 3 + (new - 2) % (vocabulary - 3)
        for new, old in zip(drawn, tokens[first:], strict=True)
    )
    return bench.parallel(_with_tokens(case, (*tokens[:first], *end)))


def _without_end(bench: Bench, case: Case, first: int) -> Run:
    return bench.parallel(_with_tokens(case, case.text.tokens[:first]))


def _with_tokens(case: Case, tokens: tuple[int, ...]) -> Case:
    return replace(case, text=Text(tokens, case.text.dense, case.text.compressed))
