"""The scans of :mod:`kvacc.engine.compiled` for GPUs, as one Triton kernel.

Triton comes with the CUDA builds of PyTorch; without it, without a GPU, or where it cannot
compile (it needs a C compiler), the reference scan runs and decides the same.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from dataclasses import dataclass

import torch

from kvacc.engine.scan import Scan

logger = logging.getLogger(__name__)

MOST_COLUMNS = 32768
"""Entries of a row (stored ones and tokens) that a program serves; longer rows are left to the
reference scan. Up to 4,096 columns the state fits in registers; at the limit, ptxas says, about
2 KB a thread lie in local memory, and beyond it more than is worth it."""

THREADS = 1024
"""Of a program at most, on every GPU; below that a thread holds 8 columns."""


@dataclass
class SegmentEnds:
    """What a scan keeps beside its state: uint8 and float32 [B, S, H, W], the kept set and the
    scores at the end of each segment; and ``position`` int32 [B, H, W]."""

    alive: torch.Tensor
    score: torch.Tensor
    position: torch.Tensor


def supports(scan: Scan) -> bool:
    """Does the kernel serve this scan's device and width?"""
    alive = scan.current.alive
    return alive.device.type == "cuda" and alive.shape[-1] <= MOST_COLUMNS and runs_on(alive.device)


@functools.cache
def runs_on(device: torch.device) -> bool:
    """Can Triton compile and launch a kernel there? Tried once; a failure is logged, because the
    reference scan that then runs is much slower."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    try:
        _try_out(device)
    except Exception as error:  # of a compiler, a driver, a GPU that is too old: all mean no
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        logger.warning("Triton does not run on %s, so scoring there is slow: %s", device, reason)
        return False
    return True


def _try_out(device: torch.device) -> None:
    """Replay one token of a strategy of which nothing is known but that it never acts."""
    from kvacc.engine.plan import Request, build_rows, make_plan
    from kvacc.engine.scan import Entries, start_scan
    from kvacc.strategy import make_strategy

    strategy = make_strategy("recent", 1)
    plan = make_plan(build_rows([(0, Request((0,), (0,), 0, 1))]), strategy).to(device)
    empty = torch.zeros(1, 1, 0, device=device)
    scan = start_scan(plan, strategy, Entries(empty.long(), empty.bool(), empty), 0)
    visible, seen_by = static(scan, 0, 1, 1)
    if not (bool(visible.all()) and seen_by.tolist() == [[[1]]]):
        raise RuntimeError("a kernel gave a wrong result")


def attention_sum(
    scan: Scan, logits: torch.Tensor, first: int, aux: torch.Tensor | None, record: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As :func:`kvacc.engine.compiled.attention_sum`."""
    rows, heads, _, count, columns = logits.shape
    shape = (rows, heads, count, columns) if record else (0,)
    visible = torch.zeros(shape, dtype=torch.bool, device=logits.device)
    seen_by = _replay(scan, first, count, columns, visible if record else None, logits, aux)
    return seen_by, visible if record else None


def static(scan: Scan, first: int, count: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`kvacc.engine.compiled.static`."""
    rows, heads, _ = scan.current.alive.shape
    visible = torch.zeros(rows, heads, count, columns, dtype=torch.bool, device=scan.current.alive.device)
    return visible, _replay(scan, first, count, columns, visible, None, None)


def _replay(
    scan: Scan,
    first: int,
    count: int,
    columns: int,
    visible: torch.Tensor | None,
    logits: torch.Tensor | None,
    aux: torch.Tensor | None,
) -> torch.Tensor:
    """Launch the kernel for a block of queries; int32 [B, H, count], how many entries are visible."""
    from kvacc.engine import triton_kernels

    rows, heads, width = scan.current.alive.shape
    device = scan.current.alive.device
    if logits is not None and not logits.is_contiguous():
        raise ValueError("the logits are rewritten in place, so they must be contiguous")
    seen_by = torch.zeros(rows, heads, count, dtype=torch.int32, device=device)
    block = 1 << max(columns - 1, 127).bit_length()
    lanes = 64 if torch.version.hip else 32
    # Where the kernel follows no pointer, something of the right type still has to be there.
    no_floats, no_flags = scan.arrival, scan.current.alive
    # Triton launches on the current device, and the layers of a large model lie on several.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        triton_kernels.replay_kernel[(rows * heads,)](
            no_floats if logits is None else logits,
            no_floats if aux is None else aux.float().contiguous(),
            seen_by,
            _flags(no_flags if visible is None else visible),
            *_plan_tensors(scan),
            *_state_tensors(scan),
            first, count, columns, scan.offset, width, scan.plan.tokens.shape[1],
            scan.plan.start.shape[1], heads,
            GROUP=1 if logits is None else logits.shape[2],
            BLOCK=block,
            SCORED=logits is not None,
            USE_MAX=scan.strategy.aggregate == "max",
            HAS_AUX=aux is not None,
            RECORD=visible is not None,
            num_warps=min(THREADS, max(128, block // 8)) // lanes,
        )  # fmt: skip
    return seen_by


def _flags(tensor: torch.Tensor) -> torch.Tensor:
    """A bool tensor's memory as bytes, which is how the kernel reads and writes it."""
    return tensor.view(torch.uint8)


def _plan_tensors(scan: Scan) -> tuple[torch.Tensor, ...]:
    names = ("segment", "start", "stop", "parent", "dense", "compress", "budget", "recent", "sinks")
    tensors = (getattr(scan.plan, name).contiguous() for name in names)
    return tuple(_flags(t) if t.dtype == torch.bool else t for t in tensors)


def _state_tensors(scan: Scan) -> tuple[torch.Tensor, ...]:
    """In the order of the kernel's arguments; ``current`` is written to."""
    current, initial = scan.current, scan.initial
    if scan.ends is None:
        rows, heads, width = current.alive.shape
        shape, device = (rows, scan.plan.start.shape[1], heads, width), current.alive.device
        scan.ends = SegmentEnds(
            torch.zeros(shape, dtype=torch.uint8, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
            current.position.int().contiguous(),
        )
        # Written in place, so they must not be views that repeat memory.
        current.alive, current.score = current.alive.contiguous(), current.score.contiguous()
    return (
        scan.arrival, scan.ends.position, _flags(current.alive), current.score,
        _flags(initial.alive.contiguous()), initial.score.contiguous(), scan.ends.alive, scan.ends.score,
    )  # fmt: skip
