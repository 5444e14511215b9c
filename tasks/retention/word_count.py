"""Word counting: which word of a long list occurs most often?

An aggregation over the whole text, as RULER's common and frequent words (Hsieh et al., 2024,
arXiv:2404.06654, section 3). The list is made of rounds; in each, every word occurs once
and one of them three times, so the answer is the same from the first round on.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvacc.tasks.retention.draws import Draws
from kvacc.tasks.retention.filler import Units
from kvacc.tasks.retention.sketch import Fact, FactRange, Kind, Sketch, others
from kvacc.tasks.retention.words import NOUNS

TIMES = 3


def sketch(facts: int, depth: float | None, draws: Draws) -> Sketch:
    """``facts`` different words. The wrong options are words of the list."""
    words = draws.sample(NOUNS, facts)
    answer, rounds = words[0], _rounds(words, draws)
    return Sketch(
        introduction="Here is a list of words. One of them occurs more often than every other.",
        # Two rounds are always there, so that a rest of single words cannot tie with the answer.
        facts=(Fact(0, next(rounds)), Fact(0, next(rounds))),
        question="Question: Which word occurs most often in the list above?\n"
        "Answer: The most frequent word in the list is the word",
        answer=answer,
        wrong=others(draws, words, answer),
        # A rest of the length takes each of the other words once: they stay behind.
        units=Units(rounds, short=tuple(words[1:]), name="the list of words"),
    )


def _rounds(words: list[str], draws: Draws) -> Iterator[str]:
    while True:
        yield " ".join(draws.shuffled([*words, *[words[0]] * (TIMES - 1)]))


KIND = Kind(
    "word_count",
    "a long list of words, the most frequent one asked for",
    sketch,
    form="word",
    facts=FactRange("different words", default=8, least=4, most=32),
    depth="none",
    takes_filler=False,
)
