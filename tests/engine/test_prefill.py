"""A prompt read in chunks gives what it gives in one pass."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from naive import draw_tokens, sharp

from kvacc.engine.prefill import (
    chunks,
    passes_of,
    read_in_chunks,
    require_chunk,
    require_chunked_prefill,
    require_state_carried,
)
from kvacc.errors import KvaccError
from kvacc.strategy import EvictStrategy, make_strategy
from kvacc.verify.runs import Text, first_difference, step_runs
from kvacc.verify.subjects import Subject

EXACT = 1e-4
PROMPT = 21
FAMILIES = ["llama", "opt", "gemma3_text", "gpt_oss", "deepseek_v3", "mistral"]
UNROTATED = {"opt", "deepseek_v3"}
STRATEGIES = {
    "full": {},
    "h2o": {"budget": 0.3},
    "h2o averaged": {"budget": 0.3, "scores": "averaged"},
    "h2o full_row": {"budget": 0.3, "scores": "full_row"},
    "streaming_llm": {"budget": 7, "sinks": 2},
    "recent": {"budget": 0.3},
    "random": {"budget": 0.3},
    "infinigen": {"budget": 0.3, "alpha": 1.0},
    "quest": {"budget": 0.4, "page_size": 4, "dense_layers": 0},
    "infllm": {"budget": 0.6, "init": 1, "block": 2, "representatives": 1, "local_fraction": 0.4},
}


def strategy_for(name, family):
    options = dict(STRATEGIES[name])
    if family in UNROTATED and name in ("streaming_llm", "infllm"):
        options["positions"] = "original"
    return make_strategy(name.split()[0], options.pop("budget", None), **options)


@pytest.mark.usefixtures("skewing_folder")
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_change_neither_logits_nor_decisions(family, name):
    """Two prompts of different lengths, the shorter padded on the left, and three tokens after
    them: one pass for all, then chunks of one token, of sizes that divide nothing, and of most
    of the prompt."""
    subject, strategy = Subject(family, sharp(family), True), strategy_for(name, family)
    tokens = draw_tokens(PROMPT + 3), draw_tokens(PROMPT - 4, seed=1)
    for protocol, dense in (("stream", 0), ("context", 9), ("serve", PROMPT - 7)):
        if protocol not in strategy.supported_protocols():
            continue
        texts = [Text(tuple(t), dense, dense or len(t) - 3) for t in tokens]
        whole = step_runs(subject, strategy, texts, chunk=100)
        assert strategy.name == "full" or any(run.hides for run in whole)
        for chunk in (1, 5, 16) if family == "llama" else (5,):
            found = step_runs(subject, strategy, texts, chunk=chunk)
            for expected, run in zip(whole, found, strict=True):
                assert first_difference(expected, run, EXACT) is None, f"{protocol}, chunks of {chunk}"


def test_a_strategy_that_reads_the_future_cannot_be_read_in_chunks():
    strategy = make_strategy("h2o", 4, scores="global")
    assert not strategy.chunked_prefill
    with pytest.raises(KvaccError, match="does not give the same result.*leave out prefill_chunk=8"):
        require_chunked_prefill(strategy, 8)
    require_chunked_prefill(strategy, None)


@dataclass(frozen=True)
class WholePrompt(EvictStrategy):
    """A strategy that declares that it wants its prompt in one pass."""

    name: ClassVar[str] = "whole_prompt"
    chunked_prefill: ClassVar[bool] = False


def test_a_strategy_may_refuse_chunks():
    with pytest.raises(KvaccError, match="WholePrompt"):
        require_chunked_prefill(WholePrompt(4), 8)


@pytest.mark.parametrize("chunk", [0, -1, 2.5, "many", True])
def test_a_chunk_is_a_number_of_tokens(chunk):
    with pytest.raises(KvaccError, match=f"prefill_chunk {chunk!r} is not a number of tokens"):
        require_chunk(chunk)


def test_a_chunk_may_come_as_text():
    assert require_chunk("512") == 512 and require_chunk(None) is None


@pytest.mark.parametrize(
    "tokens,chunk,sizes", [(7, 3, [3, 3, 1]), (6, 3, [3, 3]), (2, 3, [2]), (5, None, [5])]
)
def test_a_prompt_in_pieces(tokens, chunk, sizes):
    parts = chunks(torch.arange(2 * tokens).view(2, tokens), chunk)
    assert [part.shape[1] for part in parts] == sizes
    assert passes_of(tokens, chunk) == len(sizes)
    assert torch.equal(torch.cat(parts, 1), torch.arange(2 * tokens).view(2, tokens))


# Recurrent layers


def mamba(version):
    import transformers

    settings = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "expand": 2}
    torch.manual_seed(0)
    if version == 1:
        model = transformers.MambaForCausalLM(transformers.MambaConfig(**settings))
    else:
        more = {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 8}
        model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**settings, **more))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "A_log" not in name:
                parameter.normal_(0, 0.6)
    return model.eval()


def read(model):
    def in_chunks(tokens, chunk):
        from transformers.cache_utils import DynamicCache

        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            for part in chunks(tokens, chunk):
                logits = model(input_ids=part, cache=cache, use_cache=True).logits[:, -1]
        return logits

    return in_chunks


def test_a_family_that_loses_its_state_between_chunks_is_refused():
    """transformers 5.24 starts Mamba's scan from zero in every pass of several tokens."""
    model = mamba(1)
    tokens = torch.arange(2, 22)[None]
    whole, parts = read(model)(tokens, 20), read(model)(tokens, 6)
    carried = float((whole - parts).abs().max()) < 1e-3
    if carried:  # a later release
        require_state_carried(model, read(model))
        return
    with pytest.raises(KvaccError, match="'mamba' loses the state of its recurrent layers"):
        require_state_carried(model, read(model))


def test_families_that_carry_their_state_are_read_in_chunks():
    model = mamba(2)
    tokens = torch.arange(2, 22)[None]
    torch.testing.assert_close(read(model)(tokens, 6), read(model)(tokens, 20), atol=EXACT, rtol=0)
    require_state_carried(model, read(model))
    hybrid = sharp("qwen3_next")
    whole, parts = (read_in_chunks(hybrid, tokens, chunk) for chunk in (20, 6))
    torch.testing.assert_close(parts, whole, atol=EXACT, rtol=0)
    require_state_carried(hybrid.model, lambda *asked: read_in_chunks(hybrid, *asked))


# The backend


@pytest.fixture(scope="module")
def generated(tiny_folder):
    """(strategy, protocol, prefill_chunk) -> texts and records of three prompts."""
    from lm_eval.api.instance import Instance
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import kvacc

    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.35 * torch.randn(parameter.shape, generator=draw))
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    prompts = [
        "The quick brown fox jumps over the lazy dog. Then it rests.",
        "A short one",
        "In between, a text.",
    ]

    def make(strategy, protocol="serve", prefill_chunk=None, **more):
        lm = kvacc.KvaccLM(
            copy.deepcopy(model), strategy, protocol=protocol, tokenizer=tokenizer, batch_size=3,
            tail_tokens=5, prefill_chunk=prefill_chunk,
        )  # fmt: skip
        arguments = {"max_gen_toks": 9, "until": ["\x00"], "do_sample": False, **more}
        requests = [
            Instance("generate_until", {}, (prompt, arguments), 0, metadata=("task", i, 1))
            for i, prompt in enumerate(prompts)
        ]
        return lm.generate_until(requests, disable_tqdm=True), lm.records

    return make


@pytest.mark.usefixtures("skewing_folder")
@pytest.mark.parametrize("protocol", ["stream", "context", "serve"])
@pytest.mark.parametrize("name", ["full", "h2o", "streaming_llm", "quest"])
def test_the_backend_generates_alike_in_chunks(name, protocol, generated):
    """Texts, and every field of their records: kept share, what was acted on, bytes moved."""
    strategy = strategy_for(name, "llama")
    texts, records = generated(strategy, protocol)
    for chunk in (1, 16, "500"):
        assert generated(strategy, protocol, chunk)[0] == texts
        assert generated(strategy, protocol, chunk)[1] == records


def test_beams_too(generated):
    strategy = make_strategy("h2o", 0.3)
    assert generated(strategy, num_beams=2)[0] == generated(strategy, prefill_chunk=7, num_beams=2)[0]


def test_the_backend_refuses_what_a_strategy_does_not_declare(generated):
    with pytest.raises(KvaccError, match="WholePrompt.*prefill_chunk=8"):
        generated(WholePrompt(4), prefill_chunk=8)
    with pytest.raises(KvaccError, match="prefill_chunk 0 is not"):
        generated(make_strategy("full"), prefill_chunk=0)
    with pytest.raises(KvaccError, match="prefill_chunk_size: give the model prefill_chunk"):
        generated(make_strategy("full"), prefill_chunk_size=8)
