"""Verbatim recall: a passage of the text has to be given again, word for word.

A second passage of the same make stands elsewhere. A wrong option is the asked passage with
one phrase of the other one in it, so that every phrase of every option was read.
"""

from __future__ import annotations

from kvacc.tasks.retention.draws import Draws
from kvacc.tasks.retention.filler import ACTIONS, PLACES, SUBJECTS
from kvacc.tasks.retention.sketch import Fact, FactRange, Kind, Sketch
from kvacc.tasks.retention.words import NOUNS

Phrases = list[list[str]]
"""A passage: the phrases of each sentence."""


def sketch(facts: int, depth: float, draws: Draws) -> Sketch:
    """``facts`` sentences; the passage lies at ``depth``, the other one anywhere."""
    columns = [draws.sample(phrases, 2 * facts) for phrases in (SUBJECTS, ACTIONS, PLACES)]
    asked, other = ([[column[row] for column in columns] for row in range(s, 2 * facts, 2)] for s in (0, 1))
    titles = [title.capitalize() for title in draws.sample(NOUNS, 2)]
    places = (depth, draws.below(1000) / 1000)
    wrong = []
    for column in range(len(columns)):
        row = draws.below(facts)
        changed = [list(phrases) for phrases in asked]
        changed[row][column] = other[row][column]
        wrong.append(_written(changed))
    return Sketch(
        introduction="The text below holds two passages with a title. Remember them word for word.",
        facts=tuple(
            Fact(place, f"Passage {title}: {_written(passage)} End of passage {title}.")
            for place, title, passage in zip(places, titles, (asked, other), strict=True)
        ),
        question=f"\nOne of the passages again, word for word.\nPassage {titles[0]}:",
        answer=_written(asked),
        wrong=tuple(draws.shuffled(wrong)),
        # Filler that pairs phrases as a passage does would be a second source of them.
        forbidden=frozenset(
            {
                *titles,
                *(
                    f"{one} {two}"
                    for sentence in (*asked, *other)
                    for one, two in zip(sentence, sentence[1:], strict=False)
                ),
            }
        ),
    )


def _written(passage: Phrases) -> str:
    return " ".join(f"{' '.join(phrases)}." for phrases in passage)


KIND = Kind(
    "recall",
    "a passage in prose, to be given again word for word",
    sketch,
    form="text",
    facts=FactRange("sentences", default=2, least=1, most=16),
)
