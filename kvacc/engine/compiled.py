"""The scans of :mod:`kvacc.engine.scan` for the common rules, compiled.

``attention_sum``: a score adds up the attention that an entry receives (H2O).
``static``: scores never change after arrival (windows, sinks, random).
Each follows the reference decision for decision; the tests compare them. numba is
optional (``pip install 'kvacc[fast]'``) and serves CPU tensors; Triton, which comes with
the CUDA builds of PyTorch, serves GPUs (:mod:`kvacc.engine.triton_scan`). Without them
the reference runs.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from kvacc.compiled_choice import numba_is_here
from kvacc.engine import triton_scan
from kvacc.engine.scan import Scan
from kvacc.strategy import EvictStrategy


def supports(scan: Scan) -> bool:
    """Is there a compiled scan for this strategy's rule, here?"""
    if scan.strategy.compiled is None or not _speaks_for(type(scan.strategy)):
        return False
    on_cpu = scan.current.alive.device.type == "cpu"
    return (on_cpu and numba_is_here()) or triton_scan.supports(scan)


def adds_up_attention(strategy: EvictStrategy) -> bool:
    """The strategy's scores grow by the attention that entries receive, and by nothing else."""
    return strategy.compiled == "attention_sum" and _speaks_for(type(strategy))


def needs_positions_only(strategy: EvictStrategy) -> bool:
    """The strategy's rule is one of the common ones, and no entry's rank in the cache matters to it."""
    return (
        strategy.compiled is not None
        and _speaks_for(type(strategy))
        and not strategy.rotates_to_cache_positions
    )


@functools.cache
def _speaks_for(cls: type) -> bool:
    """A class that inherits ``compiled`` but brings a rule of its own is not compiled."""

    def depth(name: str) -> int:
        return next(i for i, base in enumerate(cls.__mro__) if name in vars(base))

    return depth("compiled") <= min(depth("observe"), depth("keep"))


def attention_sum(
    scan: Scan, logits: torch.Tensor, first: int, aux: torch.Tensor | None, record: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Turn ``logits`` [B, H, G, R, W'] (float32, contiguous) into attention over each
    query's kept set, in place, 0 elsewhere.

    Returns:
        int32 [B, H, R], how many entries are visible; bool [B, H, R, W'], which, with
        ``record`` (attention alone does not tell: a far entry's can underflow to 0).
    """
    if triton_scan.supports(scan):
        return triton_scan.attention_sum(scan, logits, first, aux, record)
    from kvacc.engine import kernels

    heads, group = logits.shape[1:3]
    has_aux = aux is not None
    aux_array = (aux if has_aux else torch.zeros(heads, group)).float().contiguous().numpy()
    seen_by = np.zeros((logits.shape[0], heads, logits.shape[3]), dtype=np.int32)
    visible = np.zeros(logits.shape[:2] + logits.shape[3:] if record else (0, 0, 0, 0), dtype=np.bool_)
    kernels.attention_sum_kernel(
        logits.numpy(), first, scan.offset, *_plan_arrays(scan), scan.strategy.aggregate == "max",
        aux_array, has_aux, *_state_arrays(scan), seen_by, record, visible,
    )  # fmt: skip
    return torch.from_numpy(seen_by), torch.from_numpy(visible) if record else None


def static(scan: Scan, first: int, count: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Visible entries of ``count`` queries: bool [B, H, count, columns], int32 [B, H, count]."""
    if triton_scan.supports(scan):
        return triton_scan.static(scan, first, count, columns)
    from kvacc.engine import kernels

    rows, heads, _ = scan.current.alive.shape
    visible = np.zeros((rows, heads, count, columns), dtype=np.bool_)
    seen_by = np.zeros((rows, heads, count), dtype=np.int32)
    kernels.static_kernel(visible, first, scan.offset, *_plan_arrays(scan), *_state_arrays(scan), seen_by)
    return torch.from_numpy(visible), torch.from_numpy(seen_by)


def _plan_arrays(scan: Scan) -> tuple[np.ndarray, ...]:
    plan = scan.plan
    names = ("segment", "start", "stop", "parent", "dense", "compress", "budget", "recent", "sinks")
    return tuple(getattr(plan, name).numpy() for name in names)


def _state_arrays(scan: Scan) -> tuple[np.ndarray, ...]:
    if scan.ends is None:
        rows, heads, width = scan.current.alive.shape
        shape = (rows, scan.plan.start.shape[1], heads, width)
        scan.ends = (np.zeros(shape, dtype=np.bool_), np.zeros(shape, dtype=np.float32))
        scan.current.position = scan.current.position.contiguous()
    current, initial = scan.current, scan.initial
    tensors = (current.position, current.alive, current.score, initial.alive, initial.score, scan.arrival)
    return (*(t.numpy() for t in tensors), *scan.ends)
