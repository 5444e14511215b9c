"""The model and its tokenizer, loaded or given."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from kvacc.errors import KvaccError
from kvacc.models import load_model, load_tokenizer


def model_and_tokenizer(
    pretrained: str | torch.nn.Module,
    tokenizer: Any,
    *,
    dtype: str | None,
    device: str | None,
    device_map: Any,
    **source: Any,
) -> tuple[torch.nn.Module, Any]:
    """A loaded model as it is, with the tokenizer it then needs; else both by name.

    Args:
        source: revision, trust_remote_code and gguf_file, of the model as of the tokenizer.
    """
    if isinstance(pretrained, str):
        model = load_model(pretrained, dtype=dtype, device=device, device_map=device_map, **source)
        return model, tokenizer or load_tokenizer(pretrained, **source)
    if tokenizer is None:
        raise KvaccError("a loaded model needs its tokenizer: give tokenizer=")
    return pretrained, tokenizer


@contextmanager
def no_warning_of_a_loaded_model() -> Iterator[None]:
    """lm-eval warns that loading options are ignored for a loaded model: they were used before."""
    logger = logging.getLogger(HFLM.__module__)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
