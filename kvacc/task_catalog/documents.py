"""What is told from documents: chance, a fingerprint, what shares a text, where a context ends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvacc.task_catalog.loading import quiet_lm_eval

if TYPE_CHECKING:
    from lm_eval.api.task import Task


def chance_level(task: Task) -> float | None:
    """Expected accuracy of a blind guess: the mean of 1 / options over the documents.

    None for a task that is not multiple choice.
    """
    if task.OUTPUT_TYPE != "multiple_choice":
        return None
    with quiet_lm_eval():
        documents = list(task.eval_docs)
    return sum(1 / len(task.doc_to_choice(document)) for document in documents) / len(documents)


def data_fingerprint(task: Task, limit: int | None = None) -> str:
    """SHA-256 over the evaluated documents in their order, the first ``limit`` if given."""
    digest = hashlib.sha256()
    with quiet_lm_eval():
        documents = task.eval_docs
    count = len(documents) if limit is None else min(limit, len(documents))
    for index in range(count):
        text = json.dumps(documents[index], sort_keys=True, ensure_ascii=False, default=str)
        digest.update(text.encode() + b"\n")
    return digest.hexdigest()


def cluster_key(task_name: str, doc: dict[str, Any], doc_id: int) -> str:
    """Documents whose scores are not independent share this key.

    They share a haystack or passage, a source video (HellaSwag), or are the two
    halves of a WinoGrande twin: same options and same opening words.
    """
    shared: str | None = None
    if isinstance(doc.get("context") or doc.get("passage"), str):
        shared = doc.get("context") or doc["passage"]
    elif doc.get("source_id"):
        shared = str(doc["source_id"])
    elif {"sentence", "option1", "option2"} <= doc.keys():
        options = sorted((doc["option1"].lower(), doc["option2"].lower()))
        shared = " ".join([*options, *doc["sentence"].lower().split()[:4]])
    if shared is None:
        return f"{task_name}/{doc_id}"
    return f"{task_name}/{hashlib.sha256(shared.encode()).hexdigest()[:16]}"


def context_boundary(doc: dict[str, Any], context: str, num_fewshot: int | None) -> int | None:
    """Where the context segment ends in a prompt, for the protocol ``context``.

    Args:
        doc: the document.
        context: the prompt as lm-eval built it, few-shot examples and chat template included.
        num_fewshot: examples in the prompt.

    Returns:
        The index of the first character after the context segment, so that
        ``context[:boundary]`` is compressed and ``context[boundary:]`` is not. In this order:
        the end of the document's own haystack or passage; the start of the question, where
        examples stand before it; else None.
    """
    for field in ("context", "passage"):
        text = doc.get(field)
        if isinstance(text, str) and text.strip():
            # The last occurrence: an example may have been drawn on the same passage.
            start = context.rfind(text)
            if start >= 0 and context[start + len(text) :].strip():
                return start + len(text)
    if not num_fewshot:
        return None
    start = _question_start(doc, context, num_fewshot)
    return start if start else None


def _question_start(doc: dict[str, Any], context: str, num_fewshot: int) -> int | None:
    """Where the last question starts behind ``num_fewshot`` examples, or None."""
    found = [(context.rfind(text), text) for text in _question_texts(doc)]
    # WinoGrande's prompt holds one of two options, and its twin, with the other one, may be
    # an example: the question is what ends last. If one option ends the other ("race car"
    # and "car"), it is the longer.
    found = [(start + len(text), len(text), start) for start, text in found if start >= 0]
    if found:
        return max(found)[-1]
    # An unknown format: examples end with a blank line. More blank lines than examples are
    # a description (before the examples) or part of a question: only the place of one of
    # the document's own texts tells which.
    blank_lines = context.count("\n\n")
    if blank_lines < num_fewshot:
        return None
    end = len(context)
    if blank_lines > num_fewshot:
        texts = [v for v in doc.values() if isinstance(v, str) and len(v) >= 20 and v in context]
        if not texts:
            return None
        end = context.rfind(max(texts, key=len))
    place = context.rfind("\n\n", 0, end)
    return place + 2 if place >= 0 else None


def _question_texts(doc: dict[str, Any]) -> Iterator[str]:
    """The question as the six formats write it; what stands in the prompt after the examples."""
    if "goal" in doc:
        yield f"Question: {doc['goal']}\nAnswer:"
    if "query" in doc:
        yield doc["query"]
    if "premise" in doc and doc.get("question") in ("cause", "effect"):
        connector = {"cause": "because", "effect": "therefore"}[doc["question"]]
        yield f"{doc['premise'].strip()[:-1]} {connector}"
    if "question_stem" in doc:
        yield doc["question_stem"]
    if {"sentence", "option1", "option2"} <= doc.keys() and "_" in doc["sentence"]:
        opening = doc["sentence"][: doc["sentence"].index("_")]
        yield opening + doc["option1"]
        yield opening + doc["option2"]
