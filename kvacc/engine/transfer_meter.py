"""How long copies between host and device take, and how many were brought ahead."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

Kind = Literal["bring", "bring ahead", "wait", "store"]
"""``bring``: entries to the device, once their layer runs; ``bring ahead``: before it runs;
``wait``: for those; ``store``: new entries to the host pool."""


@dataclass
class TransferMeter:
    """Times the copies of every layer that it is given to (``OffloadedLayer.meter``).

    Where the device works by itself, the time of a stream is taken beside the host's: gathering
    in host memory keeps the thread that starts all work, and copying does not.

    Attributes:
        entries: entries brought, of a deciding head each.
        entries_ahead: of these, brought before their layer ran.
    """

    device: torch.device
    entries: int = 0
    entries_ahead: int = 0
    _host: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def count(self, entries: int, ahead: bool) -> None:
        """``entries`` were brought."""
        self.entries += entries
        self.entries_ahead += entries if ahead else 0

    @contextlib.contextmanager
    def timing(self, kind: Kind) -> Iterator[None]:
        """The block copies, or waits for copies, in the current stream."""
        began, first = time.perf_counter(), self._event()
        yield
        last = self._event()
        self._host[kind] += time.perf_counter() - began
        if first is not None and last is not None:
            self._events.append((kind, first, last))

    def seconds(self) -> tuple[float, float]:
        """(hidden, exposed): time of copies beside computation, and time in which computation
        waited for them. Without a stream of their own all copies are exposed. Waits for the
        device.
        """
        if self.device.type != "cuda":
            return 0.0, sum(self._host.values())
        torch.cuda.synchronize(self.device)
        stream: dict[str, float] = defaultdict(float)
        for kind, first, last in self._events:
            stream[kind] += first.elapsed_time(last) / 1000
        gathering = self._host["bring ahead"]
        exposed = stream["bring"] + stream["store"] + gathering + stream["wait"]
        hidden = max(0.0, stream["bring ahead"] - gathering - stream["wait"])
        return hidden, exposed

    def _event(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
