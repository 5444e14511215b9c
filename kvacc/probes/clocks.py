"""Clock rates of a device now, where the system tells them: they explain drift."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

_PROCESSORS = Path("/proc/cpuinfo")


def clock_rates(device: str) -> str | None:
    """``SM 1980 MHz``, or ``2 processors at 2600 MHz``; None where nobody tells."""
    return _of_cuda(device) if device.startswith("cuda") else _of_processors()


def _of_cuda(device: str) -> str | None:
    import torch

    # Needs NVIDIA's management library and its Python package; without them nothing is known.
    with contextlib.suppress(Exception):
        return f"SM {torch.cuda.clock_rate(torch.device(device))} MHz"
    return None


def _of_processors() -> str | None:
    try:
        text = _PROCESSORS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    rates = [round(float(rate)) for rate in re.findall(r"^cpu MHz\s*:\s*([0-9.]+)", text, re.MULTILINE)]
    if not rates:
        return None
    spread = f"{min(rates)}" if min(rates) == max(rates) else f"{min(rates)} to {max(rates)}"
    return f"{len(rates)} processors at {spread} MHz"
