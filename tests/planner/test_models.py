"""Models by their configurations, and parameters counted without weights."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from kvacc.errors import KvaccError
from kvacc.planner.models import (
    find_model,
    packaged_models,
    parameters_on_device,
    planned_model,
)


@pytest.mark.parametrize("name", packaged_models())
def test_packaged_configurations_have_the_published_parameters(name):
    assert find_model(name).parameters.total == packaged_models()[name]["parameters"]


def test_parameters_by_hand():
    # Llama 3.1 8B: two embeddings; each layer's attention (8 of 32 heads have keys), feed-forward, norms.
    embedding = 128_256 * 4096
    layer = 4096 * (4096 + 2 * 8 * 128 + 4096) + 3 * 4096 * 14_336 + 2 * 4096
    found = find_model("llama-3.1-8b").parameters
    assert found.total == 2 * embedding + 32 * layer + 4096 == 8_030_261_248
    assert (found.embedding, found.output) == (embedding, embedding)
    assert found.matrices == embedding + 32 * (layer - 2 * 4096)


def test_tied_embeddings_are_read_by_the_output():
    found = find_model("opt-6.7b").parameters
    assert (found.embedding, found.output) == (0, 50_272 * 4096)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13), ("qwen3-30b-a3b", 3.04), ("mixtral-8x7b", 12.75)],
)
def test_active_parameters(name, billions):
    # gpt-oss: as published, where the output embedding counts and the input embedding does not. The
    # others' published numbers (3.3 and 12.9) count both.
    assert find_model(name).active_parameters / 1e9 == pytest.approx(billions, abs=0.006)


def test_a_dense_model_is_all_active_but_its_input_embedding():
    model = find_model("llama-3.1-8b")
    assert model.active_parameters == model.parameters.total - model.parameters.embedding


def test_parameters_of_one_of_several_devices():
    model = find_model("llama-3.1-8b")
    assert parameters_on_device(model, 1) == model.parameters.total
    norms, kv = 65 * 4096, 32 * 2 * 4096 * 1024
    rest = model.parameters.total - norms - kv
    assert parameters_on_device(model, 8) == norms + kv // 8 + rest // 8
    assert parameters_on_device(model, 16) == norms + kv // 8 + rest // 16  # 8 KV heads, each stored twice


def test_fused_projections_are_divided_as_separate_ones_are():
    phi = find_model("phi-4")  # queries, keys and values in one matrix
    kv = 40 * 5120 * 2 * 10 * 128
    norms = 81 * 5120
    rest = phi.parameters.total - norms - kv
    assert parameters_on_device(phi, 20) == norms + kv // 10 + rest // 20


def test_where_models_are_found(tmp_path):
    settings = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    by_folder, by_file = find_model(str(tmp_path)), find_model(str(tmp_path / "config.json"))
    assert by_folder.parameters == by_file.parameters
    assert by_folder.origin == "folder" and by_file.origin == "file"
    assert find_model("meta-llama/llama-3.1-8B").origin == "packaged with kvacc: meta-llama/Llama-3.1-8B"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "has no model_type"),
        ("{}", "has no model_type"),
        ('{"model_type": "lama"}', "lama"),
    ],
)
def test_bad_files(tmp_path, content, message):
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(KvaccError, match=message):
        find_model(str(file))


def test_unknown_models():
    with pytest.raises(KvaccError, match=r"unknown model 'llama-3\.1-80b' \(did you mean 'llama-3\.1-8"):
        find_model("llama-3.1-80b")
    with pytest.raises(KvaccError, match="there is no such file"):
        find_model("nowhere/config.json")


def test_no_language_model():
    with pytest.raises(KvaccError, match="cannot build a language model"):
        planned_model(AutoConfig.for_model("t5", num_layers=1, num_decoder_layers=1))
