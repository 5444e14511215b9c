"""Key-value lookup among near-duplicate keys.

Keys come in blocks of four, two colors x two animals, so each key shares its color with
one neighbour of the block and its animal with another; and the four options are the values
of one block. Remembering *that* a number occurred is worth nothing, and neither is knowing
only the color or only the animal: what counts is which key a value belongs to.
"""

from __future__ import annotations

from typing import Any

from kvacc.tasks.retention.draws import Draws

from kvacc.errors import KvaccError

SEED = 1
DEPTHS = (0.1, 0.5, 0.9)
COLORS = (
    "red", "blue", "green", "black", "white", "brown", "pink", "gray",
    "gold", "silver", "purple", "orange", "yellow", "violet", "copper", "ivory",
)  # fmt: skip
ANIMALS = (
    "fox", "owl", "bear", "horse", "rabbit", "whale", "tiger", "goose",
    "camel", "eagle", "otter", "snake", "spider", "donkey", "turtle", "lion",
)  # fmt: skip
MOST_BLOCKS = (len(COLORS) // 2) * (len(ANIMALS) // 2)
INTRODUCTION = "Each key below has a value. Remember all of them."


def documents(
    blocks: int = 8, depths: tuple[float, ...] = DEPTHS, items: int = 20, seed: int = SEED
) -> list[dict[str, Any]]:
    """Documents with ``4 * blocks`` records, one of which is asked for.

    Args:
        blocks: blocks of four near-duplicate keys, 1 to 64; up to 8, no color or animal
            is in two blocks. The default makes prompts of about 380 tokens.
        depths: where the asked record lies, as shares of the records before it.
        items: documents per depth; neighbours have different depths.
        seed: same seed, same bytes.

    Raises:
        KvaccError: ``blocks`` is out of range.
    """
    if not 1 <= blocks <= MOST_BLOCKS:
        raise KvaccError(f"blocks={blocks} is out of range; give 1 to {MOST_BLOCKS}")
    labels = Draws("keyvalue labels", seed).shuffled([i % 4 for i in range(items * len(depths))])
    return [
        _document(blocks, depth, labels[item * len(depths) + place], Draws("keyvalue", seed, depth, item))
        for item in range(items)
        for place, depth in enumerate(depths)
    ]


def _document(count: int, depth: float, label: int, draws: Draws) -> dict[str, Any]:
    blocks = _blocks(count, draws)
    keys = draws.shuffled([key for block in blocks for key in block])
    values = dict(zip(keys, draws.numbers(len(keys), digits=4), strict=True))
    asked = keys[round(depth * (len(keys) - 1))]
    block = next(block for block in blocks if asked in block)
    wrong = draws.shuffled([values[key] for key in block if key != asked])
    records = "\n".join(f"{key} = {values[key]}" for key in keys)
    return {
        "context": f"{INTRODUCTION}\n{records}",
        # Completing the record suits small models better than a question in words: SmolLM2-135M
        # was right on 10 of the first 12 documents this way, on 8 of the first 15 when asked.
        "question": f"\nOne of these keys and its value again:\n{asked} =",
        "options": [*wrong[:label], values[asked], *wrong[label:]],
        "label": label,
        "answer": values[asked],
        "depth": depth,
    }


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


def dataset(**_: Any) -> dict[str, Any]:
    """lm-eval's ``custom_dataset``: the split ``test`` with the default parameters.

    lm-eval passes the task's metadata and, on its command line, the model's
    arguments as keywords; the documents depend on none of them.
    """
    from datasets import Dataset

    return {"test": Dataset.from_list(documents())}
