"""Products of two matrices on processors.

For float32, oneDNN's kernel is faster than the one that PyTorch's ``@`` takes, and a product
of two matrices faster than a batch of them; both sum in another order, nothing more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LEAST_WORK = 2**22
"""Multiplications below which the choice does not matter."""


def one_by_one(x: torch.Tensor) -> bool:
    """Are products with ``x`` better computed one pair of matrices after the other?"""
    import torch

    return x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def times_transposed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b.T`` of a [n, k] and b [m, k]: [n, m]."""
    import torch

    if one_by_one(a) and len(a) * b.numel() >= LEAST_WORK:
        # In any but these two layouts the kernel takes a slow way.
        b = b if b.T.is_contiguous() else b.contiguous()
        return torch.ops.mkldnn._linear_pointwise(a.contiguous(), b, None, "none", [], "")
    return a @ b.T
