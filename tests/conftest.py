"""Settings and fixtures for every test: no network, no surprises from the user's environment."""

from __future__ import annotations

import os

# Before anything imports huggingface_hub, which reads them once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("KVACC_DATA_DIR", None)
os.environ.pop("COLUMNS", None)  # set by pytest-xdist to the terminal's width
# The tests run in several processes, and tiny models are slower on several threads than on one.
for threads in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(threads, "1")

import pytest  # noqa: E402
from tiny import tiny_llama  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def tiny_model():
    """Shared by all tests: do not change it."""
    return tiny_llama()


@pytest.fixture(scope="session")
def skewing_folder(tmp_path_factory):
    """Rotations of tiny models are kept in a temporary folder, not in the user's cache."""
    import functools

    from kvacc.engine import wrapped

    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("skewing")
        patch.setattr(wrapped, "skewing_for", functools.partial(wrapped.skewing_for, folder=folder))
        yield folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A checkpoint folder of the tiny model with a byte-level tokenizer, as save_pretrained writes it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_llama(vocab_size=len(vocabulary), max_position_embeddings=2048).save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_folder():
    """The embedded model's checkpoint (for tests marked slow: converting it takes half a minute)."""
    from kvacc.embedded_model import EMBEDDED, checkpoint
    from kvacc.errors import KvaccError

    try:
        return checkpoint(EMBEDDED["smollm2-135m"])
    except KvaccError as error:
        pytest.skip(str(error))
