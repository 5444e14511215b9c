"""Key-value lookup among near-duplicate keys.

Keys come in blocks of four, two colors x two animals, so each key shares its color with
one neighbour of the block and its animal with another; and the four options are the values
of one block. Remembering *that* a number occurred is worth nothing, and neither is knowing
only the color or only the animal: what counts is which key a value belongs to.
"""

from __future__ import annotations

from kvacc.tasks.retention.draws import Draws
from kvacc.tasks.retention.sketch import Fact, FactRange, Kind, Sketch

COLORS = (
    "red", "blue", "green", "black", "white", "brown", "pink", "gray",
    "gold", "silver", "purple", "orange", "yellow", "violet", "copper", "ivory",
)  # fmt: skip
ANIMALS = (
    "fox", "owl", "bear", "horse", "rabbit", "whale", "tiger", "goose",
    "camel", "eagle", "otter", "snake", "spider", "donkey", "turtle", "lion",
)  # fmt: skip
MOST_BLOCKS = (len(COLORS) // 2) * (len(ANIMALS) // 2)


def sketch(facts: int, depth: float, draws: Draws) -> Sketch:
    """``facts`` records, a multiple of four; the asked one has the share ``depth`` of them before it."""
    blocks = _blocks(facts // 4, draws)
    keys = draws.shuffled([key for block in blocks for key in block])
    values = dict(zip(keys, draws.numbers(facts, digits=4), strict=True))
    asked = keys[round(depth * (facts - 1))]
    block = next(block for block in blocks if asked in block)
    wrong = draws.shuffled([values[key] for key in block if key != asked])
    places = [index / (facts - 1) for index in range(facts)]
    return Sketch(
        introduction="Each key below has a value. Remember all of them.",
        facts=tuple(Fact(place, f"{key} = {values[key]}") for place, key in zip(places, keys, strict=True)),
        # Completing the record suits small models better than a question in words: SmolLM2-135M
        # was right on 10 of the first 12 documents this way, on 8 of the first 15 when asked.
        question=f"\nOne of these keys and its value again:\n{asked} =",
        answer=values[asked],
        wrong=tuple(wrong),
        forbidden=frozenset({*keys, *values.values()}),
        separator="\n",
    )


def _blocks(count: int, draws: Draws) -> list[list[str]]:
    """``count`` blocks of four keys: two colors x two animals each."""
    colors, animals = draws.shuffled(COLORS), draws.shuffled(ANIMALS)
    pairs = len(animals) // 2
    blocks = []
    for index in range(count):
        # Diagonals of the grid of pairs: colors and animals repeat as late as possible.
        animal, color = index % pairs, (index + index // pairs) % (len(colors) // 2)
        two_colors = colors[2 * color : 2 * color + 2]
        two_animals = animals[2 * animal : 2 * animal + 2]
        blocks.append([f"{one}-{other}" for one in two_colors for other in two_animals])
    return blocks


KIND = Kind(
    "keyvalue",
    "one of many values looked up among near-duplicate keys",
    sketch,
    form="number",
    facts=FactRange("records", default=32, least=4, most=4 * MOST_BLOCKS, step=4),
)
