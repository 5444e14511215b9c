"""The longest prompt and the largest batch that fit in a memory limit, found by trying.

Each try is a real request on the step path: a prefill and at most :data:`STEPS` decoded tokens. It
fails where memory really ends: when a GPU's allocator refuses, or, on a processor, when the
:class:`~kvacc.probes.memory.MemoryMeter` counts more than the limit, so there the answer is the
same on every run. The search grows by large factors, guesses the crossing from the peaks measured
so far, and closes in by bisection.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from kvacc.engine.memory import free_bytes
from kvacc.engine.scoring import is_out_of_memory
from kvacc.errors import KvaccError
from kvacc.probes.cases import PlannedCase
from kvacc.probes.decoder import step_path_only
from kvacc.probes.memory import MemoryMeter
from kvacc.probes.memory_pass import bytes_of_weights
from kvacc.probes.probed_model import ProbedModel
from kvacc.probes.records import CapacityRecord
from kvacc.results import EnvironmentRecord

STEPS = 2
"""Tokens read after the prompt in each try, as far as the case makes so many."""
GRANULARITY = 64
"""Prompts are tried in multiples of these tokens."""
RESOLUTION = 0.01
"""The largest that fits is known to this share of it, or to one unit, whichever is more."""
_GROWTH = 4
_GUESSES = 12
"""Tries after which nothing but bisection is done."""
Searched = Literal["prompt_tokens", "batch"]


def longest_prompt(
    model: ProbedModel,
    planned: PlannedCase,
    *,
    limit: int | None = None,
    most: int | None = None,
    granularity: int = GRANULARITY,
    resolution: float = RESOLUTION,
    case_id: str,
    environment: EnvironmentRecord,
    progress: Callable[[str], None] = lambda text: None,
) -> CapacityRecord:
    """The longest prompt of the case's batch that can be read and decoded after.

    Args:
        planned: the case; its ``prompt_tokens`` are what is searched for.
        limit: bytes of tensors allowed, weights included; None is the GPU's own memory.
        most: longest prompt to try; the model's positions bound it as well.
        granularity: prompts are multiples of these tokens.
        resolution: share of the answer to which it is known, at least.
        case_id, environment: for the record.
        progress: called with a line after each try.

    Raises:
        KvaccError: no limit on a processor, or a case that cannot run at all.
    """
    _require(granularity, resolution, most)
    positions = _positions(model)
    if positions is not None:
        room = positions - _steps(planned)
        if room < 1:
            raise KvaccError(f"the model's {positions} positions leave no room for a prompt")
        most, bound = (room, "context") if most is None or room <= most else (most, "search")
    elif most is None:
        raise KvaccError(
            "the model's configuration sets no longest text, so the search needs most=, a number of tokens"
        )
    else:
        bound = "search"
    search = _Search(model, planned, "prompt_tokens", limit, case_id, environment, progress)
    return search.run(most, min(granularity, most), resolution, bound)


def largest_batch(
    model: ProbedModel,
    planned: PlannedCase,
    *,
    limit: int | None = None,
    most: int | None = None,
    resolution: float = RESOLUTION,
    case_id: str,
    environment: EnvironmentRecord,
    progress: Callable[[str], None] = lambda text: None,
) -> CapacityRecord:
    """The largest batch of prompts of the case's length; arguments as in :func:`longest_prompt`."""
    _require(1, resolution, most)
    model.require_length(planned.case)
    search = _Search(model, planned, "batch", limit, case_id, environment, progress)
    return search.run(most or 2**20, 1, resolution, "search")


def _require(granularity: int, resolution: float, most: int | None) -> None:
    if granularity < 1:
        raise KvaccError(f"granularity {granularity} is not a number of tokens of at least 1")
    if not 0 <= resolution < 1:
        raise KvaccError(f"resolution {resolution!r} is not in [0, 1): 0.01 finds the answer to 1 %")
    if most is not None and most < 1:
        raise KvaccError(f"most {most} leaves nothing to try; give 1 or more")


def _positions(model: ProbedModel) -> int | None:
    found = getattr(model.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found if isinstance(found, int) else None


def _steps(planned: PlannedCase) -> int:
    return min(STEPS, planned.case.output_tokens - 1)


@dataclass
class _Outcome:
    """What happened at one size: its peak, or where memory ended."""

    peak: int | None
    phase: Literal["prefill", "decode"] | None = None

    @property
    def words(self) -> str:
        return f"fits, peak {self.peak:,} bytes" if self.phase is None else f"out of memory in {self.phase}"


@dataclass
class _Search:
    model: ProbedModel
    planned: PlannedCase
    searched: Searched
    limit: int | None
    case_id: str
    environment: EnvironmentRecord
    progress: Callable[[str], None]
    tried: dict[int, _Outcome] = field(default_factory=dict)

    def run(self, most: int, unit: int, resolution: float, at_most: str) -> CapacityRecord:
        """Search sizes up to ``most``, which are multiples of ``unit`` (and ``most`` itself).

        Args:
            at_most: what bounds the answer when ``most`` runs.
        """
        device = self.model.device
        if self.limit is None and device.type != "cuda":
            raise KvaccError(
                f"on {device.type} nothing says when memory ends before the machine is in trouble: give a "
                "memory limit, such as 4GB"
            )
        weights = bytes_of_weights(self.model.model)
        if self.limit is not None and weights > self.limit:
            return self._record(0, None, "weights")
        self.model.decoder(self._at(unit))  # what is prepared once; and what cannot run says so here
        # What the guesses aim at.
        room = self.limit or free_bytes(device) + torch.cuda.memory_allocated(device)
        low, high = 0, None
        while high is None or high - low > max(unit, int(resolution * low)):
            size = self._next(low, high, unit, most, room)
            if self._try(size).phase is None:
                low = size
                if low == most:
                    break
            else:
                high = size
        return self._record(low, high, at_most if high is None else self.tried[high].phase)

    def _next(self, low: int, high: int | None, unit: int, most: int, room: int) -> int:
        """The size to try between one that ran and one that did not."""
        if low == 0 and high is None:
            return unit
        points = [(tried, outcome.peak) for tried, outcome in self.tried.items() if outcome.phase is None]
        guess = _crossing(points, room)
        if high is None:
            size = min(_GROWTH * low, guess or math.inf)
            return min(max(int(size) // unit * unit, low + unit), most)
        # Two points make a line where prefill may grow as a square, and a search must end.
        trusted = guess is not None and len(points) > 2 and len(self.tried) < _GUESSES
        size = guess if trusted and low < guess < high else (low + high) / 2
        return min(max(int(size) // unit * unit, low + unit), high - 1)

    def _at(self, size: int) -> PlannedCase:
        sizes = {self.searched: size, "output_tokens": 1 + _steps(self.planned)}
        return PlannedCase(self.planned.strategy, self.planned.case.model_copy(update=sizes))

    def _try(self, size: int) -> _Outcome:
        outcome = self._ran(self._at(size))
        if outcome.phase is not None:  # the exception's frames may hold tensors in cycles
            gc.collect()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        self.tried[size] = outcome
        self.progress(f"{self.searched} {size:,}: {outcome.words}")
        return outcome

    def _ran(self, planned: PlannedCase) -> _Outcome:
        case, phase = planned.case, "prefill"
        try:
            prompts = self.model.prompts(case.prompt_tokens, case.batch)
            with (
                step_path_only(),
                MemoryMeter(self.model.device, self.limit, held=self.model.model) as meter,
            ):
                decoder = self.model.decoder(planned)
                token = decoder.prefill(prompts, case.prefill_chunk).argmax(-1)
                phase = "decode"
                for _ in range(case.output_tokens - 1):
                    token = decoder.step(token).argmax(-1)
                return _Outcome(meter.peak_bytes)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        return _Outcome(None, phase)

    def _record(self, fits: int, fails: int | None, bound_by: str) -> CapacityRecord:
        return CapacityRecord(
            case_id=self.case_id,
            case=self._at(fits or min(self.tried, default=1)).case,
            searched=self.searched,
            limit=self.limit,
            fits=fits,
            fails=fails,
            peak_of_fits=self.tried[fits].peak if fits else None,
            bound_by=bound_by,
            tried={str(size): self.tried[size].words for size in sorted(self.tried)},
            environment=self.environment,
        )


def _crossing(points: list[tuple[int, int]], room: int) -> float | None:
    """Where the peaks (size, bytes) seem to reach ``room``: by a parabola through the last three,
    or a line through two; None with fewer, or where they do not grow."""
    points = sorted(points)[-3:]
    if len(points) < 2:
        return None
    (x1, y1), (x2, y2) = points[-2:]
    slope = (y2 - y1) / (x2 - x1)
    curve = 0.0
    if len(points) == 3:
        x0, y0 = points[0]
        curve = (slope - (y1 - y0) / (x1 - x0)) / (x2 - x0)
    if curve > 0:
        # y2 + (slope + curve (x2 - x1)) t + curve t^2 = room, t from x2 on.
        linear = slope + curve * (x2 - x1)
        root = linear * linear + 4 * curve * (room - y2)
        return x2 + (math.sqrt(max(0.0, root)) - linear) / (2 * curve)
    return x2 + (room - y2) / slope if slope > 0 else None
