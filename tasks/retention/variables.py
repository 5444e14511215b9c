"""Variable tracking: a chain of assignments has to be followed to its value.

As RULER's variable tracking (Hsieh et al., 2024, arXiv:2404.06654, section 3), but one value
is asked for. Four chains of equal length are told, and the options are their four values:
which value belongs to the last variable of a chain shows only when the chain is followed.
"""

from __future__ import annotations

from kvacc.tasks.retention.draws import Draws
from kvacc.tasks.retention.sketch import Fact, FactRange, Kind, Sketch
from kvacc.tasks.retention.words import NOUNS

CHAINS = 4


def sketch(facts: int, depth: float, draws: Draws) -> Sketch:
    """``facts`` assignments in each chain; the asked chain begins at ``depth``."""
    names, values = draws.sample(NOUNS, CHAINS * facts), draws.numbers(CHAINS, digits=4)
    told: list[Fact] = []
    asked = names[facts - 1]
    for chain, value in enumerate(values):
        variables = names[chain * facts : (chain + 1) * facts]
        start = depth if chain == 0 else draws.below(1000) / 1000
        # Each assignment follows the one that it needs.
        places = [start, *sorted(start + (1 - start) * draws.below(1000) / 1000 for _ in variables[1:])]
        for place, name, source in zip(places, variables, [value, *variables], strict=False):
            told.append(Fact(place, f"The value of {name} is {_shown(source)}."))
    return Sketch(
        introduction="Variables are given values in the text below. Keep track of them.",
        facts=tuple(told),
        question=f"Question: What number is the value of {asked}?\nAnswer: The number that {asked} has is",
        answer=values[0],
        wrong=tuple(values[1:]),
        forbidden=frozenset({*names, *values}),
    )


def _shown(source: str) -> str:
    return source if source.isdecimal() else f"the value of {source}"


KIND = Kind(
    "variables",
    "chains of assignments, the value of the last variable asked for",
    sketch,
    form="number",
    facts=FactRange("assignments in each chain", default=2, least=1, most=len(NOUNS) // CHAINS),
)
