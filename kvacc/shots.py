"""Few-shot examples of a prompt: how many, and how they are chosen.

lm-eval draws other examples for every document (``default``), or gives all documents the
first ones of the split (``first_n``). Scores of the two are not comparable: the prompts
differ. With ``first_n`` all prompts of a task begin alike, so their examples are read once.
"""

from __future__ import annotations

DEFAULT_SAMPLER = "default"
FEWSHOT_SAMPLERS = (DEFAULT_SAMPLER, "first_n")
"""lm-eval's names."""


def shots_text(shots: int | None, sampler: str = DEFAULT_SAMPLER) -> str:
    """``5-shot``, ``5-shot first_n``; None is a task's own number, which is not known here."""
    if shots is None:
        return "task's own shots"
    return f"{shots}-shot" if sampler == DEFAULT_SAMPLER else f"{shots}-shot {sampler}"
