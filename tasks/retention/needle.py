"""A needle in a haystack: one sentence about a person, hidden in prose, asked for in its words.

The form is Kamradt's (Needle In A Haystack, 2023); sentences and options here are our own.
"""

from __future__ import annotations

from kvacc.tasks.retention.draws import Draws
from kvacc.tasks.retention.sketch import Fact, Kind, Sketch, others
from kvacc.tasks.retention.words import CITIES, FRUITS, JOBS, PEOPLE, ROOMS

# (what is told up to the answer, the question, where answers come from)
NEEDLES = (
    ("{name} keeps the silver key in the", "Where does {name} keep the silver key?", ROOMS),
    ("{name} will spend the holidays in", "Where will {name} spend the holidays?", CITIES),
    ("The favorite fruit of {name} is the", "What is the favorite fruit of {name}?", FRUITS),
    ("{name} works as a skilled", "What does {name} work as?", JOBS),
)


def sketch(facts: int, depth: float, draws: Draws) -> Sketch:
    """The wrong options are words of the same sort that do not occur in the text."""
    told, asked, words = draws.choice(NEEDLES)
    name, answer = draws.choice(PEOPLE), draws.choice(words)
    told = told.format(name=name)
    return Sketch(
        introduction="Read the text and remember what it says about people.",
        facts=(Fact(depth, f"{told} {answer}."),),
        question=f"Question: {asked.format(name=name)}\nAnswer: {told}",
        answer=answer,
        wrong=others(draws, words, answer),
        forbidden=frozenset({name}),
    )


KIND = Kind("needle", "one sentence about a person hidden in prose, asked for", sketch, form="word")
