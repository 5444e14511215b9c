"""A sweep in a process that can be killed, for tests of what is left behind.

Importing lm-eval takes seconds, so fifty sweeps are forked from one process that has
imported it already (multiprocessing's fork server).
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import runpy
import signal
import sys
from pathlib import Path

PRELOADED = [
    "lm_eval.evaluator",
    "kvacc.sweep",
    "kvacc.evaluation",
    "kvacc.engine.scoring",
    "pyarrow.parquet",
    "datasets",
    "rich.console",
]
_BACKEND = Path(__file__).with_name("fake_backend.py")


def context() -> multiprocessing.context.ForkServerContext:
    """Where sweeps are started from; the first start imports, the others only fork."""
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(PRELOADED)
    return forkserver


def sweep(settings: dict, folder: str, seconds_per_cell: float = 0.0, die_at: int | None = None,
          extend: bool = False, count_into: str | None = None) -> None:  # fmt: skip
    """Run a sweep with the backend that needs no model.

    Args:
        settings: what a configuration file says.
        folder: the run's folder.
        seconds_per_cell: how long the backend takes.
        die_at: kill this process (SIGKILL) just before its operation of this number, from 1, on
            a file below ``folder``.
        count_into: file that gets the number of such operations when the sweep is done.
    """
    from rich.console import Console

    import kvacc.evaluation
    from kvacc.config import config_from
    from kvacc.sweep import run_sweep

    # What was imported before the fork needs no collection, which would copy its memory.
    gc.freeze()
    fake = runpy.run_path(str(_BACKEND))["FakeLM"]
    kvacc.evaluation.fingerprint_of = lambda lm, spec: {"name": spec.model.pretrained}
    config = config_from(settings)
    operations = _count_operations(folder, die_at)
    # Progress is of no interest, and a closed terminal must not matter.
    console = Console(file=io.StringIO())
    run_sweep(
        config,
        folder,
        console=console,
        extend=extend,
        load_model=lambda model, config: fake(seconds_per_cell),
    )
    if count_into is not None:
        Path(count_into).write_text(str(operations[0]))


def _count_operations(folder: str, die_at: int | None) -> list[int]:
    """Python reports every opening, renaming, linking, making and deleting before it happens."""
    count = [0]

    def hook(event: str, arguments: tuple) -> None:
        if (event == "open" or event.startswith(("os.", "shutil."))) and any(
            isinstance(part, str | os.PathLike) and str(part).startswith(folder) for part in arguments
        ):
            count[0] += 1
            if count[0] == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return count
