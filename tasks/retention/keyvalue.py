"""Key-value lookup among near-duplicate keys.

Every key is a color and an animal, all pairs of a grid are present, so each key
shares one half with many others; and all options are values of the same haystack.
Remembering *that* a number occurred is worth nothing: only which key it belongs to.
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
INTRODUCTION = "Each animal below has a number. Remember all of them."


def documents(
    colors: int = 6,
    animals: int = 6,
    depths: tuple[float, ...] = DEPTHS,
    items: int = 20,
    seed: int = SEED,
) -> list[dict[str, Any]]:
    """Documents with ``colors`` x ``animals`` records, one of which is asked for.

    Args:
        colors, animals: size of the grid of keys, 2 to 16 each; the default 6 x 6
            makes prompts of about 512 tokens.
        depths: where the asked record lies, as shares of the records before it.
        items: documents per depth; neighbours have different depths.
        seed: same seed, same bytes.

    Raises:
        KvaccError: a grid that has no near-duplicates, or more than there are words.
    """
    for name, value, words in (("colors", colors, COLORS), ("animals", animals, ANIMALS)):
        if not 2 <= value <= len(words):
            raise KvaccError(f"{name}={value} is out of range; give 2 to {len(words)}")
    labels = Draws("keyvalue labels", seed).shuffled([i % 4 for i in range(items * len(depths))])
    return [
        _document(
            colors, animals, depth, labels[item * len(depths) + place], Draws("keyvalue", seed, depth, item)
        )
        for item in range(items)
        for place, depth in enumerate(depths)
    ]


def _document(colors: int, animals: int, depth: float, label: int, draws: Draws) -> dict[str, Any]:
    chosen_colors = draws.sample(COLORS, colors)
    chosen_animals = draws.sample(ANIMALS, animals)
    keys = draws.shuffled([(color, animal) for color in chosen_colors for animal in chosen_animals])
    values = dict(zip(keys, draws.numbers(len(keys), digits=4), strict=True))
    asked = keys[min(len(keys) - 1, round(depth * (len(keys) - 1)))]
    # Exactly one half of these keys is the asked one's.
    similar = [key for key in keys if (key[0] == asked[0]) != (key[1] == asked[1])]
    others = [key for key in keys if key != asked and key not in similar]
    wrong = [values[key] for key in [*draws.shuffled(similar), *draws.shuffled(others)][:3]]
    options = [*wrong[:label], values[asked], *wrong[label:]]
    records = "\n".join(f"The number of the {' '.join(key)} is {values[key]}." for key in keys)
    name = " ".join(asked)
    return {
        "context": f"{INTRODUCTION}\n{records}",
        "question": f"Question: What is the number of the {name}?\nAnswer: The number of the {name} is",
        "options": options,
        "label": label,
        "answer": values[asked],
        "depth": depth,
    }


def dataset(**_: Any) -> dict[str, Any]:
    """lm-eval's ``custom_dataset``: the split ``test`` with the default parameters.

    lm-eval passes the task's metadata and, on its command line, the model's
    arguments as keywords; the documents depend on none of them.
    """
    from datasets import Dataset

    return {"test": Dataset.from_list(documents())}
