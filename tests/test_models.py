"""Loading: what works, and one clear line for what does not."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import tiny_llama

from kvacc import models
from kvacc.errors import KvaccError
from kvacc.models import (
    KNOWN_MODELS,
    fingerprint,
    load_model,
    load_tokenizer,
    resolve,
    resolve_device,
    resolve_dtype,
)


def message_of(*args, **kwargs) -> str:
    """The error of a load that must fail, which must be a single line."""
    with pytest.raises(KvaccError) as caught:
        load_model(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_loads_in_evaluation_mode(tiny_folder):
    model = load_model(str(tiny_folder), device="cpu")
    assert not model.training
    assert model.dtype == torch.float32 and model.device.type == "cpu"
    assert model.config._attn_implementation == "sdpa"
    tokenizer = load_tokenizer(str(tiny_folder))
    assert tokenizer.decode(tokenizer("a b")["input_ids"]) == "a b"


def test_a_relative_and_a_home_folder_load(tiny_folder, monkeypatch):
    monkeypatch.chdir(tiny_folder.parent)
    assert load_model(f"./{tiny_folder.name}", device="cpu").config.num_hidden_layers == 2
    monkeypatch.setenv("HOME", str(tiny_folder.parent))
    assert load_tokenizer(f"~/{tiny_folder.name}").eos_token == "</s>"


def test_an_alias_is_its_converted_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "checkpoint", lambda model: tmp_path / model.alias)
    assert resolve("smollm2-135m") == str(tmp_path / "smollm2-135m")
    assert resolve("gpt2") == "gpt2"


def test_dtype_default_depends_on_the_device():
    assert resolve_dtype(None, "cpu") is torch.float32
    assert resolve_dtype(None, "cuda:1") == "auto"
    assert resolve_dtype("bfloat16", "cpu") is torch.bfloat16
    assert resolve_dtype(torch.float16, "cpu") is torch.float16
    with pytest.raises(KvaccError, match="unknown dtype 'floot32' .did you mean 'float32'"):
        resolve_dtype("floot32", "cpu")


def test_dtype_reaches_the_model(tiny_folder):
    assert load_model(str(tiny_folder), dtype="bfloat16", device="cpu").dtype == torch.bfloat16


def test_device_default_and_mistakes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert resolve_device(None) == resolve_device("auto") == "cpu"
    # What lm-eval passes when nobody named a device.
    assert resolve_device("cuda:0") == "cpu"
    with pytest.raises(KvaccError, match="'cuda' is not on this machine"):
        resolve_device("cuda")
    with pytest.raises(KvaccError, match="'gpu' is not a device"):
        resolve_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device(None) == "cuda"
    with pytest.raises(KvaccError, match="CUDA devices found: 1"):
        resolve_device("cuda:1")


def test_device_map_is_passed_on(tiny_folder):
    model = load_model(str(tiny_folder), device_map="cpu")
    assert model.device.type == "cpu"


@pytest.mark.parametrize("name", ["/no/such/folder", "./no-such", "~/no-such-folder", "a/b/c"])
def test_a_missing_folder(name):
    assert "there is no such folder" in message_of(name)


def test_a_folder_without_config(tmp_path):
    message = message_of(str(tmp_path))
    assert "has no config.json" in message and str(tmp_path) in message


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert "give the folder" in message_of(str(tmp_path / "model.safetensors"))


def test_a_wrong_gguf_name_suggests_the_right_one(tmp_path):
    (tmp_path / "model-q4.gguf").write_bytes(b"x")
    message = message_of(str(tmp_path), gguf_file="model-q5.gguf")
    assert "did you mean 'model-q4.gguf'" in message


def write_config(folder, **content):
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


def test_an_unknown_architecture(tmp_path):
    assert "model_type 'nonsense'" in message_of(write_config(tmp_path, model_type="nonsense"))


def test_an_encoder_decoder_model(tmp_path):
    assert "not a decoder-only language model" in message_of(write_config(tmp_path, model_type="t5"))


def test_missing_weights(tmp_path):
    assert "model.safetensors" in message_of(write_config(tmp_path, model_type="llama"))


def test_damaged_weights(tiny_folder, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((tiny_folder / "model.safetensors").read_bytes()[:5])
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    assert "damaged" in message_of(str(tmp_path))


def test_damaged_config(tmp_path):
    (tmp_path / "config.json").write_text("{broken")
    assert "damaged" in message_of(str(tmp_path))


def test_remote_code_is_refused_without_a_question(tmp_path):
    name = write_config(tmp_path, model_type="x", auto_map={"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"})
    assert "set trust_remote_code=true" in message_of(name)


def test_flash_attention_that_is_not_there(tiny_folder):
    if torch.cuda.is_available():
        pytest.skip("flash-attn may be usable here")
    assert "needs flash-attn" in message_of(str(tiny_folder), attn_implementation="flash_attention_2")


def test_no_network(monkeypatch):
    message = message_of("smollm2-135")
    assert "hub cannot be reached" in message
    assert "did you mean 'smollm2-135m'" in message and "alias smollm2-135m" in message
    assert "did you mean" not in message_of("meta-llama/Llama-3.1-8B")


def hub_error(name: str, text: str = "401 Client Error") -> OSError:
    """An error as transformers raises it: OSError, the hub's own as its cause."""
    from huggingface_hub import errors

    cls = getattr(errors, name)
    cause = cls.__new__(cls)
    Exception.__init__(cause, text)
    error = OSError("You are trying to access\nsomething")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("GatedRepoError", "model 'some/model' is gated: accept its licence on its hub page, then run `hf auth login`"),
        ("RepositoryNotFoundError", "is not on the hub"),
        ("RevisionNotFoundError", "has no revision 'v9'"),
        ("LocalEntryNotFoundError", "hub cannot be reached"),
    ],
)
def test_errors_of_the_hub(monkeypatch, name, expected):
    import transformers

    def fail(*args, **kwargs):
        raise hub_error(name)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    assert expected in message_of("some/model", revision="v9")


def test_out_of_memory_says_what_to_try(monkeypatch):
    import transformers

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    assert "device_map auto" in message_of("some/model")


def test_a_defect_keeps_its_traceback(monkeypatch):
    import transformers

    def fail(*args, **kwargs):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ZeroDivisionError):
        load_model("some/model")


def test_tokenizer_errors_are_explained_too(tmp_path):
    with pytest.raises(KvaccError, match="there is no such folder"):
        load_tokenizer(str(tmp_path / "none"))


def test_fingerprint_of_a_folder(tiny_folder):
    model = load_model(str(tiny_folder), device="cpu")
    found = fingerprint(model, str(tiny_folder))
    assert found["architecture"] == "LlamaForCausalLM" and found["dtype"] == "float32"
    assert found["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert found["revision"] is None and found["content"].startswith("sha256:")
    assert found == fingerprint(load_model(str(tiny_folder), device="cpu"), str(tiny_folder))
    json.dumps(found)


def test_fingerprint_changes_with_the_weights(tiny_folder, tmp_path):
    model = tiny_llama()
    before = fingerprint(model)["content"]
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    assert fingerprint(model)["content"] != before
    model.save_pretrained(tmp_path)
    assert fingerprint(model, str(tmp_path))["content"] != fingerprint(model, str(tiny_folder))["content"]


def test_fingerprint_in_half_precision():
    """NumPy has no bfloat16, so the bytes are hashed."""
    assert fingerprint(tiny_llama().to(torch.bfloat16))["content"].startswith("parameters-sha256:")


def test_large_checkpoints_are_sampled(tiny_folder, monkeypatch):
    monkeypatch.setattr(models, "_HASHED_WHOLE", 10)
    found = fingerprint(load_model(str(tiny_folder), device="cpu"), str(tiny_folder))
    assert found["content"].startswith("sampled-sha256:")


def test_fingerprint_of_a_hub_model_is_its_commit():
    model = tiny_llama()
    model.config._commit_hash = "c0ffee"
    found = fingerprint(model, "owner/name")
    assert (found["name"], found["revision"], found["content"]) == ("owner/name", "c0ffee", None)


def test_known_models_name_the_alias_and_the_example():
    names = [model.name for model in KNOWN_MODELS]
    assert names[0] == "smollm2-135m" and "meta-llama/Llama-3.1-8B" in names
    assert len(set(names)) == len(names)
