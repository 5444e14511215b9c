"""Counting tokens as the model will: what makes a length of 1,024 mean 1,024."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

from kvacc.errors import KvaccError

TOKENS_PER_WORD = 1.3
"""Where no tokenizer is known, a text counts as so many tokens per blank-separated word: about
what English prose has in tokenizers of 32,000 to 150,000 entries."""

_in_use: contextvars.ContextVar[Measure | None] = contextvars.ContextVar("kvacc_measure", default=None)


class Measure:
    """Counts tokens.

    Args:
        whole: tokens of a prompt, special tokens that are put before it included.
        part: tokens of a piece inside a prompt; by default as ``whole``.
    """

    def __init__(self, whole: Callable[[str], int], part: Callable[[str], int] | None = None) -> None:
        self.whole = whole
        self._count_part = part or whole
        self._known: dict[str, int] = {}

    def part(self, text: str) -> int:
        """Tokens of a piece inside a prompt, remembered: fillers come back in many documents."""
        count = self._known.get(text)
        if count is None:
            count = self._known[text] = self._count_part(text)
        return count

    @classmethod
    def of(cls, tokenizer: Any) -> Measure:
        """With a tokenizer of transformers, as lm-eval's ``hf`` backend and kvacc's encode prompts.

        Anything else with ``encode(text)`` will do.
        """
        from transformers import PreTrainedTokenizerBase

        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            return cls(lambda text: len(tokenizer.encode(text)))
        # Not verbose: a haystack may be longer than what the tokenizer's files believe in.
        return cls(
            lambda text: len(tokenizer.encode(text, verbose=False)),
            lambda text: len(tokenizer.encode(text, verbose=False, add_special_tokens=False)),
        )


WORD_RULE = Measure(lambda text: round(TOKENS_PER_WORD * len(text.split())))


@contextlib.contextmanager
def tokenizer_in_use(tokenizer: Any) -> Iterator[None]:
    """Within it, retention tasks are made for ``tokenizer``; None leaves it to what the task is told."""
    if tokenizer is None:
        yield
        return
    token = _in_use.set(tokenizer if isinstance(tokenizer, Measure) else Measure.of(tokenizer))
    try:
        yield
    finally:
        _in_use.reset(token)


def measure_for(told: dict[str, Any]) -> Measure:
    """The measure of :func:`tokenizer_in_use`, else of the model that lm-eval names in a task's
    metadata (``tokenizer`` or ``pretrained``), else :data:`WORD_RULE`.

    Raises:
        KvaccError: a tokenizer is named, but cannot be loaded: any other would give wrong lengths.
    """
    measure = _in_use.get()
    if measure is not None:
        return measure
    named = told.get("tokenizer") or told.get("pretrained")
    if named is None:
        return WORD_RULE
    if not isinstance(named, str):
        return Measure.of(named) if hasattr(named, "encode") else WORD_RULE
    source = tuple(
        (name, told[name]) for name in ("revision", "trust_remote_code", "gguf_file") if told.get(name)
    )
    return _named_measure(named, source)


_named: dict[tuple, Measure] = {}


def _named_measure(name: str, source: tuple[tuple[str, Any], ...]) -> Measure:
    if (name, source) not in _named:
        from kvacc.models import load_tokenizer

        try:
            _named[name, source] = Measure.of(load_tokenizer(name, **dict(source)))
        except KvaccError as error:
            raise KvaccError(
                f"{error} (its tokenizer is needed to make retention tasks of the length asked for)"
            ) from None
    return _named[name, source]
