"""Sizes as people write them."""

from __future__ import annotations

import pytest

from kvacc.errors import KvaccError
from kvacc.quantities import (
    duration,
    gib,
    parse_bytes,
    parse_operations,
    parse_rate,
    parse_tokens,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("24GB", 24_000_000_000),
        ("24GiB", 25_769_803_776),
        ("24 gib", 25_769_803_776),
        ("0.5TB", 500_000_000_000),
        ("1,024MiB", 2**30),
        ("12B", 12),
    ],
)
def test_bytes(text, value):
    assert parse_bytes(text, "--gpu-memory") == value


@pytest.mark.parametrize(
    "text", ["24", "24G", "GB", "-1GB", "24GB/s", "1e3GB", "1,02MB", "0GB", "", "24 GB extra"]
)
def test_bad_bytes(text):
    with pytest.raises(KvaccError, match="--gpu-memory"):
        parse_bytes(text, "--gpu-memory")


@pytest.mark.parametrize(
    ("text", "value"), [("4096", 4096), ("128k", 131_072), ("1M", 1_048_576), ("1.5k", 1536), ("8,192", 8192)]
)
def test_tokens(text, value):
    assert parse_tokens(text, "--context") == value


@pytest.mark.parametrize("text", ["128K", "128kb", "1.0001k", "0", "0.5", "-3", "many"])
def test_bad_tokens(text):
    with pytest.raises(KvaccError, match="--context"):
        parse_tokens(text, "--context")


def test_rates():
    assert parse_rate("1TB/s", "--gpu-bandwidth") == 10**12
    assert parse_rate("900 GB/s", "--gpu-bandwidth") == 9 * 10**11
    assert parse_operations("100T", "--gpu-flops") == 10**14
    assert parse_operations("1.5PFLOPS", "--gpu-flops") == 1_500 * 10**12
    assert parse_operations("312 TFLOP/s", "--gpu-flops") == 312 * 10**12
    for text in ("1TB", "900", "1TB/min", "TB/s"):
        with pytest.raises(KvaccError, match="--gpu-bandwidth"):
            parse_rate(text, "--gpu-bandwidth")
    for text in ("100", "100TB", "100 TFLOPS per second"):
        with pytest.raises(KvaccError, match="--gpu-flops"):
            parse_operations(text, "--gpu-flops")


def test_written_for_people():
    assert [gib(n) for n in (2**30, 80 * 2**30, 3 * 2**20, 2**10, 5)] == [
        "1.0 GiB", "80.0 GiB", "3.0 MiB", "1.0 KiB", "5 B",
    ]  # fmt: skip
    assert [duration(s) for s in (2.5, 0.0123, 0.00042)] == ["2.5 s", "12.3 ms", "420 µs"]
