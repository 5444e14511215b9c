"""Last record wins: a value is told and updated several times, and the newest is asked for.

The wrong options are older values of the same key. What is tested is whether a strategy that
keeps what was attended to keeps the *newest* record, and not an older one as well remembered.
"""

from __future__ import annotations

from kvacc.tasks.retention.draws import Draws
from kvacc.tasks.retention.sketch import Fact, FactRange, Kind, Sketch
from kvacc.tasks.retention.words import PEOPLE


def sketch(facts: int, depth: float, draws: Draws) -> Sketch:
    """``facts`` values of four digits, told in order; the last one lies at ``depth``."""
    name, values = draws.choice(PEOPLE), draws.numbers(facts, digits=4)
    told = [
        Fact(depth * number / (facts - 1), f"Update {number + 1}: the balance of {name} is {value}.")
        for number, value in enumerate(values)
    ]
    return Sketch(
        introduction=f"The balance of {name} is updated {facts} times in the text below. "
        "Only the last update counts.",
        facts=tuple(told),
        # Without the update's number, which would make it a key to look up.
        question=f"Question: What is the balance of {name} after the last update?\n"
        f"Answer: The last update: the balance of {name} is",
        answer=values[-1],
        wrong=tuple(draws.sample(values[:-1], 3)),
        forbidden=frozenset({name, *values}),
    )


KIND = Kind(
    "last_record",
    "a value that is updated several times, its newest state asked for",
    sketch,
    form="number",
    facts=FactRange("records of the same value", default=4, least=4, most=64),
)
