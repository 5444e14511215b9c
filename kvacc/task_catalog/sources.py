"""Where documents come from: the hub, a data folder, or kvacc itself."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path

DATA_DIR_VARIABLE = "KVACC_DATA_DIR"


class TaskSource(StrEnum):
    """Where a task's documents come from."""

    HUB = "hub"
    FOLDER = "folder"
    EMBEDDED = "embedded"


def data_folder(data_dir: str | Path | None = None) -> Path | None:
    """``data_dir``, else the folder that ``KVACC_DATA_DIR`` names, else None (use the hub)."""
    named = data_dir or os.environ.get(DATA_DIR_VARIABLE)
    return Path(named).expanduser() if named else None


def tasks_folder() -> Path:
    """The folder of kvacc's own task YAMLs."""
    import kvacc.tasks

    return Path(next(iter(kvacc.tasks.__path__)))


def hub_reachable(timeout_s: float = 3) -> tuple[bool, str]:
    """Whether the hub answers, and a reason in words. Honours ``HF_HUB_OFFLINE`` and ``HF_ENDPOINT``."""
    offline = no_network()
    if offline:
        return False, f"{offline} is set"
    import urllib.error
    import urllib.request

    from huggingface_hub import constants

    request = urllib.request.Request(f"{constants.ENDPOINT}/api/datasets/baber/piqa", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s):
            return True, "the hub answers"
    except urllib.error.HTTPError as error:
        return False, f"the hub answers with status {error.code}"
    except (OSError, ValueError) as error:
        return False, f"the hub does not answer: {getattr(error, 'reason', error)}"


def no_network() -> str | None:
    """The environment variable that forbids the network, if one does."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "TRUE", "YES", "ON"):
            return name
    return None
