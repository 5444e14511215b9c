"""What a person sees while a sweep runs: bars on a terminal, plain lines in a log.

Cells differ a lot in cost, so time left is reckoned in *work*: any unit that grows
with the tokens to read, the same for all cells of a sweep.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

PLAIN_INTERVAL_S = 5.0


class SweepProgress:
    """Shows cells, requests of the current cell, and time left.

    Args:
        console: where to show; bars if it is a terminal, else a line every few seconds.
        cells: number of cells to compute.
        work: their work in total.
    """

    def __init__(self, console: Console, cells: int, work: float) -> None:
        self.console, self.cells, self.work = console, cells, max(work, 1e-9)
        self.finished_cells, self.finished_work = 0, 0.0
        self.label, self.cell_work, self.share = "", 0.0, 0.0
        self.began = self.last_line = time.monotonic()
        self.bars: Progress | None = None
        self.all_bar: Any = None
        self.cell_bar: Any = None

    def __enter__(self) -> SweepProgress:
        self.began = self.last_line = time.monotonic()
        if self.console.is_terminal and self.cells:
            self._start_bars()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bars is not None:
            self.bars.stop()

    def say(self, text: str) -> None:
        """A line that stays, above the bars."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def start_cell(self, label: str, work: float) -> None:
        """The next cell begins."""
        self.label, self.cell_work, self.share = label, work, 0.0
        if self.bars is not None:
            self.bars.reset(self.cell_bar, total=None, description=label)
        self._show()

    def requests(self, done: int, total: int) -> None:
        """``done`` of the current cell's ``total`` requests are scored; the backend calls this."""
        self.share = done / total if total else 0.0
        if self.bars is not None:
            self.bars.update(self.cell_bar, completed=done, total=total)
        elif time.monotonic() - self.last_line >= PLAIN_INTERVAL_S:
            self.last_line = time.monotonic()
            left = self.seconds_left()
            tail = "" if left is None else f", about {as_duration(left)} left"
            self.say(f"[{self.finished_cells + 1}/{self.cells}] {self.label}: {done}/{total} requests{tail}")
        self._show()

    def finish_cell(self, outcome: str) -> None:
        """The current cell is done; ``outcome`` says how it went, in a few words."""
        self.finished_cells += 1
        self.finished_work += self.cell_work
        self.cell_work = self.share = 0.0
        self.last_line = time.monotonic()
        self.say(f"[{self.finished_cells}/{self.cells}] {self.label}: {outcome}")
        self._show()

    def seconds_left(self) -> float | None:
        """Time left at the pace so far; None before there is a pace."""
        done = self.finished_work + self.share * self.cell_work
        if done <= 0:
            return None
        return (time.monotonic() - self.began) * (self.work - done) / done

    def _start_bars(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            transient=True,
        )
        self.all_bar = self.bars.add_task("all cells", total=self.cells, left="")
        self.cell_bar = self.bars.add_task("", total=None, left="")
        self.bars.start()

    def _show(self) -> None:
        if self.bars is None:
            return
        left = self.seconds_left()
        shown = "" if left is None else f"about {as_duration(left)} left"
        self.bars.update(self.all_bar, completed=self.finished_cells, left=shown)


def as_duration(seconds: float) -> str:
    """``4.2 s``, ``45 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


@contextlib.contextmanager
def reporting(lm: Any, progress: SweepProgress):
    """Let the backend report its requests to ``progress``."""
    lm.progress = progress.requests
    try:
        yield
    finally:
        lm.progress = None
