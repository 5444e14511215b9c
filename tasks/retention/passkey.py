"""Passkey retrieval: a number hidden at a known depth of filler text.

The task is Mohtashami and Jaggi's (Landmark Attention, 2023, section 4.2); sentences,
numbers and options here are our own.
"""

from __future__ import annotations

from typing import Any

from kvacc.tasks.retention.draws import Draws
from kvacc.tasks.retention.filler import filler

SEED = 1
DEPTHS = (0.1, 0.5, 0.9)
INTRODUCTION = "A passkey is hidden in the text below. Remember it."
QUESTION = "Question: What is the passkey?\nAnswer: The passkey is"


def documents(
    words: int = 410, depths: tuple[float, ...] = DEPTHS, items: int = 20, seed: int = SEED
) -> list[dict[str, Any]]:
    """Documents with one passkey each.

    Args:
        words: words of filler; the default makes prompts of about 540 tokens.
        depths: where the passkey lies, as shares of the filler sentences before it.
        items: documents per depth. Neighbours have different depths, so that a
            limited run still covers all of them.
        seed: same seed, same bytes.
    """
    labels = Draws("passkey labels", seed).shuffled([i % 4 for i in range(items * len(depths))])
    return [
        _document(words, depth, labels[item * len(depths) + place], Draws("passkey", seed, depth, item))
        for item in range(items)
        for place, depth in enumerate(depths)
    ]


def _document(words: int, depth: float, label: int, draws: Draws) -> dict[str, Any]:
    sentences = filler(draws, words)
    options = draws.numbers(4, digits=5)
    answer = options[label]
    before = round(depth * len(sentences))
    fact = f"The passkey is {answer}. Remember it. {answer} is the passkey."
    text = " ".join([*sentences[:before], fact, *sentences[before:]])
    return {
        "context": f"{INTRODUCTION}\n{text}",
        "question": QUESTION,
        "options": options,
        "label": label,
        "answer": answer,
        "depth": depth,
    }


def dataset(**_: Any) -> dict[str, Any]:
    """lm-eval's ``custom_dataset``: the split ``test`` with the default parameters.

    lm-eval passes the task's metadata and, on its command line, the model's
    arguments as keywords; the documents depend on none of them.
    """
    from datasets import Dataset

    return {"test": Dataset.from_list(documents())}
