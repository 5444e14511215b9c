"""Where a result came from: versions, hardware, and the commit of kvacc itself."""

from __future__ import annotations

import contextlib
import functools
import platform
import subprocess
from pathlib import Path

from kvacc.results import EnvironmentRecord


def environment_of(device: str) -> EnvironmentRecord:
    """Versions and hardware of a run on ``device``, such as ``cpu`` or ``cuda:0``."""
    import lm_eval
    import torch
    import transformers

    import kvacc

    if device.startswith("cuda"):
        device = f"{device} ({torch.cuda.get_device_name(device)})"
    else:
        device = f"{device}, {torch.get_num_threads()} threads"
    return EnvironmentRecord(
        kvacc=kvacc.__version__,
        torch=torch.__version__,
        transformers=transformers.__version__,
        lm_eval=lm_eval.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        processor=_processor(),
        device=device,
        commit=_commit(),
    )


@functools.cache
def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@functools.cache
def _commit() -> str | None:
    """The commit of kvacc's own checkout; ``+changes`` when files differ from it."""
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(here.parent), *arguments],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    # Installed below somebody else's checkout, this file is not tracked there.
    if git("ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = git("rev-parse", "HEAD")
    return f"{commit}+changes" if commit and git("status", "--porcelain", "--untracked-files=no") else commit
