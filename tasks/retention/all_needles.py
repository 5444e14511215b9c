"""Several needles, all asked: every value has to be given, in the order of the question.

As the multi-value and multi-query needles of RULER (Hsieh et al., 2024, arXiv:2404.06654,
section 3); the sentences here are our own. Every option lists all the right numbers; in a
wrong one two of them have changed places, so that only who belongs to what decides.
"""

from __future__ import annotations

import itertools

from kvacc.tasks.retention.draws import Draws
from kvacc.tasks.retention.sketch import Fact, FactRange, Kind, Sketch, spread, swapped
from kvacc.tasks.retention.words import CITIES


def sketch(facts: int, depth: float | None, draws: Draws) -> Sketch:
    """``facts`` numbers of four digits, spread over the whole text."""
    cities, codes = draws.sample(CITIES, facts), draws.numbers(facts, digits=4)
    places = draws.shuffled(spread(facts, draws))
    told = [f"The code of {city} is {code}." for city, code in zip(cities, codes, strict=True)]
    swaps = draws.sample(list(itertools.combinations(range(facts), 2)), 3)
    return Sketch(
        introduction="The codes of several cities are hidden in the text below. Remember all of them.",
        facts=tuple(map(Fact, places, told)),
        # Whole sentences: of a list in a shorter form, SmolLM2-135M gave the first number only.
        question=f"Question: What are the codes of {', '.join(cities)}?\nAnswer: The code of {cities[0]} is",
        answer=_listed(cities, codes),
        wrong=tuple(_listed(cities, swapped(codes, one, other)) for one, other in swaps),
        answers=tuple(codes),
        forbidden=frozenset({*cities, *codes}),
    )


def _listed(cities: list[str], codes: list[str]) -> str:
    """Begins with the first code: its city ends the question."""
    rest = [f". The code of {city} is {code}" for city, code in zip(cities[1:], codes[1:], strict=True)]
    return codes[0] + "".join(rest) + "."


KIND = Kind(
    "all_needles",
    "several numbers hidden in prose, all asked for",
    sketch,
    form="numbers",
    facts=FactRange("needles", default=4, least=3, most=32),
    depth="none",
)
