"""Products of two matrices on processors."""

from __future__ import annotations

import pytest
import torch

from kvacc import products
from kvacc.products import one_by_one, times_transposed


@pytest.mark.parametrize("layout", ["rows", "columns", "strided"])
def test_products_in_every_layout(layout, monkeypatch):
    monkeypatch.setattr(products, "LEAST_WORK", 0)
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(7, 12, generator=draw)
    b = torch.randn(5, 12, generator=draw)
    if layout == "columns":
        b = b.T.contiguous().T
    if layout == "strided":
        wide = torch.zeros(5, 3, 12)
        wide[:, 1] = b
        b = wide[:, 1]
    expected = (a.double() @ b.double().T).float()
    assert torch.allclose(times_transposed(a, b), expected, atol=1e-5)
    assert torch.allclose(times_transposed(a.T.contiguous().T, b), expected, atol=1e-5)


def test_other_types_and_devices_take_the_usual_way():
    half = torch.randn(4, 6).bfloat16()
    assert not one_by_one(half) and not one_by_one(torch.zeros(1, device="meta"))
    assert times_transposed(half, half).dtype == torch.bfloat16


def test_a_large_product():
    draw = torch.Generator().manual_seed(3)
    a, b = torch.randn(400, 64, generator=draw), torch.randn(300, 64, generator=draw)
    assert len(a) * b.numel() >= products.LEAST_WORK
    assert torch.allclose(times_transposed(a, b), a @ b.T, atol=1e-4)
