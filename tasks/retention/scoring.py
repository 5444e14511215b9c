"""Scores of the retention tasks, whole and per depth.

Each document has an exact score, which is 0 or 1, and a graded one between them, which still
tells strategies apart where every exact score is 0. lm-eval averages each metric over the
documents that report it, so a document reports the metrics of its own depth only.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

Results = Sequence[str]


def multiple_choice(doc: dict[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, float]:
    """``acc``: is the right option the most likely one? ``graded``: its probability among the options.

    Args:
        doc: a document with ``label`` and ``depth``.
        results: (log-likelihood in nats, greedy) of each option. Of equal log-likelihoods
            the first counts, as in lm-eval.
    """
    loglikelihoods = [loglikelihood for loglikelihood, _ in results]
    best = max(loglikelihoods)
    right = float(loglikelihoods.index(best) == doc["label"])
    return _with_depth(doc, acc=right, graded=_share_of_probability(loglikelihoods, doc["label"]))


def _share_of_probability(loglikelihoods: Sequence[float], label: int) -> float:
    best = max(loglikelihoods)
    if best == -math.inf:
        # No option is possible: none is preferred.
        return 1 / len(loglikelihoods)
    weights = [math.exp(value - best) for value in loglikelihoods]
    return weights[label] / math.fsum(weights)


def generated_number(doc: dict[str, Any], results: Results) -> dict[str, float]:
    """Of the first number of the text: is it right, and which share of its digits, place by place?"""
    answer, found = doc["answer"], first_number(results[0])
    return _with_depth(doc, exact_match=float(found == answer), graded=_same_places(answer, found))


def generated_numbers(doc: dict[str, Any], results: Results) -> dict[str, float]:
    """Of the first numbers of the text: are they the right ones in order, and which share of them occurs?"""
    answers = doc["answers"]
    found = numbers_of(results[0])[: len(answers)]
    share = sum(answer in found for answer in answers) / len(answers)
    return _with_depth(doc, exact_match=float(found == answers), graded=share)


def generated_word(doc: dict[str, Any], results: Results) -> dict[str, float]:
    """Is the first word right? Else graded by the share of its letters that it begins with."""
    answer = normalised(doc["answer"])
    found = (words_of(results[0]) or [""])[0]
    same = next(
        (n for n, (a, b) in enumerate(zip(answer, found, strict=False)) if a != b),
        min(len(answer), len(found)),
    )
    return _with_depth(doc, exact_match=float(found == answer), graded=same / max(len(answer), len(found)))


def generated_sequence(doc: dict[str, Any], results: Results) -> dict[str, float]:
    """Are the right words in the text in their order, and which share of them comes in this order?

    What stands between them does not matter, but only so many words count as the right answer has.
    """
    answers = [normalised(answer) for answer in doc["answers"]]
    found = words_of(results[0])[: len(words_of(doc["answer"]))]
    share = _common_words(answers, found) / len(answers)
    return _with_depth(doc, exact_match=float(share == 1), graded=share)


def generated_text(doc: dict[str, Any], results: Results) -> dict[str, float]:
    """Does the text begin with the passage, and which share of its words come in the same order?

    The share is the longest common subsequence of words over the passage's words.
    """
    answers = words_of(doc["answer"])
    found = words_of(results[0])
    exact = float(found[: len(answers)] == answers)
    # More than the passage could only repeat it: what comes after a few words more is another text.
    window = found[: len(answers) + len(answers) // 4]
    return _with_depth(doc, exact_match=exact, graded=_common_words(answers, window) / len(answers))


GENERATED: dict[str, Callable[[dict[str, Any], Results], dict[str, float]]] = {
    "number": generated_number,
    "numbers": generated_numbers,
    "word": generated_word,
    "sequence": generated_sequence,
    "text": generated_text,
}
"""How a generated answer of each form is scored."""


def metric_names(exact: str, depths: Sequence[float]) -> list[str]:
    """The metrics of a task: ``acc``, ``graded``, ``acc_depth_10``, ``graded_depth_10``, ..."""
    return [exact, "graded", *(at_depth(name, depth) for depth in depths for name in (exact, "graded"))]


def at_depth(metric: str, depth: float) -> str:
    """``acc_depth_10`` for depth 0.1."""
    return f"{metric}_depth_{round(100 * depth)}"


def first_number(text: str) -> str:
    """The digits of the first number in ``text``; ``48,213`` counts as ``48213``. Empty if none."""
    return next(iter(numbers_of(text)), "")


def numbers_of(text: str) -> list[str]:
    """The digits of every number in ``text``, without thousands commas."""
    return [number.replace(",", "") for number in re.findall(r"\d+(?:,\d{3}(?!\d))*", text)]


def normalised(text: str) -> str:
    """Without case, punctuation and thousands commas, blanks evened out."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = "".join(" " if character in string.punctuation else character for character in text.casefold())
    return " ".join(text.split())


def words_of(text: str) -> list[str]:
    """The words of the normalised text."""
    return normalised(text).split()


def _same_places(answer: str, found: str) -> float:
    same = sum(a == b for a, b in zip(answer, found, strict=False))
    return same / max(len(answer), len(found))


def _common_words(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for word in one:
        before = 0
        for place, candidate in enumerate(other, start=1):
            above = row[place]
            row[place] = before + 1 if word == candidate else max(above, row[place - 1])
            before = above
    return row[-1]


def _with_depth(doc: dict[str, Any], **scores: float) -> dict[str, float]:
    if doc.get("depth") is None:
        return scores
    return scores | {at_depth(name, doc["depth"]): value for name, value in scores.items()}
