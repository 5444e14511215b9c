"""Time to the first token, and time per output token, on the step path.

A request is a prompt read and tokens made after it, each the most likely one, chosen on the
device. On CUDA an event is recorded after each token and the device is waited for once, at
the end; so timing does not slow down what is timed. Elsewhere the processor's clock is read.
"""

from __future__ import annotations

import contextlib
import gc
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from kvacc.probes.decoder import Decoder, step_path_only
from kvacc.probes.intervals import distribution
from kvacc.probes.records import LatencyRecord


@dataclass
class Timings:
    """What was timed of one case.

    Attributes:
        first: seconds to the first token, for each run.
        later: seconds between the tokens after it, [runs][tokens - 1].
    """

    first: list[float] = field(default_factory=list)
    later: list[list[float]] = field(default_factory=list)

    def record(self, batch: int, warmup: int, clock: str, seed: int) -> LatencyRecord:
        """Medians and intervals of all runs."""
        totals = [first + sum(later) for first, later in zip(self.first, self.later, strict=True)]
        tokens = batch * (1 + len(self.later[0]))
        return LatencyRecord(
            time_to_first_token=distribution([[first] for first in self.first], seed),
            time_per_output_token=distribution(self.later, seed) if self.later[0] else None,
            tokens_per_second=distribution([[tokens / total] for total in totals], seed),
            warmup=warmup,
            clock=clock,
        )


@dataclass(frozen=True)
class TimedCase:
    """A case as the stopwatch sees it.

    Attributes:
        make: a fresh decoder; not timed.
        prompts: long [B, n] on the device.
        output_tokens: tokens to make, the first included.
        chunk: tokens per prefill pass; None is all.
    """

    make: Callable[[], Decoder]
    prompts: torch.Tensor
    output_tokens: int
    chunk: int | None = None


class Clock(ABC):
    """Marks moments; says afterwards how much time lies between them."""

    name: str

    @abstractmethod
    def mark(self) -> None:
        """Now, in the order of the work that was given to the device."""

    @abstractmethod
    def between(self) -> list[float]:
        """Seconds between each mark and the next; waits for the device."""


class ProcessorClock(Clock):
    """The processor's monotonic clock, where work is done when the call returns."""

    name = "time.perf_counter"

    def __init__(self) -> None:
        self.marks: list[float] = []

    def mark(self) -> None:
        self.marks.append(time.perf_counter())

    def between(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.marks, self.marks[1:], strict=False)]


class CudaClock(Clock):
    """Events in the stream of the work, read after all of it is done."""

    name = "CUDA events"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events: list[torch.cuda.Event] = []
        torch.cuda.synchronize(device)

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self.events.append(event)

    def between(self) -> list[float]:
        torch.cuda.synchronize(self.device)
        pairs = zip(self.events, self.events[1:], strict=False)
        return [earlier.elapsed_time(later) / 1000 for earlier, later in pairs]


def clock_for(device: torch.device) -> Clock:
    """A fresh clock for work on ``device``."""
    return CudaClock(device) if device.type == "cuda" else ProcessorClock()


def time_request(case: TimedCase) -> tuple[float, list[float]]:
    """Seconds to the first token, and between each token and the next.

    Raises:
        KvaccError: something would have used the parallel path.
    """
    with step_path_only(), _collector_off():
        decoder = case.make()
        clock = clock_for(case.prompts.device)
        clock.mark()
        token = decoder.prefill(case.prompts, case.chunk).argmax(-1)
        clock.mark()
        for _ in range(case.output_tokens - 1):
            token = decoder.step(token).argmax(-1)
            clock.mark()
        first, *later = clock.between()
    return first, later


def order_of_repeat(size: int, repeat: int, seed: int) -> list[int]:
    """The order in which ``size`` cases take their turns: another one in each repeat, so that no
    case always follows the same one, and the same for a seed."""
    order = list(range(size))
    random.Random(f"{seed}:{repeat}").shuffle(order)
    return order


def time_in_turns(
    cases: Sequence[TimedCase],
    repeats: int,
    warmup: int,
    seed: int,
    failed: Callable[[int, Exception], None],
    advance: Callable[[], None] = lambda: None,
) -> list[Timings | None]:
    """Time every case ``repeats`` times, in turns.

    Args:
        warmup: runs of each case before, which do not count: caches are filled, kernels compiled.
        failed: told of a case that raised, by its place; it is then left out, and what it did
            does not count. May raise what it does not take for a case's own failure.
        advance: called after each run.

    Returns:
        For each case its timings; None where it failed.
    """
    timings: list[Timings | None] = [Timings() for _ in cases]
    for repeat in range(-warmup, repeats):
        for place in order_of_repeat(len(cases), repeat, seed):
            if timings[place] is None:
                continue
            try:
                first, later = time_request(cases[place])
            except Exception as error:
                timings[place] = None
                failed(place, error)
                continue
            finally:
                advance()
            if repeat >= 0:
                timings[place].first.append(first)
                timings[place].later.append(later)
    return timings


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """Python's garbage collector runs before, and not while time is taken."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
