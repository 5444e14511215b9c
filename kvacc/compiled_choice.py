"""``highest``, ``best_of_group`` and ``count_true`` of :mod:`kvacc.select_strategy`, compiled with numba for
CPU tensors.

A full sort of every query's scores costs more than the model; only the value of the
last chosen one is needed, and a selection algorithm finds it in linear time.
"""

from __future__ import annotations

import functools

import numpy as np
import torch


@functools.cache
def _kernels():
    from kvacc import choice_kernels

    return choice_kernels


@functools.cache
def numba_is_here() -> bool:
    """Is numba installed and usable?"""
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


def available(scores: torch.Tensor) -> bool:
    """Can the compiled functions take ``scores``? They serve float32 on the CPU."""
    return scores.device.type == "cpu" and scores.dtype == torch.float32 and numba_is_here()


def highest(scores: torch.Tensor, count: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """As :func:`kvacc.select_strategy.highest`."""
    out = np.zeros(scores.shape, dtype=np.bool_)
    _kernels().highest_kernel(
        scores.contiguous().numpy(),
        count.expand(scores.shape[:-1]).contiguous().numpy(),
        allowed.expand_as(scores).numpy(),
        out,
    )
    return torch.from_numpy(out)


def best_of_group(logits: torch.Tensor, heads: int, candidates: torch.Tensor) -> torch.Tensor:
    """As :func:`kvacc.select_strategy.best_of_group`."""
    rows, _, count, width = logits.shape
    out = np.empty((rows, heads, count, width), dtype=np.float32)
    shape = (rows, candidates.shape[1], count, width)
    _kernels().best_of_group_kernel(
        logits.contiguous().numpy(), candidates.expand(shape).contiguous().numpy(), out
    )
    return torch.from_numpy(out)


def count_true(mask: torch.Tensor) -> torch.Tensor:
    """As :func:`kvacc.select_strategy.count_true`."""
    flat = mask.reshape(mask.shape[:-1].numel(), mask.shape[-1])
    out = np.empty(len(flat), dtype=np.int32)
    _kernels().count_true_kernel(flat.view(torch.uint8).numpy(), out)
    return torch.from_numpy(out).view(mask.shape[:-1])
