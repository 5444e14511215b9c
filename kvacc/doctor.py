"""What this machine can do for kvacc, and what to do about what it cannot.

Every check stands alone: one that fails becomes a line of the report, never an exception.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30

PACKAGES = (
    "torch",
    "transformers",
    "lm-eval",
    "datasets",
    "accelerate",
    "pyarrow",
    "duckdb",
    "pydantic",
    "altair",
)

DATA_DIR_VARIABLE = "KVACC_DATA_DIR"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    state: str
    """``ok``; ``absent`` (optional, kvacc works without); ``problem`` (something will fail)."""
    finding: str
    mend: str = ""

    def as_dict(self) -> dict[str, str]:
        return dataclasses.asdict(self)


def examine(data_dir: str | None = None) -> list[Finding]:
    """Every check, in the order in which a newcomer needs them.

    Args:
        data_dir: folder with benchmark documents; None takes ``KVACC_DATA_DIR``.
    """
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _packages,
        _devices,
        _memory,
        _numba,
        _triton,
        _prepacked_weights,
        _flash_attention,
        _embedded_model,
        _cache_folder,
        lambda: _data_folder(data_dir),
        _hub,
        _backend,
    )
    findings: list[Finding] = []
    for check in checks:
        try:
            findings.extend(check())
        except Exception as error:  # noqa: BLE001 - a doctor that dies of the patient's illness helps nobody
            name = getattr(check, "__name__", "data folder").strip("_").replace("_", " ")
            message = (str(error).splitlines() or [""])[0]
            findings.append(Finding(name, "problem", f"{type(error).__name__}: {message}"))
    return findings


def _python() -> Iterator[Finding]:
    from kvacc import __version__

    yield Finding("kvacc", "ok", f"{__version__} in {sys.prefix}")
    yield Finding("Python", "ok", f"{platform.python_version()} on {platform.platform(terse=True)}")


def _packages() -> Iterator[Finding]:
    for name in PACKAGES:
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "problem", "not installed", f"pip install {name}")


def _devices() -> Iterator[Finding]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("CPU", "ok", f"{cores} cores, {torch.get_num_threads()} threads for PyTorch")
    count = torch.cuda.device_count()
    if not count:
        built = "no CUDA device found" if torch.version.cuda else "this PyTorch was built without CUDA"
        yield Finding("GPU", "absent", f"{built}; kvacc runs on the CPU")
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        yield Finding(
            f"GPU {index}",
            "ok",
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{free / GIB:.1f} of {total / GIB:.1f} GiB free",
        )


def _memory() -> Iterator[Finding]:
    free, total = available_memory()
    enough = free > 3 * GIB
    mend = "" if enough else "close other programs; smollm2-135m needs about 3 GiB"
    what = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    yield Finding("memory", "ok" if enough else "problem", what, mend)


def available_memory() -> tuple[int, int]:
    """Bytes of main memory that are free for a new process, and all of it.

    In a container the smaller of its limit and the machine's counts.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    free = page * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        # Free pages alone would leave out what the system holds only as file cache.
        free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None and limit < total:
        total, free = limit, min(free, max(0, limit - used))
    return free, total


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _numba() -> Iterator[Finding]:
    if importlib.util.find_spec("numba") is None:
        mend = "pip install 'kvacc[fast]'"
        finding = "not installed; scoring is slower, results are equal"
        yield Finding("compiled scan (numba)", "absent", finding, mend)
        return
    import numba

    yield Finding("compiled scan (numba)", "ok", numba.__version__)


def _triton() -> Iterator[Finding]:
    import torch

    if not torch.cuda.device_count():
        return  # it serves GPUs only
    if importlib.util.find_spec("triton") is None:
        finding = "not installed; on a GPU strategies that evict are scored by PyTorch operations, slowly"
        yield Finding("compiled scan (Triton)", "absent", finding, "pip install triton")
        return
    yield Finding("compiled scan (Triton)", "ok", importlib.metadata.version("triton"))


def _prepacked_weights() -> Iterator[Finding]:
    import torch

    if torch.backends.mkldnn.is_available():
        yield Finding("prepacked weights (oneDNN)", "ok", "used on the CPU in float32")
    else:
        finding = "this PyTorch was built without oneDNN; the CPU multiplies as PyTorch does by itself"
        yield Finding("prepacked weights (oneDNN)", "absent", finding)


def _flash_attention() -> Iterator[Finding]:
    reason, mend = flash_attention_obstacle()
    if reason is None:
        yield Finding("flash-attn", "ok", importlib.metadata.version("flash-attn"))
    else:
        yield Finding("flash-attn", "absent", f"not usable: {reason}; PyTorch's attention is used", mend)


def flash_attention_obstacle() -> tuple[str | None, str]:
    """Why flash-attn cannot be used here, and what would change that; (None, "") when it can.

    The package is looked up but imported last, since a broken build fails on import.
    """
    import torch

    if not torch.cuda.is_available():
        return "it needs a CUDA device", ""
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"the GPU has compute capability {major}.{minor}, and it needs 8.0", ""
    if importlib.util.find_spec("flash_attn") is None:
        return "it is not installed", "pip install --no-build-isolation flash-attn"
    try:
        importlib.import_module("flash_attn")
    except Exception as error:  # noqa: BLE001 - a binary of another CUDA raises whatever it likes
        message = (str(error).splitlines() or [type(error).__name__])[0]
        return f"its import fails ({message})", "rebuild it for this PyTorch and CUDA"
    return None, ""


def _embedded_model() -> Iterator[Finding]:
    from kvacc.embedded_model import EMBEDDED, converted_folder, is_ready

    for alias, model in EMBEDDED.items():
        what = f"model {alias}"
        if is_ready(model):
            yield Finding(what, "ok", f"ready in {converted_folder(model)}")
        elif importlib.util.find_spec(model.package) is None:
            yield Finding(what, "absent", "not installed", model.install_command)
        elif importlib.util.find_spec("gguf") is None:
            yield Finding(what, "absent", "installed, but gguf is not", model.install_command)
        else:
            yield Finding(what, "ok", f"installed; converted at first use, or by: kvacc models path {alias}")


def _cache_folder() -> Iterator[Finding]:
    from kvacc.embedded_model import cache_dir

    folder = cache_dir()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        mend = "set KVACC_CACHE_DIR to a folder that you may write"
        yield Finding("cache folder", "problem", f"{folder} cannot be written", mend)
        return
    free = shutil.disk_usage(existing).free
    enough = free > 2 * GIB
    finding = f"{folder}, {free / GIB:.0f} GiB free"
    yield Finding("cache folder", "ok" if enough else "problem", finding, "" if enough else "make room")


def _data_folder(data_dir: str | None) -> Iterator[Finding]:
    from kvacc.task_catalog import task_names

    chosen = data_dir or os.environ.get(DATA_DIR_VARIABLE)
    if not chosen:
        mend = f"set {DATA_DIR_VARIABLE} or give --data-dir, or let the hub serve them"
        yield Finding("benchmark folder", "absent", "none given", mend)
        return
    if not Path(chosen).expanduser().is_dir():
        mend = f"correct --data-dir or {DATA_DIR_VARIABLE}"
        yield Finding("benchmark folder", "problem", f"{chosen} is not a folder", mend)
        return
    benchmarks = [info for info in task_names().values() if info.kind == "benchmark"]
    answers = {info.name: info.available(chosen) for info in benchmarks}
    missing = {name: reason for name, (usable, reason) in answers.items() if not usable}
    found = f"{len(answers) - len(missing)} of {len(answers)} benchmarks in {chosen}"
    if not missing:
        yield Finding("benchmark folder", "ok", found)
    else:
        yield Finding("benchmark folder", "problem", found, "; ".join(dict.fromkeys(missing.values())))


def _hub() -> Iterator[Finding]:
    from kvacc.task_catalog import hub_reachable

    reachable, reason = hub_reachable()
    if reachable:
        yield Finding("Hugging Face hub", "ok", reason or "reachable")
    else:
        mend = "use smollm2-135m or a local folder, and kvacc_mini_* tasks or a data folder"
        yield Finding("Hugging Face hub", "absent", f"not reachable: {reason}", mend)


def _backend() -> Iterator[Finding]:
    from lm_eval.api.registry import get_model

    from kvacc import KvaccLM

    registered: Any = get_model("kvacc")
    if registered is KvaccLM:
        yield Finding("lm-eval backend kvacc", "ok", "registered")
    else:
        other = f"the name belongs to {registered.__module__}.{registered.__name__}"
        yield Finding("lm-eval backend kvacc", "problem", other, "uninstall the package that claims it")
