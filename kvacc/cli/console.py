"""Where commands write their tables."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_WITHOUT_TERMINAL = 180


def make_console(*, stderr: bool = False) -> Console:
    """A rich console. In a file or a pipe, where nobody can widen the window, tables get
    room for all their columns instead of the 80 of an unknown terminal."""
    from rich.console import Console

    console = Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(stderr=stderr, width=WIDTH_WITHOUT_TERMINAL)
    return console
