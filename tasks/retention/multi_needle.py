"""Several needles, one asked: which value belongs to the key that is asked for?

As the multi-key needle of RULER (Hsieh et al., 2024, arXiv:2404.06654, section 3); the
sentences here are our own. The wrong options are the other needles' values, so that
remembering *that* a number occurred is worth nothing.
"""

from __future__ import annotations

from kvacc.tasks.retention.draws import Draws
from kvacc.tasks.retention.sketch import Fact, FactRange, Kind, Sketch, others, spread
from kvacc.tasks.retention.words import CITIES


def sketch(facts: int, depth: float, draws: Draws) -> Sketch:
    """``facts`` numbers of four digits; the asked one lies at ``depth``, the others anywhere."""
    cities, codes = draws.sample(CITIES, facts), draws.numbers(facts, digits=4)
    places = [depth, *draws.shuffled(spread(facts - 1, draws))]
    told = [f"The code of the {city} office is {code}." for city, code in zip(cities, codes, strict=True)]
    return Sketch(
        introduction="The codes of several offices are hidden in the text below. Remember all of them.",
        facts=tuple(map(Fact, places, told)),
        question=f"Question: What is the code of the {cities[0]} office?\n"
        f"Answer: The code of the {cities[0]} office is",
        answer=codes[0],
        wrong=others(draws, codes, codes[0]),
        forbidden=frozenset({*cities, *codes}),
    )


KIND = Kind(
    "multi_needle",
    "several numbers hidden in prose, one asked for",
    sketch,
    form="number",
    facts=FactRange("needles", default=4, least=4, most=64),
)
