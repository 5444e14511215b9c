"""Loading models and tokenizers: any Hugging Face decoder by name or folder, or an alias.

Whatever goes wrong while loading (gated, missing, unsupported, no network, damaged files)
becomes one :class:`KvaccError` line that says what to do about it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvacc.embedded_model import EMBEDDED, checkpoint, file_sha256, read_record
from kvacc.errors import KvaccError, nearest, unknown

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LM_EVAL_DEFAULT_DEVICE = "cuda:0"
"""lm-eval's command line passes it on when nobody named a device, so it is no wish for one."""

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class KnownModel:
    """A line of ``kvacc models list``: models that kvacc's examples use, not all that work."""

    name: str
    parameters: str
    origin: str
    """``embedded`` (comes through pip) or ``hub``."""
    note: str


KNOWN_MODELS = (
    KnownModel("smollm2-135m", "135 M", "embedded", "needs no hub; SmolLM2-135M-Instruct, Q4_1 dequantised"),
    KnownModel("HuggingFaceTB/SmolLM2-135M", "135 M", "hub", "open; the base model in full precision"),
    KnownModel("HuggingFaceTB/SmolLM2-1.7B", "1.7 B", "hub", "open"),
    KnownModel("Qwen/Qwen3-0.6B", "0.6 B", "hub", "open"),
    KnownModel("Qwen/Qwen3-8B", "8 B", "hub", "open; GPU"),
    KnownModel("mistralai/Mistral-7B-v0.3", "7 B", "hub", "GPU"),
    KnownModel("meta-llama/Llama-3.1-8B", "8 B", "hub", "gated: accept its licence, `hf auth login`; GPU"),
    KnownModel("facebook/opt-6.7b", "6.7 B", "hub", "open; the H2O and InfiniGen papers' family; GPU"),
)


def resolve(pretrained: str) -> str:
    """Folder of an alias' checkpoint, made when needed; anything else unchanged."""
    model = EMBEDDED.get(pretrained)
    return str(checkpoint(model)) if model else pretrained


def default_device() -> str:
    """``cuda`` when there is one, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def resolve_device(device: str | None) -> str:
    """``device``, or the default one for None or ``auto``; for lm-eval's default device too,
    where there is no CUDA at all.

    Raises:
        KvaccError: not a device, or one that this machine lacks.
    """
    import torch

    if device is None or device == "auto":
        return default_device()
    try:
        kind = torch.device(device)
    except RuntimeError:
        raise KvaccError(f"device {device!r} is not a device; give cpu, cuda, cuda:N or auto") from None
    if device == LM_EVAL_DEFAULT_DEVICE and not torch.cuda.is_available():
        return default_device()
    if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
        raise KvaccError(
            f"device {device!r} is not on this machine (CUDA devices found: {torch.cuda.device_count()}); "
            "leave device out to use what there is"
        )
    return device


def resolve_dtype(dtype: str | torch.dtype | None, device: str) -> str | torch.dtype:
    """What to hand to ``from_pretrained``. None means float32 on a CPU, where half precision
    is slow and coarse, and the checkpoint's own type elsewhere."""
    import torch

    if dtype is None:
        return torch.float32 if device == "cpu" else "auto"
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    return getattr(torch, dtype)


def load_model(
    pretrained: str,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    device_map: str | dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
    attn_implementation: str = "sdpa",
) -> PreTrainedModel:
    """The model in evaluation mode, on its device. Safetensors files are preferred.

    Args:
        pretrained: hub name, folder, GGUF file, or alias (``kvacc models list``).
        revision: branch, tag or commit on the hub.
        dtype: one of :data:`DTYPES`; None is float32 on a CPU, else the checkpoint's own.
        device: None takes CUDA when there is one; ignored when ``device_map`` is given.
        device_map: as in transformers: ``auto`` spreads a model over devices.
        trust_remote_code: run Python code that comes with the checkpoint.
        gguf_file: a GGUF file inside ``pretrained``.

    Raises:
        KvaccError: the model cannot be loaded; the message says what to do.
    """
    device = resolve_device(device)
    where, files = _source(pretrained, revision, trust_remote_code, gguf_file)
    options: dict[str, Any] = {"attn_implementation": attn_implementation}
    options["dtype"] = resolve_dtype(dtype, device)
    if device_map is not None:
        options["device_map"] = device_map
    with _explained(pretrained, revision), _without_progress_bars():
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(where, **files, **options)
        if device_map is None:
            model = model.to(device)
    return model.eval()


def load_tokenizer(
    pretrained: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
) -> PreTrainedTokenizerBase:
    """The model's tokenizer; arguments and errors as :func:`load_model`."""
    where, files = _source(pretrained, revision, trust_remote_code, gguf_file)
    with _explained(pretrained, revision):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(where, **files)


def fingerprint(model: PreTrainedModel, pretrained: str | None = None) -> dict[str, Any]:
    """What exactly was run, so that results of two models are not mixed. Files above 4 GiB are
    hashed by their size and ends only, so a change in their middle goes unnoticed.

    Keys: ``name``; ``revision`` (the hub's commit, else None); ``content`` (hash of the
    checkpoint's files, or of the parameters of a model that came from neither hub nor
    folder; None with a commit); ``dtype``; ``architecture``; ``parameters`` (their
    number); ``quantization`` (method, else None).
    """
    name = pretrained or model.config.name_or_path or "in memory"
    commit = getattr(model.config, "_commit_hash", None)
    quantization = getattr(model.config, "quantization_config", None)
    method = getattr(quantization, "quant_method", None)
    return {
        "name": str(name),
        "revision": commit,
        "content": None if commit else _content(model, str(name)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "architecture": type(model).__name__,
        "parameters": model.num_parameters(),
        "quantization": None if method is None else str(getattr(method, "value", method)),
    }


_HASHED_WHOLE = 4 * 2**30
"""Bytes of weight files up to which all of them are hashed (a few seconds)."""
_SAMPLE = 2**20


def _content(model: PreTrainedModel, name: str) -> str:
    """Hash that names the weights: of a converted checkpoint's source, of a folder's
    files, or of the parameters in memory."""
    folder = Path(name).expanduser()
    if name in EMBEDDED:
        # Reading config.name_or_path rather than making the checkpoint: the model is loaded already.
        folder = Path(model.config.name_or_path)
    record = read_record(folder)
    if record:
        return f"gguf-sha256:{record['source_sha256']}:v{record['conversion_version']}"
    if folder.is_file():
        return f"sha256:{file_sha256(folder)}"
    endings = {".safetensors", ".bin", ".gguf"}
    files = sorted(file for file in folder.glob("*") if file.suffix in endings) if folder.is_dir() else []
    if files:
        return _files_hash(files)
    return _parameters_hash(model)


def _files_hash(files: list[Path]) -> str:
    digest = hashlib.sha256()
    sampled = sum(file.stat().st_size for file in files) > _HASHED_WHOLE
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        if not sampled:
            digest.update(file_sha256(file).encode())
            continue
        # Hashing a large model whole would take as long as loading it: its two ends
        # (the header and the last tensors) tell checkpoints apart.
        with file.open("rb") as content:
            digest.update(content.read(_SAMPLE))
            content.seek(max(0, size - _SAMPLE))
            digest.update(content.read(_SAMPLE))
    return f"{'sampled-' if sampled else ''}sha256:{digest.hexdigest()}"


def _parameters_hash(model: PreTrainedModel) -> str:
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:".encode())
        plain = tensor.detach().cpu().contiguous()
        # A view as bytes, because NumPy has no bfloat16; scalars have no last dimension to view.
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"parameters-sha256:{digest.hexdigest()}"


def _source(
    pretrained: str, revision: str | None, trust_remote_code: bool, gguf_file: str | None
) -> tuple[str, dict[str, Any]]:
    """Where to load from, and the keyword arguments that say which files."""
    where = resolve(pretrained)
    path = Path(where).expanduser()
    if path.is_file() and path.suffix == ".gguf" and gguf_file is None:
        path, gguf_file = path.parent, path.name
    elif path.is_file():
        raise KvaccError(f"model {pretrained!r} is a file; give the folder that it lies in")
    elif not path.exists() and _looks_like_path(where):
        raise KvaccError(f"model {pretrained!r}: there is no such folder; give a folder with a config.json")
    files: dict[str, Any] = {"trust_remote_code": bool(trust_remote_code)}
    if path.is_dir():
        where = str(path)
        if gguf_file is not None and not (path / gguf_file).is_file():
            there = [file.name for file in path.glob("*.gguf")]
            raise KvaccError(
                f"gguf_file {gguf_file!r} is not in {where!r}{nearest(gguf_file, there)}; "
                f"GGUF files there: {', '.join(sorted(there)) or 'none'}"
            )
        if gguf_file is None and not (path / "config.json").is_file():
            raise KvaccError(
                f"model folder {where!r} has no config.json; give the folder that save_pretrained wrote, "
                "or gguf_file for a GGUF file in it"
            )
    if revision is not None:
        files["revision"] = revision
    if gguf_file is not None:
        files["gguf_file"] = gguf_file
    return where, files


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1


@contextlib.contextmanager
def _explained(pretrained: str, revision: str | None) -> Iterator[None]:
    """Turns what transformers and the hub raise while loading into one clear line."""
    try:
        yield
    except KvaccError:
        raise
    except Exception as error:
        message = _explanation(error, pretrained, revision)
        if message is None:
            raise
        raise KvaccError(message) from error


def _explanation(error: Exception, pretrained: str, revision: str | None) -> str | None:
    """What to do about ``error``; None when it is not one that a user can mend.

    Exceptions of the hub are recognised by class name, because transformers wraps them
    in OSError and keeps them as the cause.
    """
    kinds, text = _chain(error)
    names = [known.name for known in KNOWN_MODELS]
    close = "" if pretrained in names else nearest(pretrained, names)
    model = f"model {pretrained!r}"
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]

    if "GatedRepoError" in kinds or "gated repo" in text:
        return f"{model} is gated: accept its licence on its hub page, then run `hf auth login` and try again"
    if "RevisionNotFoundError" in kinds:
        return f"{model} has no revision {revision!r}; give a branch, tag or commit from its hub page"
    if "RepositoryNotFoundError" in kinds:
        return (
            f"{model} is not on the hub{close}; check the name, or run `hf auth login` if it is private; "
            "`kvacc models list` shows names that work"
        )
    if "HFValidationError" in kinds:
        return f"{model} is neither a folder nor a hub name like owner/name{close}"
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectTimeout"}:
        return (
            f"{model} is not in the local cache and the hub cannot be reached{close}; "
            "give a local folder, or use the alias smollm2-135m, which needs no hub"
        )
    if "trust_remote_code=True" in text or "contains custom code" in text:
        return f"{model} brings its own Python code; read it, and if you trust it set trust_remote_code=true"
    if "does not recognize this architecture" in text or "Unrecognized model" in text:
        kind = _between(text, "model type `", "`")
        named = f" (model_type {kind!r})" if kind else ""
        return (
            f"{model} is of a kind that this transformers does not know{named}; "
            "try `pip install -U transformers`"
        )
    if "Unrecognized configuration class" in text:
        return f"{model} is not a decoder-only language model, which is what kvacc evaluates"
    if "FlashAttention" in text or "flash_attn" in text:
        return (
            f"{model}: attn_implementation flash_attention_2 needs flash-attn and a CUDA device; "
            "leave it out (sdpa), or see `kvacc doctor`"
        )
    if isinstance(error, ImportError):
        return f"{model} needs a package that is not installed: {first_line}"
    if "SafetensorError" in kinds or "JSONDecodeError" in kinds or "UnpicklingError" in kinds:
        return f"{model}: a file of the checkpoint is damaged ({first_line}); download or save it again"
    if "OutOfMemoryError" in kinds:
        return (
            f"{model} does not fit into the device's memory; try dtype bfloat16, device_map auto "
            "or a smaller model"
        )
    if isinstance(error, OSError):
        return f"{model} cannot be loaded: {first_line}"
    return None


def _chain(error: BaseException) -> tuple[set[str], str]:
    """Class names (base classes too) and texts of an exception and what led to it."""
    kinds: set[str] = set()
    texts: list[str] = []
    link: BaseException | None = error
    while link is not None and len(texts) < 20:
        kinds.update(cls.__name__ for cls in type(link).__mro__)
        texts.append(str(link))
        link = link.__cause__ or link.__context__
    return kinds, "\n".join(texts)


def _between(text: str, before: str, after: str) -> str:
    _, found, rest = text.partition(before)
    return rest.partition(after)[0] if found else ""


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Silences transformers' bar of loaded weights; the hub's download bars stay."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
