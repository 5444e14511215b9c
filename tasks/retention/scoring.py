"""Scores of the retention tasks, whole and per depth.

lm-eval averages each metric over the documents that report it, so a document
reports the metric of its own depth only.
"""

from __future__ import annotations

import re
from typing import Any


def multiple_choice(doc: dict[str, Any], results: list[tuple[float, bool]]) -> dict[str, float]:
    """``acc``: is the right option the most likely one? ``results``: (log-likelihood, greedy) per option.

    Of equal log-likelihoods the first counts, as in lm-eval.
    """
    loglikelihoods = [loglikelihood for loglikelihood, _ in results]
    predicted = loglikelihoods.index(max(loglikelihoods))
    return _with_depth("acc", doc, float(predicted == doc["label"]))


def generated(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """``exact_match``: is the first number of the generated text the right one?"""
    return _with_depth("exact_match", doc, float(first_number(results[0]) == doc["answer"]))


def first_number(text: str) -> str:
    """The digits of the first number in ``text``; ``48,213`` counts as ``48213``. Empty if none."""
    match = re.search(r"\d+(?:,\d{3})*", text)
    return match.group().replace(",", "") if match else ""


def _with_depth(metric: str, doc: dict[str, Any], value: float) -> dict[str, float]:
    return {metric: value, f"{metric}_depth_{round(100 * doc['depth'])}": value}
