"""The documents of a retention task: the same for multiple choice and for generation."""

from __future__ import annotations

import functools
from typing import Any

from kvacc.tasks.retention.draws import Draws
from kvacc.tasks.retention.filler import Filler, filler_of
from kvacc.tasks.retention.fitting import TooShort, fit
from kvacc.tasks.retention.measure import WORD_RULE, Measure
from kvacc.tasks.retention.settings import DEFAULT_DEPTHS, Settings
from kvacc.tasks.retention.sketch import WRONG_OPTIONS, Kind

from kvacc.errors import KvaccError


def documents(
    kind: Kind, settings: Settings | None = None, measure: Measure = WORD_RULE
) -> list[dict[str, Any]]:
    """Every document that ``settings`` ask for.

    Neighbours have different depths, so a limited run still covers all of them, and every
    four documents of a depth have their right option at four different places. A document
    does not depend on how many there are, and states the same facts at every length.

    Args:
        kind: what is told and asked.
        settings: by default 512 tokens, depths 0.1, 0.5 and 0.9, 20 documents per depth.
        measure: counts tokens.

    Returns:
        Dicts with ``context`` (the haystack, which the protocol ``context`` compresses),
        ``question`` (ends where the answer continues), ``options``, ``label`` (index of the
        right one), ``answer``, ``answers`` (its parts), ``depth`` (None where it has no
        meaning), ``length`` (tokens asked for) and ``facts`` (how many there are).

    Raises:
        KvaccError: the length has no room for the facts, or the filler is too short.
    """
    settings = settings or Settings()
    filler = filler_of(settings.filler)
    counts = [None] if kind.facts is None else [settings.facts] if settings.facts else kind.facts.smaller()
    needed = None
    for count in counts:
        try:
            return [
                _document(kind, settings, count, depth, item, filler, measure)
                for item, depth in _places(kind, settings)
            ]
        except TooShort as error:
            needed = error.needed
    facts = "" if counts[-1] is None else f"with {counts[-1]} {kind.facts.what} and "
    fewer = ", or fewer facts" if settings.facts and settings.facts > kind.facts.least else ""
    raise KvaccError(
        f"length={settings.length} is too short for kvacc_{kind.name}: {facts}without filler a "
        f"prompt has {needed} tokens already; give a greater length{fewer}"
    )


@functools.lru_cache(maxsize=2)
def shared_documents(kind: Kind, settings: Settings, measure: Measure, stamp: Any) -> list[dict[str, Any]]:
    """:func:`documents`, made once for a task's two forms. ``stamp`` changes with the filler's files."""
    return documents(kind, settings, measure)


def _places(kind: Kind, settings: Settings) -> list[tuple[int, float | None]]:
    """(item, depth) of every document."""
    if kind.depth != "grid":
        depth = 0.0 if kind.depth == "start" else None
        return [(item, depth) for item in range(len(DEFAULT_DEPTHS) * settings.items)]
    return [(item, depth) for item in range(settings.items) for depth in settings.depths]


def _document(
    kind: Kind,
    settings: Settings,
    count: int | None,
    depth: float | None,
    item: int,
    filler: Filler,
    measure: Measure,
) -> dict[str, Any]:
    where = "anywhere" if depth is None else f"{depth:g}"
    draws = Draws("retention", kind.name, settings.data_seed, where, item)
    sketch = kind.sketch(count or 1, depth, draws)
    forbidden = sketch.forbidden | {sketch.answer, *sketch.wrong, *sketch.answers}
    units = sketch.units or filler.units(draws, forbidden)
    options = 1 + WRONG_OPTIONS
    four = Draws("retention labels", kind.name, settings.data_seed, where, item // options)
    label = four.shuffled(range(options))[item % options]
    return {
        "context": fit(sketch, units, settings.length, measure),
        "question": sketch.question,
        "options": [*sketch.wrong[:label], sketch.answer, *sketch.wrong[label:]],
        "label": label,
        "answer": sketch.answer,
        "answers": list(sketch.answers or (sketch.answer,)),
        "depth": depth,
        "length": settings.length,
        "facts": count or 1,
    }
