"""The table of GPUs."""

from __future__ import annotations

import pytest

from kvacc.errors import KvaccError
from kvacc.planner.gpus import ALIASES, find_gpu, known_gpus


def test_the_table_is_plausible():
    table = known_gpus()
    assert len(table) >= 17
    for gpu in table.values():
        assert 14 * 2**30 < gpu.memory < 192 * 2**30
        assert 2e11 < gpu.bandwidth < 1e13
        assert 1e10 < gpu.host <= 64e9
        # Dense peaks: a sparse number, twice as high, would stand out beside float32 and float8.
        half = gpu.operations["float16"]
        assert gpu.operations["float32"] < half
        assert gpu.operations.get("float8", 2 * half) == pytest.approx(2 * half, rel=0.03)
        assert gpu.between <= 900e9
    assert set(ALIASES.values()) <= set(table)


def test_names():
    assert find_gpu("H100").bandwidth == 3.35e12
    assert find_gpu("RTX 4090") == find_gpu("4090") == find_gpu("rtx_4090")
    assert find_gpu("t4").operations_for("bfloat16") is None
    with pytest.raises(KvaccError, match=r"unknown GPU 'h1000' \(did you mean 'h100'"):
        find_gpu("h1000")


def test_described_by_numbers():
    gpu = find_gpu(None, memory=24 * 10**9, bandwidth=10**12, operations=10**14)
    assert (gpu.memory, gpu.bandwidth, gpu.operations_for("bfloat16")) == (24 * 10**9, 10**12, 10**14)
    with pytest.raises(KvaccError, match="--gpu-bandwidth, --gpu-flops missing"):
        find_gpu(None, memory=1)
    assert find_gpu("l4", memory=10**9).bandwidth == find_gpu("l4").bandwidth
