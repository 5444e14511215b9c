"""Fitting a document to its length: as many filler sentences as the tokens allow.

Sentences are tokenized one by one, once each, and added up; the whole prompt is tokenized
only to correct the sum, a handful of times, so that 128k tokens cost no more than that.
"""

from __future__ import annotations

import bisect

from kvacc.tasks.retention.filler import NoMoreFiller, Units
from kvacc.tasks.retention.measure import Measure
from kvacc.tasks.retention.sketch import Sketch

from kvacc.errors import KvaccError

TOLERANCE = 0.02
_CLOSE_ENOUGH = 0.005
"""Of the length: what is left unfilled when it is not worth another look."""
_MOST_PROBES = 24


class TooShort(Exception):
    """Facts and question alone are longer than the length asked for; ``needed`` is theirs."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


def prompt_of(context: str, question: str) -> str:
    """The prompt as the tasks' ``doc_to_text`` writes it."""
    return f"{context}\n{question}"


def fit(sketch: Sketch, units: Units, length: int, measure: Measure) -> str:
    """The haystack with as much filler that the prompt has ``length`` tokens, or up to 2 % less.

    Raises:
        TooShort: there is no room for the facts and the question.
        KvaccError: there is not enough filler, or the length cannot be met.
    """
    fitting = _Fitting(sketch, units, length, measure)
    fitting.add_sentences()
    fitting.add_short_ones()
    if fitting.total < (1 - TOLERANCE) * length:
        raise KvaccError(
            f"a prompt of {length} tokens could not be met: it came to {fitting.total}; "
            "give another length or another filler"
        )
    return fitting.context


class _Fitting:
    def __init__(self, sketch: Sketch, units: Units, length: int, measure: Measure) -> None:
        self.sketch, self.units, self.length, self.measure = sketch, units, length, measure
        self.texts: list[str] = []
        self.sums = [0]
        """Tokens of the first n sentences, each counted by itself."""
        self.count = 0
        self.short: list[str] = []
        self.total = self._tokens(0)
        if self.total > length:
            raise TooShort(self.total)

    def add_sentences(self) -> None:
        """The most sentences that fit, by probing between a number that fits and one that does not."""
        too_many = None
        for _ in range(_MOST_PROBES):
            count = self._guess(self.length - self.total)
            if too_many is not None:
                count = min(count, too_many - 1)
            if count <= self.count:
                # The estimate finds no room; a next sentence may still fit, but short ones do as well.
                return
            total = self._tokens(count)
            while total > self.length and count > self.count:
                too_many = count
                over = total - self.length
                count = max(self.count, bisect.bisect_right(self.sums, self.sums[count] - over) - 1)
                count = min(count, too_many - 1)
                total = self._tokens(count)
            self.count, self.total = count, total
            if too_many == count + 1 or self.length - total < _CLOSE_ENOUGH * self.length:
                return

    def add_short_ones(self) -> None:
        """Short sentences into what is left: the longest that fits, each once before any comes back."""
        pool = sorted(self.units.short, key=self.measure.part, reverse=True)
        fresh = list(pool)
        for _ in range(_MOST_PROBES):
            if self.length - self.total <= max(1, _CLOSE_ENOUGH * self.length):
                return
            added = next((text for text in fresh if self._add(text)), None)
            if added is None and len(fresh) == len(pool):
                return
            fresh = list(pool) if added is None else [text for text in fresh if text != added]

    def _add(self, text: str) -> bool:
        """Put one more short sentence in, if there is room for it."""
        if self.measure.part(text) > self.length - self.total:
            return False
        self.short.append(text)
        total = self._tokens(self.count)
        if total > self.length:
            self.short.pop()
            return False
        self.total = total
        return True

    @property
    def context(self) -> str:
        """The haystack as it is now."""
        return self._context(self.count)

    def _guess(self, room: int) -> int:
        """How many sentences there would be with ``room`` more tokens of them."""
        goal = self.sums[self.count] + room
        while self.sums[-1] <= goal:
            try:
                unit = self.units.get(len(self.texts))
            except NoMoreFiller as error:
                most = self._tokens(len(self.texts))
                if most >= (1 - TOLERANCE) * self.length:
                    break
                raise KvaccError(
                    f"{error} has {self.sums[-1]} usable tokens, too few for prompts of {self.length}; give "
                    f"a longer text, or a length of at most {most}"
                ) from None
            text = self._line(len(self.texts), unit)
            self.texts.append(text)
            # A line cannot cost nothing, or there would be no end of them.
            self.sums.append(self.sums[-1] + max(1, self.measure.part(self.sketch.separator + text)))
        return bisect.bisect_right(self.sums, goal) - 1

    def _line(self, number: int, text: str) -> str:
        return text if self.sketch.decorate is None else self.sketch.decorate(number, text)

    def _tokens(self, count: int) -> int:
        return self.measure.whole(prompt_of(self._context(count), self.sketch.question))

    def _context(self, count: int) -> str:
        lines, sums = self.texts[:count], self.sums[: count + 1]
        if self.short and lines:
            # Behind a sentence in the middle, where they move neither a fact at the start nor one at the end.
            lines[len(lines) // 2] += " " + " ".join(self.short)
        elif self.short:
            lines, sums = [self._line(0, " ".join(self.short))], [0, 1]
        facts = sorted(self.sketch.facts, key=lambda fact: fact.place)
        places = [_nearest(sums, fact.place * sums[-1]) for fact in facts]
        for fact, place in zip(reversed(facts), reversed(places), strict=True):
            lines.insert(place, fact.text)
        return "\n".join([self.sketch.introduction, self.sketch.separator.join(lines)])


def _nearest(sums: list[int], goal: float) -> int:
    """The place whose sum is nearest to ``goal``."""
    place = bisect.bisect_left(sums, goal)
    if place > 0 and goal - sums[place - 1] < sums[place] - goal:
        return place - 1
    return place
