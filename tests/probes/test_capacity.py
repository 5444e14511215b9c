"""What fits in a memory limit, found by trying: on tiny models, where everything can be tried."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_llama

from kvacc.environment import environment_of
from kvacc.errors import KvaccError
from kvacc.probes.capacity import _crossing, largest_batch, longest_prompt
from kvacc.probes.cases import PlannedCase
from kvacc.probes.decoder import make_decoder
from kvacc.probes.memory import MemoryMeter
from kvacc.probes.memory_pass import bytes_of_weights
from kvacc.probes.probed_model import ProbedModel
from kvacc.probes.records import ProbeCase
from kvacc.strategy import make_strategy

LIMIT = 10**6
HEADS = 4


@pytest.fixture(scope="module")
def model():
    """Reads at most 512 tokens."""
    return ProbedModel(
        tiny_llama(max_position_embeddings=512), lambda text: [3 + ord(c) % 120 for c in text], "tiny"
    )


@pytest.fixture(scope="module")
def environment():
    return environment_of("cpu")


@pytest.fixture(scope="module")
def search(model, environment):
    def found(which=longest_prompt, name="full", budget=None, kernel="eager", chunk=None, prompt=32, **more):
        strategy = make_strategy(name, budget)
        case = ProbeCase(
            model={"pretrained": "tiny"}, strategy=name, options=strategy.options(), budget=budget,
            kernel=kernel, prompt_tokens=prompt, batch=1, output_tokens=8, prefill_chunk=chunk,
        )  # fmt: skip
        more = {"limit": LIMIT, **more}
        return which(model, PlannedCase(strategy, case), case_id="id", environment=environment, **more)

    return found


@pytest.fixture(scope="module")
def exact(search):
    return search(granularity=1, resolution=0)


def peak(model, tokens, batch=1, chunk=None, kernel="eager"):
    """By itself, with the decoder and the meter alone."""
    prompts = model.prompts(tokens, batch)
    with MemoryMeter("cpu", held=model.model) as meter:
        decoder = make_decoder(model.model, make_strategy("full"), tokens, batch, kernel=kernel)
        token = decoder.prefill(prompts, chunk).argmax(-1)
        for _ in range(2):
            token = decoder.step(token).argmax(-1)
        return meter.peak_bytes


def test_the_longest_prompt_is_the_last_that_fits(model, exact):
    """Tried one by one: every prompt up to the answer fits, and the next one does not."""
    found = exact
    assert found.fails == found.fits + 1 and found.bound_by == "prefill" and found.limit == LIMIT
    assert found.peak_of_fits == peak(model, found.fits) <= LIMIT < peak(model, found.fails)
    assert found.case.prompt_tokens == found.fits and found.case.output_tokens == 3
    assert found.tried[str(found.fails)] == "out of memory in prefill"
    assert found.tried[str(found.fits)] == f"fits, peak {found.peak_of_fits:,} bytes"
    assert len(found.tried) < 15


def test_the_same_answer_on_every_run(search):
    assert search() == search()


def test_the_answer_is_as_near_as_asked(search, exact):
    rough = search(granularity=16, resolution=0)
    assert rough.fits == exact.fits // 16 * 16 and rough.fails == rough.fits + 16
    assert len(rough.tried) <= len(exact.tried)
    within = search(granularity=1, resolution=0.2)
    assert within.fails - within.fits <= 0.2 * within.fits and within.fits <= exact.fits < within.fails


def test_prefill_and_not_the_cache_bounds_an_eager_kernel(model, search):
    """The finding that this probe exists for: the same model, kernel and limit read a much longer
    prompt in chunks, because a square of the prompt's length is never there at once."""
    at_once, in_chunks = search(), search(chunk=16)
    assert at_once.bound_by == "prefill"
    assert in_chunks.bound_by == "context" and in_chunks.fits == 510 > 3 * at_once.fits
    # What a token's keys and values take would have let many more fit.
    per_token = 2 * 2 * 8 * 2 * 4
    room = (LIMIT - bytes_of_weights(model.model)) // per_token
    assert at_once.fits < room / 10
    # The square itself: logits and their softmax, of all heads, in float32.
    n = at_once.fits
    assert at_once.peak_of_fits - bytes_of_weights(model.model) > 2 * HEADS * n * n * 4


def test_a_fused_kernel_reads_more_than_an_eager_one(search):
    fused = search(kernel="sdpa")
    assert fused.fits >= 2 * search().fits


def test_the_models_positions_are_a_limit_too(search):
    found = search(limit=10**9, granularity=256)
    # Two tokens are read after the prompt.
    assert found.fits == 510 and found.fails is None and found.bound_by == "context"


def test_a_search_ends_where_it_is_told(search):
    found = search(limit=10**9, most=100)
    assert found.fits == 100 and found.fails is None and found.bound_by == "search"


def test_weights_alone_may_not_fit(model, search):
    found = search(limit=bytes_of_weights(model.model) - 1)
    assert found.fits == 0 and found.bound_by == "weights" and not found.tried and found.peak_of_fits is None


def test_not_even_one_unit_may_fit(model, search):
    found = search(limit=bytes_of_weights(model.model) + 1000)
    assert found.fits == 0 and found.fails == 64 and found.bound_by == "prefill"


def test_the_largest_batch_is_the_last_that_fits(model, search):
    found = search(largest_batch, prompt=64, resolution=0)
    assert found.searched == "batch" and found.fails == found.fits + 1 > 2
    assert found.peak_of_fits == peak(model, 64, found.fits) <= LIMIT < peak(model, 64, found.fails)
    assert found.case.batch == found.fits and found.case.prompt_tokens == 64


def test_memory_may_end_while_decoding(search, model):
    """One long chunk after another reads a prompt that just fits; a token more, and the cache is
    copied once more than there is room for."""
    tokens = 60
    prompts = model.prompts(tokens, 1)
    with MemoryMeter("cpu", held=model.model) as meter:
        make_decoder(model.model, make_strategy("full"), tokens, 1, kernel="eager").prefill(prompts, 1)
        room = meter.peak_bytes
    found = search(limit=room, chunk=1, granularity=1, resolution=0, most=tokens)
    assert found.bound_by == "decode" and found.fails <= tokens
    assert found.tried[str(found.fails)] == "out of memory in decode"


@pytest.mark.parametrize(
    "name,budget,chunk",
    [("full", None, None), ("h2o", "0.2", None), ("h2o", "0.2", 64), ("streaming_llm", "32", 64)],
)
def test_strategies_under_kvaccs_kernel(name, budget, chunk, search):
    found = search(name=name, budget=budget, kernel="kvacc", chunk=chunk, granularity=64)
    assert found.fits > 0 and found.case.strategy == name
    if name == "streaming_llm" and chunk:
        assert found.fits > search(name=name, budget=budget, kernel="kvacc").fits


def test_a_processor_needs_a_limit(search):
    with pytest.raises(KvaccError, match="on cpu nothing says.*give a memory limit, such as 4GB"):
        search(limit=None)


def test_a_kernel_that_is_not_there_is_said_before_anything_is_tried(search):
    if torch.cuda.is_available():
        pytest.skip("flash attention may be there")
    with pytest.raises(KvaccError, match="kernel 'flash_attention_2'"):
        search(kernel="flash_attention_2")


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"granularity": 0}, "granularity 0"),
        ({"resolution": 1.5}, "resolution 1.5"),
        ({"most": 0}, "most 0"),
        ({"which": largest_batch, "prompt": 2000}, "512 positions"),
    ],
)
def test_mistakes(arguments, message, search):
    with pytest.raises(KvaccError, match=message):
        search(**arguments)


def test_an_error_that_is_not_memorys_is_passed_on(search, model, monkeypatch):
    monkeypatch.setattr(model, "prompts", lambda tokens, batch: torch.full((batch, tokens), 10_000))
    with pytest.raises(IndexError):
        search()


@pytest.mark.parametrize(
    "peak_of",
    [lambda n: 1000 + 50 * n, lambda n: 1000 + 50 * n + 7 * n * n, lambda n: 10 + n * n],
)
def test_a_guess_is_right_where_peaks_are_a_line_or_a_parabola(peak_of):
    points = [(n, peak_of(n)) for n in (64, 256, 1024)]
    assert _crossing(points, peak_of(3000)) == pytest.approx(3000)


def test_no_guess_without_growth():
    assert _crossing([(64, 500)], 1000) is None
    assert _crossing([(64, 500), (128, 500)], 1000) is None


@pytest.mark.gpu
def test_on_a_gpu(environment):
    """Real memory, real refusals."""
    model = ProbedModel(
        tiny_llama(max_position_embeddings=2**20).to("cuda"), lambda text: [3 + ord(c) % 120 for c in text]
    )
    strategy = make_strategy("full")
    case = ProbeCase(model={}, strategy="full", options={}, kernel="eager", prompt_tokens=64, output_tokens=3)
    limits = {"limit": 2**30, "case_id": "id", "environment": environment, "granularity": 1024}
    at_once = longest_prompt(model, PlannedCase(strategy, case), **limits)
    case = case.model_copy(update={"prefill_chunk": 256})
    in_chunks = longest_prompt(model, PlannedCase(strategy, case), most=2**17, **limits)
    assert at_once.bound_by == "prefill" and 0 < at_once.fits < in_chunks.fits
    assert at_once.peak_of_fits <= 2**30


@pytest.mark.slow
def test_chunks_halve_the_prefill_peak_of_a_real_model_at_8k_tokens(smollm2_folder):
    """SmolLM2-135M and 8,000 tokens (its context is 8,192), eager. Two of its 30 layers are run, in
    which everything but the cache is as large as in all; the others' entries are added."""
    from transformers import AutoModelForCausalLM

    tokens, layers = 8000, 2
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    others = (model.config.num_hidden_layers - layers) * tokens * 2 * 3 * 64 * 4
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    prompt = torch.arange(tokens)[None] % 40_000 + 100
    peaks = {}
    for chunk in (None, 512):
        with MemoryMeter("cpu", held=model) as meter:
            make_decoder(model, make_strategy("full"), tokens, 1, kernel="eager").prefill(prompt, chunk)
            peaks[chunk] = meter.peak_bytes - bytes_of_weights(model) + others
    # The logits, and their softmax, of nine heads.
    assert peaks[None] > 2 * 9 * tokens * tokens * 4
    assert peaks[None] > 5 * peaks[512]
