"""The memory meter against sizes worked out by hand."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest
import torch

from kvacc.engine.host_memory import on_host
from kvacc.errors import KvaccError
from kvacc.probes.memory import MemoryMeter

FLOAT = 4


@pytest.fixture
def meter():
    with torch.inference_mode(), MemoryMeter("cpu") as meter:
        yield meter


def test_nothing_is_held_at_first(meter):
    assert meter.current_bytes == meter.peak_bytes == 0


def test_tensors_come_and_go(meter):
    a = torch.zeros(1000)
    assert meter.current_bytes == 1000 * FLOAT
    b = a + 1
    assert meter.current_bytes == 2000 * FLOAT
    del a
    assert meter.current_bytes == 1000 * FLOAT and meter.peak_bytes == 2000 * FLOAT
    del b
    assert meter.current_bytes == 0 and meter.peak_bytes == 2000 * FLOAT


def test_views_count_once_and_hold_all_of_their_storage(meter):
    a = torch.zeros(10, 100)
    view = a[3:4].T.reshape(100, 1).expand(100, 7)
    assert meter.current_bytes == 1000 * FLOAT
    del a
    assert meter.current_bytes == 1000 * FLOAT, "a hundred numbers hold the thousand"
    copied = view[:, :1].clone()
    del view
    assert meter.current_bytes == copied.nbytes == 100 * FLOAT


def test_operations_in_place_take_nothing(meter):
    a = torch.zeros(1000)
    a += 1
    a.mul_(2).add_(a)
    assert meter.peak_bytes == 1000 * FLOAT


def test_a_peak_begins_again(meter):
    a = torch.zeros(1000)
    b = a.double()
    del b
    meter.reset_peak()
    assert meter.peak_bytes == meter.current_bytes == 1000 * FLOAT
    del a
    assert meter.peak_bytes == 1000 * FLOAT


def test_a_matrix_product(meter):
    a, b = torch.ones(30, 50), torch.ones(50, 70)
    out = a @ b
    assert meter.current_bytes == meter.peak_bytes == (30 * 50 + 50 * 70 + 30 * 70) * FLOAT
    assert float(out.sum()) == 30 * 70 * 50


def test_what_a_composed_operation_makes_on_the_way(meter):
    """einsum copies an operand that it has to permute; the copy is gone when it returns."""
    a, b = torch.ones(4, 8, 16), torch.ones(8, 4, 32)
    before = meter.current_bytes
    meter.reset_peak()
    out = torch.einsum("abc,bad->cd", a, b)
    assert meter.current_bytes - before == out.nbytes
    assert meter.peak_bytes - before > out.nbytes


def test_attention_by_an_eager_kernel_is_a_square(meter):
    """Logits and their softmax are there at once: 2 x heads x n x n numbers."""
    heads, n, size = 3, 64, 8
    query = torch.randn(1, heads, n, size)
    meter.reset_peak()
    before = meter.current_bytes
    out = torch.softmax(query @ query.transpose(-1, -2), -1) @ query
    # When the softmax is made, the logits, and the copies in which bmm reads its operands are gone.
    assert meter.peak_bytes - before == 2 * heads * n * n * FLOAT
    assert meter.current_bytes - before == out.nbytes == heads * n * size * FLOAT


def test_attention_by_a_fused_kernel_is_not(meter):
    heads, n, size = 3, 64, 8
    query = torch.randn(1, heads, n, size)
    meter.reset_peak()
    before = meter.current_bytes
    torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert 0 < meter.peak_bytes - before < heads * n * n * FLOAT


def test_what_was_there_before_counts_once_it_is_read():
    before, numbers = torch.ones(100), np.zeros(50, dtype=np.float32)
    with torch.inference_mode(), MemoryMeter("cpu") as meter:
        assert meter.current_bytes == 0
        before.sum()
        before.view(10, 10).sum()
        assert meter.current_bytes == 100 * FLOAT
        torch.from_numpy(numbers).sum()
        assert meter.peak_bytes >= 150 * FLOAT


def test_a_storage_that_grows(meter):
    a = torch.zeros(10)
    torch.add(torch.ones(50), 1, out=a.resize_(0))
    assert meter.current_bytes == a.untyped_storage().nbytes() == 50 * FLOAT


def test_what_is_held_is_there_from_the_beginning():
    """Shared weights once: the second layer is the first."""
    first = torch.nn.Linear(20, 10)
    model = torch.nn.Sequential(first, torch.nn.Linear(10, 20), first)
    weights = (20 * 10 + 10 + 10 * 20 + 20) * FLOAT
    with torch.inference_mode(), MemoryMeter("cpu", held=model) as meter:
        assert meter.current_bytes == meter.peak_bytes == weights
        out = model(torch.ones(3, 20))
        assert meter.current_bytes == weights + out.nbytes
    with MemoryMeter("cpu", held=[torch.ones(5), torch.ones(7)]) as meter:
        gc.collect()
        assert meter.peak_bytes == 12 * FLOAT


def test_host_memory_is_told_apart(meter):
    with on_host():
        pool = torch.zeros(1000)
    assert meter.current_bytes == meter.peak_bytes == 0 and meter.host_bytes == 1000 * FLOAT
    part = pool[:10].clone()
    assert meter.current_bytes == part.nbytes
    del pool
    assert meter.host_bytes == 0


def test_the_limit_is_an_error_as_on_a_gpu():
    with MemoryMeter("cpu", limit_bytes=1000 * FLOAT) as meter:
        a = torch.zeros(900)
        with pytest.raises(torch.OutOfMemoryError, match="limit of 4,000 bytes: 4,004 would be in use"):
            torch.zeros(101)
        assert meter.current_bytes == 900 * FLOAT, "what did not fit is gone"
        b = torch.zeros(100)
        assert meter.current_bytes == 1000 * FLOAT
        del a, b


def test_a_product_that_does_not_fit_is_never_made():
    """A square of a million rows would take 4 TB."""
    column = torch.ones(1_000_000, 1)
    with MemoryMeter("cpu", limit_bytes=10**9), pytest.raises(torch.OutOfMemoryError):
        column @ column.T


def test_counting_ends_with_the_block():
    with MemoryMeter("cpu") as meter:
        a = torch.zeros(10)
    b = a + 1
    assert meter.current_bytes == 10 * FLOAT
    del a, b
    assert meter.current_bytes == 10 * FLOAT


def test_the_same_on_every_run(tiny_model):
    def peak():
        with torch.inference_mode(), MemoryMeter("cpu", held=tiny_model) as meter:
            tiny_model(torch.arange(3, 60)[None])
            return meter.peak_bytes

    assert peak() == peak()


def test_what_the_allocator_took_is_no_less_than_the_peak(meter):
    a = torch.ones(10_000_000)
    assert meter.reserved_bytes >= meter.peak_bytes >= a.nbytes
    assert "VmHWM" in meter.method and "numba" in meter.method


@pytest.mark.parametrize("limit", [0, -5])
def test_a_limit_that_holds_nothing(limit):
    with pytest.raises(KvaccError, match=f"limit of {limit} bytes holds nothing"):
        MemoryMeter("cpu", limit_bytes=limit)


@pytest.mark.gpu
def test_on_a_gpu():
    device, size = "cuda", 2**20
    with MemoryMeter(device) as meter:
        before = meter.current_bytes
        a = torch.zeros(size, device=device)
        assert meter.current_bytes - before == size * FLOAT
        b = a + 1
        del b
        assert meter.peak_bytes - before == 2 * size * FLOAT
        meter.reset_peak()
        assert meter.peak_bytes - before == size * FLOAT
        assert meter.reserved_bytes >= meter.peak_bytes and meter.host_bytes is None
        assert "CUDA" in meter.method
    total = torch.cuda.get_device_properties(0).total_memory
    with MemoryMeter(device, limit_bytes=total // 10), pytest.raises(torch.OutOfMemoryError):
        torch.empty(math.ceil(total / 8), dtype=torch.uint8, device=device)
    gc.collect()
    torch.empty(math.ceil(total / 8), dtype=torch.uint8, device=device)  # the limit is gone
    with pytest.raises(KvaccError, match="more than the GPU's"), MemoryMeter(device, limit_bytes=2 * total):
        pass


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")
def test_weights_rearranged_before_are_no_obstacle(meter):
    """A model that answered before it is probed has a copy of its weights that no storage stands for."""
    from kvacc.engine.prepacked import PrepackedWeights

    layer = torch.nn.Linear(300, 300, bias=False)
    states = torch.zeros(10, 300)
    with torch.inference_mode(), PrepackedWeights(torch.nn.Sequential(layer)).used():
        before = meter.current_bytes
        out = layer(states)
        assert meter.current_bytes - before == out.nbytes
