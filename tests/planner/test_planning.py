"""The verdict, the limits, and the command."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from kvacc.cli import cli
from kvacc.errors import KvaccError
from kvacc.planner import plan
from kvacc.planner.gpus import find_gpu
from kvacc.planner.memory import memory_of

PAPER = {"context": 131_072, "count": 4, "batch": 8, "strategy": "h2o", "budget": 0.2}


def test_limits_agree_with_the_verdict():
    made = plan("llama-3.1-8b", "rtx-4090", context=4096, batch=4, kernel="eager")
    for tokens, fits in ((made.longest_prompt, True), (made.longest_prompt + 1, False)):
        assert plan("llama-3.1-8b", "rtx-4090", context=tokens, batch=4, kernel="eager").fits is fits
    for rows, fits in ((made.largest_batch, True), (made.largest_batch + 1, False)):
        assert plan("llama-3.1-8b", "rtx-4090", context=4096, batch=rows, kernel="eager").fits is fits
    assert made.limited_by == "memory"


def test_prefill_bounds_long_contexts_and_the_cache_does_not():
    made = plan("llama-3.1-70b", "h100", **PAPER)
    assert not made.fits and made.memory.decode_peak < made.available
    assert "reading the prompt needs" in made.verdict
    assert "the largest part is the activations of prefill" in made.verdict
    # Hidden states of a million tokens at once are not divided among GPUs, and in chunks the strategy
    # could evict nothing before the end.
    assert made.alternatives == ("--count 64",)
    assert plan("llama-3.1-70b", "h100", **{**PAPER, "protocol": "stream", "prefill_chunk": 512}).fits


def test_every_alternative_fits():
    made = plan("llama-3.1-8b", "rtx-4090", context=16_384, kernel="eager")
    assert not made.fits
    assert made.alternatives == ("--count 8", "--kernel sdpa", "--prefill-chunk 1024")
    for change in ({"count": 8}, {"kernel": "sdpa"}, {"prefill_chunk": 1024}):
        assert plan("llama-3.1-8b", "rtx-4090", context=16_384, **{"kernel": "eager", **change}).fits


def test_weights_that_are_too_big():
    made = plan("llama-3.1-70b", "h100")
    assert made.longest_prompt == made.largest_batch == 0
    assert "the largest part is the weights, 131.4 GiB" in made.verdict
    assert "--count 2" in made.alternatives and "--dtype float8" in made.alternatives


def test_the_models_own_limits():
    made = plan("opt-6.7b", "h200")
    assert (made.longest_prompt, made.limited_by) == (2048 - 256, "model")
    assert any("4,352 tokens are more than the 2,048" in note for note in made.notes)
    made = plan("mistral-7b-v0.1", "h200", context=2048, strategy="h2o", budget=0.5)
    assert (made.longest_prompt, made.limited_by) == (4096 - 255, "model")
    assert plan("mistral-7b-v0.1", "h200", context=3841, strategy="h2o", budget=0.5).fits
    with pytest.raises(KvaccError, match="4097 tokens exceed the model's sliding window"):
        plan("mistral-7b-v0.1", "h200", context=3842, strategy="h2o", budget=0.5)


def test_host_memory_can_be_the_limit():
    settings = {"context": 65_536, "strategy": "infinigen", "budget": 0.1}
    assert plan("llama-3.1-8b", "h100", **settings).fits
    made = plan("llama-3.1-8b", "h100", **settings, host_memory=4 * 2**30)
    assert not made.fits and "the pool in host memory needs" in made.verdict
    assert 0 < made.longest_prompt < 65_536


def test_types_of_numbers():
    made = plan("llama-3.1-8b", "h100", dtype="int4", kv_dtype="fp8")
    assert made.memory.weights == 8_030_261_248 // 2 + made.model.parameters.buffer_bytes
    assert made.memory.cache.device == 32 * (4096 + 255) * 2 * 8 * 128
    assert (made.dtype, made.kv_dtype, made.work.activation_bytes) == ("int4", "float8", 2)
    on_t4 = plan("llama-3.1-8b", "t4")
    assert on_t4.token is None and any("no matrix units for bfloat16" in note for note in on_t4.notes)
    assert plan("llama-3.1-8b", "t4", dtype="fp16").token is not None


def test_kernels_that_a_family_lacks():
    lacking = "transformers has no sdpa for this family: give --kernel eager or flash_attention_2"
    assert lacking in plan("gpt-oss-20b", "h100").notes
    assert lacking not in plan("gpt-oss-20b", "h100", kernel="eager").notes
    assert lacking not in plan("llama-3.1-8b", "h100").notes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"count": 3},
            "32 attention heads cannot be shared equally by 3 GPUs; allowed counts: 1, 2, 4, 8, 16, 32",
        ),
        ({"kernel": "flash"}, "unknown kernel 'flash'; known: eager, flash_attention_2, sdpa"),
        ({"dtype": "bf32"}, "unknown dtype 'bf32'"),
        ({"kv_dtype": "fp7"}, "unknown kv-dtype 'fp7'"),
        ({"batch": 0}, "batch 0 is not a whole number"),
        ({"strategy": "h2o"}, "needs a budget"),
        ({"protocol": "chat"}, "unknown protocol"),
        ({"prefill_chunk": 0}, "prefill_chunk 0"),
    ],
)
def test_bad_input(changes, message):
    with pytest.raises(KvaccError, match=message):
        plan("llama-3.1-8b", **changes)


def test_more_memory_never_fits_less():
    made = plan("qwen2.5-7b", "l4", context=8192)
    bigger = plan("qwen2.5-7b", replace(find_gpu("l4"), memory=48 * 2**30), context=8192)
    assert bigger.longest_prompt > made.longest_prompt > 0 and bigger.largest_batch > made.largest_batch
    peaks = [memory_of(made.model, made.strategy, replace(made.work, batch=n)).peak for n in range(1, 6)]
    assert peaks == sorted(peaks)


def run(*arguments: str):
    return CliRunner().invoke(cli, ["plan", *arguments], catch_exceptions=True)


def test_the_command():
    words = "--model llama-3.1-70b --gpu h100 --count 4 --context 128k --batch 8 --strategy h2o --budget 0.2"
    shown = run(*words.split())
    assert shown.exit_code == 0, shown.output
    assert "does not fit: reading the prompt needs" in shown.output
    assert "80 layers, grouped-query attention: 8 KV heads x (128 + 128 numbers) x 2 bytes" in shown.output
    assert run(*words.split(), "--require-fit").exit_code == 1
    values = json.loads(run(*words.split(), "--format", "json").output)
    made = plan("llama-3.1-70b", "h100", **PAPER)
    assert values["fits"] is False and values["longest_prompt"] == made.longest_prompt
    assert values["memory_per_gpu"]["kv_device"] == made.memory.cache.device
    markdown = run(*words.split(), "--format", "markdown").output
    assert "| needed on each GPU | " in markdown and "- does not fit: " in markdown


def test_a_gpu_described_by_numbers():
    words = "--model qwen3-8b --gpu-memory 24GB --gpu-bandwidth 1TB/s --gpu-flops 100T --format json"
    values = json.loads(run(*words.split()).output)
    assert values["gpu"] == {"name": "custom GPU", "count": 1, "memory": 24 * 10**9}
    assert values["fits"] is True
    weights = 8_190_735_360 - 151_936 * 4096
    cache = 36 * (4096 + 255) * 2 * 8 * 128 * 2
    assert values["seconds_per_token_at_least"] == pytest.approx((2 * weights + cache) / 1e12)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model llama-3.1-9b --gpu h100", "unknown model 'llama-3.1-9b'"),
        ("--model llama-3.1-8b", "name a GPU with --gpu"),
        ("--model llama-3.1-8b --gpu h100 --context 128K", "--context '128K'"),
        ("--model llama-3.1-8b --gpu h100 --gpu-memory 24", "--gpu-memory '24'"),
        ("--model llama-3.1-8b --gpu h100 --strategy h20 --budget 0.2", "unknown strategy 'h20'"),
        ("--model llama-3.1-8b --gpu h100 --strategy h2o --budget 2.5", "budget 2.5 as a fraction"),
    ],
)
def test_bad_words_are_one_line(words, message):
    shown = run(*words.split())
    assert shown.exit_code == 2
    assert message in shown.output and len(shown.output.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_real_model():
    """SmolLM2-135M: weights and cache exact, peaks near the measured ones."""
    import torch
    from workloads import workload

    from kvacc.engine.wrapped import WrappedModel
    from kvacc.kv_size import kv_bytes_of
    from kvacc.models import load_model
    from kvacc.planner.models import find_model
    from kvacc.probes.decoder import make_decoder
    from kvacc.probes.memory import MemoryMeter
    from kvacc.strategy import make_strategy

    model = load_model("smollm2-135m", device="cpu", dtype="float32")
    planned, full = find_model("smollm2-135m"), make_strategy("full")
    text = torch.randint(3, 9000, (1, 512), generator=torch.Generator().manual_seed(0))
    for kernel in ("eager", "sdpa"):
        expected = memory_of(planned, full, workload(prompt_tokens=512, kernel=kernel, output_tokens=3))
        decoder = make_decoder(model, full, 512, 1, kernel=kernel)
        with MemoryMeter(torch.device("cpu"), held=model) as meter:
            assert meter.current_bytes == expected.weights
            decoder.prefill(text)
            measured = meter.peak_bytes - expected.weights
        assert expected.prefill_peak - expected.weights == pytest.approx(measured, rel=0.03)
    wrapped = WrappedModel(model)
    for strategy in (full, make_strategy("h2o", 0.2), make_strategy("quest", 128)):
        decoder = make_decoder(wrapped, strategy, 512, 1)
        decoder.prefill(text)
        assert decoder.kv_bytes() == kv_bytes_of(model.config, strategy, 512, 0, 1, 4)
        decoder.step(text[:, 0])
        assert decoder.kv_bytes() == kv_bytes_of(model.config, strategy, 512, 1, 1, 4)
