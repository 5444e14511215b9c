"""A strategy on one model: the cases to try, smallest first, and their runs, each made once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvacc.budget import Budget
from kvacc.errors import KvaccError
from kvacc.select_strategy import SelectStrategy
from kvacc.strategy import EvictStrategy, Strategy, make_strategy
from kvacc.verify.results import Failure
from kvacc.verify.runs import (
    PATHS_AGREE,
    Difference,
    Run,
    Text,
    first_difference,
    parallel_runs,
    reads_difference,
    step_runs,
)
from kvacc.verify.subjects import Subject, own_logits, rounded_otherwise

SHORT = 8
"""Tokens of the text that is tried first, so that what fails there fails in few tokens."""

DEFAULT_TOKENS = 26
"""Tokens of the longer text."""

TEXT_SEED = 4

_SHORT_BUDGETS = (3, 5, 6)
_LONG_BUDGETS = (6, 8, 12, "30%", 1)
_ROUNDINGS = 6
_EXACT_LOGITS = 10.0
"""Logits up to this size are compared with the absolute tolerance, larger ones relative to it."""


@dataclass(frozen=True)
class Case:
    """One text under one budget and protocol."""

    strategy: Strategy
    protocol: str
    text: Text

    @property
    def budget(self) -> str:
        return str(self.strategy.budget) if self.strategy.has_budget else "none"

    @property
    def limit(self) -> int:
        """Entries allowed at the end of the text."""
        return self.strategy.budget.entries(self.text.compressed, len(self.text))


class Bench:
    """Runs of a strategy on one model.

    Args:
        budgets: tight budgets to try, in place of the usual ones.
        tokens: length of the longer text.
        thorough: try every budget, and a short text before the longer one.
    """

    def __init__(
        self,
        subject: Subject,
        strategy: Strategy,
        budgets: Sequence[Any] | None = None,
        tokens: int = DEFAULT_TOKENS,
        thorough: bool = True,
    ):
        self.subject = subject
        self.strategy = strategy
        self.tokens = tokens
        self.thorough = thorough
        self.full = make_strategy("full")
        self.cases = list(self._cases(budgets))
        self._runs: dict[Any, list[Run]] = {}
        self._strategies: dict[int, Strategy] = {}

    @property
    def is_causal(self) -> bool:
        return self.strategy.causal

    @property
    def long_cases(self) -> list[Case]:
        """Those with the longer text."""
        return [case for case in self.cases if len(case.text) == self.tokens]

    @property
    def main_case(self) -> Case:
        """The longer text under the first protocol and budget."""
        return self.long_cases[0]

    def _cases(self, budgets: Sequence[Any] | None) -> Iterator[Case]:
        lengths = (min(SHORT, self.tokens), self.tokens) if self.thorough else (self.tokens,)
        for length in dict.fromkeys(lengths):
            strategies = self._tight(length, budgets)
            strategies = strategies if self.thorough or budgets else strategies[:1]
            for protocol in self.strategy.supported_protocols():
                for strategy in strategies:
                    yield Case(strategy, protocol, self.text(length, protocol))

    def _tight(self, length: int, budgets: Sequence[Any] | None) -> list[Strategy]:
        """The strategy under budgets that such a text fills, as far as it accepts them."""
        if not self.strategy.has_budget:
            return [self.strategy]
        if budgets:
            return [with_budget(self.strategy, budget) for budget in budgets]
        tried = _SHORT_BUDGETS if length <= SHORT else _LONG_BUDGETS
        accepted = {budget: try_budget(self.strategy, budget) for budget in tried}
        counts = [accepted[b] for b in tried if isinstance(b, int) and b > 1 and accepted[b] is not None]
        others = [accepted[b] for b in tried if b in ("30%", 1) and accepted[b] is not None]
        return [*counts[:1], *others] or [self.strategy]

    def text(self, length: int, protocol: str = "stream", seed: int = TEXT_SEED) -> Text:
        dense = {"stream": 0, "context": length // 2, "serve": length - max(2, length // 4)}[protocol]
        return Text(self.subject.draw_tokens(length, seed), dense, length)

    # Runs

    def parallel(self, case: Case) -> Run:
        """The case's text on the parallel path; run once."""
        return self._once(("parallel", self._identity(case), case.text), self.parallel_again, case)

    def parallel_again(self, case: Case) -> Run:
        return parallel_runs(self.subject, case.strategy, [case.text])[0]

    def step(self, case: Case, chunk: int = 1, padding: int = 0) -> Run:
        """The same on the step path, ``chunk`` tokens at a time behind ``padding`` pad tokens; run once."""
        key = ("step", self._identity(case), case.text, chunk, padding)
        return self._once(key, self.step_again, case, chunk, padding)

    def step_again(self, case: Case, chunk: int = 1, padding: int = 0, **options: Any) -> Run:
        return step_runs(self.subject, case.strategy, [case.text], chunk, padding, **options)[0]

    def full_run(self, text: Text) -> Run:
        """The full cache on the parallel path."""
        return self.parallel(Case(self.full, "stream", text))

    def own(self, text: Text) -> torch.Tensor:
        """The model's own logits of a text."""
        return self._once(("own", text), lambda: own_logits(self.subject, text.tokens))

    def _identity(self, case: Case) -> int:
        """Of the strategy's object. It is kept: the next one could be given a freed object's id,
        and its runs."""
        self._strategies[id(case.strategy)] = case.strategy
        return id(case.strategy)

    def _once(self, key: Any, make: Callable[..., Any], *arguments: Any) -> Any:
        if key not in self._runs:
            self._runs[key] = make(*arguments)
        return self._runs[key]

    def tolerance(self, text: Text, absolute: float) -> float:
        """``absolute`` for logits of a usual size; float32 is as exact relative to larger ones."""
        largest = float(self.full_run(text).logits.abs().max())
        return absolute * max(1.0, largest / _EXACT_LOGITS)

    # What a difference means

    def is_rounding(self, case: Case, difference: Difference) -> bool:
        """Does rounding alone decide what was read at that place? Two entries whose scores
        differ by a rounding error are kept by chance, in one run one, in another the other."""
        if difference.layer is None or difference.head is None:
            return False
        known = None
        for seed in range(_ROUNDINGS):
            with rounded_otherwise(self.subject, seed):
                run = self.parallel_again(case)
            read = run.reads[difference.layer][difference.head, difference.position]
            if known is not None and not torch.equal(read, known):
                return True
            known = read
        return False

    def repeats(self, case: Case) -> bool:
        """Are the first runs still what comes out now, of this case and of the main one, which
        ran before all others? Where they are not, comparing runs shows nothing but that
        (invariant 6)."""
        paths = [(self.parallel, self.parallel_again)]
        if self.is_causal:
            paths.append((self.step, self.step_again))
        return all(
            first_difference(first(known), again(known), 0.0) is None
            for known in dict.fromkeys((self.main_case, case))
            for first, again in paths
        )

    def failure(self, case: Case, difference: Difference, why: str) -> Failure:
        return Failure(
            what=difference.what,
            model=self.subject.label,
            protocol=case.protocol,
            budget=case.budget,
            tokens=len(case.text),
            layer=difference.layer,
            head=difference.head,
            position=difference.position,
            expected=difference.expected,
            found=difference.found,
            why=why,
        )

    def rounding_first(self, case: Case, expected: Run, found: Run) -> bool:
        """Is the first thing that differs in what was read, or where that is the same every
        logit that differs, decided by rounding?"""
        difference = reads_difference(expected, found)
        if difference is not None:
            return self.is_rounding(case, difference)
        return self.logits_are_rounding(case, expected.logits, found.logits)

    def logits_are_rounding(self, case: Case, expected: torch.Tensor, found: torch.Tensor) -> bool:
        """Does rounding alone move every logit that differs by as much as it differs? A real
        model can amplify it a thousandfold where a text makes no sense to it.

        Args:
            expected, found: [T, vocabulary].
        """
        gap = (expected - found).abs().nan_to_num(nan=float("inf")).amax(-1)
        known = self.parallel_again(case).logits
        moved = torch.zeros_like(gap)
        for seed in range(_ROUNDINGS):
            with rounded_otherwise(self.subject, seed):
                moved = moved.maximum((self.parallel_again(case).logits - known).abs().amax(-1))
        differs = gap > self.tolerance(case.text, PATHS_AGREE)
        return bool((gap <= moved)[differs].all())


def with_budget(strategy: Strategy, budget: Any) -> Strategy:
    """The same strategy under another budget.

    Raises:
        KvaccError: it refuses that budget.
    """
    return dataclasses.replace(strategy, budget=Budget.parse(budget, strategy.budget.of))


def try_budget(strategy: Strategy, budget: Any) -> Strategy | None:
    """:func:`with_budget`, or None where the strategy refuses it."""
    try:
        return with_budget(strategy, budget)
    except KvaccError:
        return None


def is_evict(strategy: Strategy) -> bool:
    return isinstance(strategy, EvictStrategy)


def is_select(strategy: Strategy) -> bool:
    return isinstance(strategy, SelectStrategy)
