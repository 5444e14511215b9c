"""A second copy of the weights, in the layout of the processor's kernels."""

from __future__ import annotations

import copy

import pytest
import torch
from families import build

import kvacc
from kvacc.engine import prepacked
from kvacc.engine.prepacked import PrepackedWeights
from kvacc.errors import KvaccError
from kvacc.probes.decoder import make_decoder
from kvacc.strategy import make_strategy

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN"
)


def layers(dtype=torch.float32):
    torch.manual_seed(0)
    linear = torch.nn.Linear(300, 400), torch.nn.Linear(400, 300, bias=False), torch.nn.Linear(300, 7)
    return torch.nn.Sequential(*linear).to(dtype)


def overridden(model) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@torch.inference_mode()
def test_products_are_the_same_but_for_rounding():
    model = layers()
    weights = PrepackedWeights(model)
    for shape in [(5, 300), (2, 3, 300), (300,), (1, 0, 300)]:
        states = torch.randn(shape)
        own = model(states)
        with weights.used():
            found = model(states)
        assert found.shape == own.shape
        assert torch.allclose(found, own, atol=1e-5)
    transposed = torch.randn(300, 8).T
    own = model(transposed)
    with weights.used():
        assert torch.allclose(model(transposed), own, atol=1e-5)


def test_layers_are_as_before_afterwards():
    model = layers()
    weights = PrepackedWeights(model)
    with weights.used():
        assert overridden(model) == ["0", "1"]  # the last is too small to gain anything
        with weights.used():
            pass
        assert overridden(model) == ["0", "1"]
    assert overridden(model) == []
    with pytest.raises(ZeroDivisionError), weights.used():
        1 / 0  # noqa: B018
    assert overridden(model) == []


@torch.no_grad()
def test_a_weight_that_changed_is_rearranged_again():
    model, states = layers(), torch.randn(5, 300)
    weights = PrepackedWeights(model)
    with weights.used():
        model(states)
    model[0].weight.mul_(2.0)  # in place
    model[1].weight = torch.nn.Parameter(torch.randn(300, 400))  # another tensor
    own = model(states)
    with weights.used():
        assert torch.allclose(model(states), own, atol=1e-5)


def test_other_layers_stay_as_they_are(monkeypatch):
    half = layers(torch.bfloat16)
    with PrepackedWeights(half).used():
        assert overridden(half) == []

    class Own(torch.nn.Linear):
        def forward(self, states):
            return 2 * super().forward(states)

    hooked = torch.nn.Linear(300, 300)
    hooked.forward = lambda states: states
    mixed = torch.nn.Sequential(Own(300, 300), hooked)
    with PrepackedWeights(mixed).used():
        assert overridden(mixed) == ["1"] and mixed(torch.ones(300)).shape == (300,)
    assert overridden(mixed) == ["1"]


def test_without_the_memory_for_it_there_is_no_copy(monkeypatch):
    model = layers()
    size = 4 * (300 * 400 + 400 * 300)
    monkeypatch.setattr(prepacked, "free_bytes", lambda device: 4 * size - 1)
    with PrepackedWeights(model).used():
        assert overridden(model) == []
    monkeypatch.setattr(prepacked, "free_bytes", lambda device: 4 * size)
    with PrepackedWeights(model).used():
        assert overridden(model) == ["0", "1"]


@pytest.fixture(scope="module")
def parts(tiny_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    return build("llama", vocab_size=len(tokenizer)), tokenizer


@pytest.fixture
def used(monkeypatch):
    calls = []
    original = PrepackedWeights.used

    def watched(self):
        calls.append(self)
        return original(self)

    monkeypatch.setattr(PrepackedWeights, "used", watched)
    return calls


def ask(kind, *arguments):
    from lm_eval.api.instance import Instance

    return Instance(kind, {}, arguments, 0, metadata=("task", 0, 1))


def test_answers_are_computed_with_it(parts, used):
    model, tokenizer = copy.deepcopy(parts[0]), parts[1]
    lm = kvacc.KvaccLM(pretrained=model, tokenizer=tokenizer)
    assert used == []
    lm.loglikelihood([ask("loglikelihood", "one two", " three")])
    assert len(used) == 1
    lm.generate_until([ask("generate_until", "one two", {"max_gen_toks": 2})])
    assert len(used) > 1
    used.clear()
    lm.prepack_weights = False
    lm.loglikelihood([ask("loglikelihood", "one two", " three")])
    lm.generate_until([ask("generate_until", "one two", {"max_gen_toks": 2})])
    assert used == []
    with pytest.raises(KvaccError, match="prepack_weights 'no' is neither true nor false"):
        kvacc.KvaccLM(pretrained=model, tokenizer=tokenizer, prepack_weights="no")


def test_what_is_measured_is_measured_without_it(used):
    """Latency and memory are those of the model as PyTorch runs it."""
    from kvacc.engine.wrapped import WrappedModel

    wrapped = WrappedModel(build("llama"))
    decoder = make_decoder(wrapped, make_strategy("h2o", 0.5), 4, 1)
    decoder.prefill(torch.tensor([[3, 4, 5, 6]]), None)
    assert used == []


def test_without_memory_for_one_copy_no_layer_is_changed(monkeypatch):
    model = layers()
    original, made = prepacked._rearranged, []

    def rearranged(module):
        if made:
            raise MemoryError
        made.append(module)
        return original(module)

    monkeypatch.setattr(prepacked, "_rearranged", rearranged)
    with pytest.raises(MemoryError), PrepackedWeights(model).used():
        raise AssertionError("must not be reached")
    assert overridden(model) == []
