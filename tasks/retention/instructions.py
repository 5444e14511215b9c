"""Instruction retention: several rules stand at the start; are all still obeyed, in their order?

All options say the same words, so only the order that the rules ask for tells them apart.
"""

from __future__ import annotations

import itertools

from kvacc.tasks.retention.draws import Draws
from kvacc.tasks.retention.sketch import Fact, FactRange, Kind, Sketch, swapped
from kvacc.tasks.retention.words import NOUNS


def sketch(facts: int, depth: float, draws: Draws) -> Sketch:
    """``facts`` rules, each of which asks for a word, and one of them for a number of three digits."""
    words = draws.sample(NOUNS, facts)
    words[draws.below(facts)] = draws.numbers(1, digits=3)[0]
    rules = [f"Rule {index + 1}: say {word}." for index, word in enumerate(words)]
    swaps = draws.sample(list(itertools.combinations(range(facts), 2)), 3)
    return Sketch(
        introduction="Obey these rules, in their order, when you answer at the end of the text.",
        facts=(Fact(depth, " ".join(rules)),),
        # Rule by rule: asked for the words alone, SmolLM2-135M says one of them or none.
        question="Now answer and obey all rules, in their order.\nRule 1: I say",
        answer=_answered(words),
        wrong=tuple(_answered(swapped(words, one, other)) for one, other in swaps),
        answers=tuple(words),
        forbidden=frozenset(words),
    )


def _answered(words: list[str]) -> str:
    """Begins with the first word: the question has opened its rule."""
    rest = [f". Rule {number}: I say {word}" for number, word in enumerate(words[1:], start=2)]
    return words[0] + "".join(rest) + "."


KIND = Kind(
    "instructions",
    "rules at the start of a text, all to be obeyed in order at its end",
    sketch,
    form="sequence",
    facts=FactRange("rules", default=3, least=3, most=16),
    depth="start",
)
