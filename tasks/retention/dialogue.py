"""Dialogue facts: told in an early turn of a conversation, asked for many turns later.

Both speakers tell the same things of themselves, so a right answer needs who said it and of
whom. The options are what the two said about two relations.
"""

from __future__ import annotations

from kvacc.tasks.retention.draws import Draws
from kvacc.tasks.retention.sketch import Fact, FactRange, Kind, Sketch, spread
from kvacc.tasks.retention.words import NAMES, PEOPLE

RELATIONS = (
    "dog", "cat", "sister", "brother", "boss", "cousin", "roommate", "doctor", "aunt", "grandfather",
    "best friend", "landlord",
)  # fmt: skip


def sketch(facts: int, depth: float, draws: Draws) -> Sketch:
    """``facts`` names, half of them by each speaker; the asked one lies at ``depth``."""
    speakers = draws.sample(PEOPLE, 2)
    relations = draws.sample(RELATIONS, facts // 2)
    told = [(speaker, relation) for relation in relations for speaker in speakers]
    names = draws.sample(NAMES, facts)
    places = [depth, *draws.shuffled(spread(facts - 1, draws))]
    lines = [f"{who}: My {what} is called {name}." for (who, what), name in zip(told, names, strict=True)]
    speaker, relation = told[0]
    return Sketch(
        introduction=f"A conversation of {speakers[0]} and {speakers[1]}.",
        facts=tuple(map(Fact, places, lines)),
        question=f"{speakers[1]}: Remind me, {speaker}, what is your {relation} called?\n"
        f"{speaker}: My {relation} is called",
        answer=names[0],
        wrong=tuple(draws.shuffled(names[1:4])),
        forbidden=frozenset({*names, *speakers, *relations}),
        separator="\n",
        decorate=lambda number, text: f"{speakers[number % 2]}: {text}",
    )


KIND = Kind(
    "dialogue",
    "a name told in one turn of a dialogue, asked for many turns later",
    sketch,
    form="word",
    facts=FactRange("names", default=4, least=4, most=2 * len(RELATIONS), step=2),
)
