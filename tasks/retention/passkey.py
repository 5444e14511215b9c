"""Passkey retrieval: a number hidden at a known depth of filler text.

The task is Mohtashami and Jaggi's (Landmark Attention, 2023, section 4.2); sentences,
numbers and options here are our own.
"""

from __future__ import annotations

from kvacc.tasks.retention.draws import Draws
from kvacc.tasks.retention.sketch import Fact, Kind, Sketch


def sketch(facts: int, depth: float, draws: Draws) -> Sketch:
    """One number of five digits, told twice in a row. Wrong options do not occur in the text."""
    answer, *wrong = draws.numbers(4, digits=5)
    told = f"The passkey is {answer}. Remember it. {answer} is the passkey."
    return Sketch(
        introduction="A passkey is hidden in the text below. Remember it.",
        facts=(Fact(depth, told),),
        question="Question: What is the passkey?\nAnswer: The passkey is",
        answer=answer,
        wrong=tuple(wrong),
        forbidden=frozenset({"passkey"}),
    )


KIND = Kind("passkey", "a number of five digits hidden in prose", sketch, form="number")
