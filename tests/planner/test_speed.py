"""Lower bounds of time, by hand."""

from __future__ import annotations

import pytest
from workloads import half

from kvacc.planner.gpus import find_gpu
from kvacc.planner.models import find_model
from kvacc.planner.speed import first_token_time, token_time
from kvacc.strategy import make_strategy

FULL = make_strategy("full")
H100 = find_gpu("h100")


def step(name, strategy=FULL, gpu=H100, **changes):
    return token_time(find_model(name), strategy, half(output_tokens=1, **changes), gpu, "bfloat16")


def test_decoding_reads_weights_and_cache_once():
    found = step("llama-3.1-8b", prompt_tokens=8192, batch=16)
    embedding = 128_256 * 4096
    assert found.weights == pytest.approx((8_030_261_248 - embedding) * 2 / 3.35e12)
    assert found.cache == pytest.approx(16 * 8192 * 32 * 4096 / 3.35e12)
    # Two operations a number; attention: two for each query head's numbers of keys and values.
    matrices = 8_030_261_248 - embedding - 65 * 4096
    attention = 16 * 8192 * 32 * 2 * 32 * 256
    assert found.arithmetic == pytest.approx((2 * matrices * 16 + attention) / 989e12)
    assert (found.host, found.exchange) == (0, 0)
    assert found.seconds == found.weights + found.cache and found.bound_by == "memory bandwidth"


def test_eviction_shortens_what_is_read():
    full, h2o = (
        step("llama-3.1-8b", s, prompt_tokens=10_000, batch=8) for s in (FULL, make_strategy("h2o", 0.2))
    )
    assert h2o.cache == pytest.approx(full.cache / 5)
    assert h2o.weights == full.weights


def test_selection_is_bound_by_the_host():
    quest = make_strategy("quest", 2048, dense_layers=0)
    found = step("llama-3.1-8b", quest, prompt_tokens=32_768, batch=32)
    assert found.host == pytest.approx(32 * 2047 * 32 * 4096 / 64e9)
    assert found.bound_by == "host transfers" and found.seconds == found.host
    pages = 32_768 // 16 * 2 * 8 * 128 * 2 * 32 * 32  # bounds of each page, 32 layers and rows
    assert found.cache > (32 * 2047 * 32 * 4096 + pages) / 3.35e12


def test_experts_are_read_as_far_as_they_are_used():
    one, many = step("mixtral-8x7b", batch=1), step("mixtral-8x7b", batch=256)
    experts, dense = 45_097_156_608, 46_702_792_704 - 45_097_156_608 - 32_000 * 4096
    assert one.weights == pytest.approx((dense + experts / 4) * 2 / 3.35e12)
    assert many.weights == pytest.approx((dense + experts) * 2 / 3.35e12, rel=1e-6)


def test_tensor_parallelism_exchanges_two_sums_per_layer():
    found = step("llama-3.1-70b", devices=4, batch=8)
    assert found.exchange == pytest.approx(2 * 80 * 8 * 8192 * 2 * 2 * 3 / 4 / 450e9)
    over_pcie = step("llama-3.1-70b", gpu=find_gpu("l40s"), devices=4, batch=8)
    assert over_pcie.exchange == pytest.approx(found.exchange * 450 / 32)


def test_the_first_token_is_bound_by_arithmetic():
    model, work = find_model("llama-2-7b"), half(prompt_tokens=2048)
    found = first_token_time(model, FULL, work, H100, "bfloat16")
    head = 32_000 * 4096
    matrices = 6_738_415_616 - head - 65 * 4096 - head  # without embeddings
    attention = 2 * 32 * 32 * 256 * 2048 * 2049 // 2
    assert found.arithmetic == pytest.approx((2 * matrices * 2048 + 2 * head + attention) / 989e12)
    assert found.bound_by == "arithmetic"
    chunked = first_token_time(model, FULL, half(prompt_tokens=2048, prefill_chunk=256), H100, "bfloat16")
    assert chunked.weights == pytest.approx(8 * found.weights)


def test_windows_shorten_attention():
    sliding = first_token_time(
        find_model("mistral-7b-v0.1"), FULL, half(prompt_tokens=16_384), H100, "bfloat16"
    )
    full = first_token_time(find_model("mistral-7b"), FULL, half(prompt_tokens=16_384), H100, "bfloat16")
    pairs = 4096 * 4097 // 2 + (16_384 - 4096) * 4096
    saved = 2 * 32 * 32 * 256 * (16_384 * 16_385 // 2 - pairs)
    more_words = 2 * 768 * 4096
    assert full.arithmetic - sliding.arithmetic == pytest.approx((saved + more_words) / 989e12)
