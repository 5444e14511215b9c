"""How far a strategy's next-token distributions are from ``full``'s, on the same tokens.

For every scored query, exact from the logarithms of all probabilities of the vocabulary:

* the Kullback-Leibler divergence of the strategy's distribution from ``full``'s,
  ``KL(full || strategy) = sum over tokens v of full(v) (log full(v) - log strategy(v))``,
  in nats;
* whether both find the same token most likely (top-1 agreement);
* the difference of the target's log-probability, strategy - full, in nats.

What is kept of ``full`` is not its distributions but the states that go into its output
embedding, a thousandth of their size in a model of today. Both sides are then projected
onto the vocabulary in blocks of rows, so that memory stays flat however long a text is, and
equal states give a divergence of exactly 0. ``full`` runs once for a request, whatever the
number of strategies, budgets and protocols that are compared with it.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvacc.engine.plan import Plan, Request, Row, build_rows, make_plan
from kvacc.engine.wrapped import WrappedModel
from kvacc.errors import KvaccError
from kvacc.strategy import make_strategy

PROJECTED_BYTES = 256 * 2**20
"""Float64 distributions held at once, in bytes."""
MEMORY_BYTES = 2**30
"""States of ``full`` held in memory, in bytes; what is more goes to a temporary file."""
FILE_BYTES = 16 * 2**30
"""Longest temporary file, in bytes; what is more is computed again when it is needed."""


class References:
    """What ``full`` answered: for each request the states that go into the output embedding.

    The states are kept as the model computed them, without loss: in memory up to
    ``memory_bytes``, then in an unnamed temporary file (in the folder that ``TMPDIR`` names) up
    to ``file_bytes``. A state that found no room is computed again.

    Attributes:
        passes: forward passes of ``full`` made here, because a request was not known yet.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES, file_bytes: int = FILE_BYTES):
        self.memory_bytes, self.file_bytes = memory_bytes, file_bytes
        self.passes = 0
        self._held: dict[bytes, torch.Tensor] = {}
        self._held_bytes = 0
        self._filed: dict[bytes, tuple[int, torch.Size, torch.dtype]] = {}
        self._file = None
        self._file_end = 0
        self._answers: dict[bytes, list[int]] = {}

    def add(self, request: Request, states: torch.Tensor) -> None:
        """Keep the states [targets, D] of one request; known ones stay as they are."""
        key = _key(request)
        if key in self._held or key in self._filed:
            return
        states = states.to("cpu", copy=True).contiguous()
        if self._held_bytes + states.nbytes <= self.memory_bytes:
            self._held[key] = states
            self._held_bytes += states.nbytes
        elif self._file_end + states.nbytes <= self.file_bytes:
            self._write(key, states)

    def get(self, request: Request) -> torch.Tensor | None:
        """The states [targets, D] of a request, on the CPU; None when they are not kept."""
        key = _key(request)
        if key in self._filed:
            start, shape, dtype = self._filed[key]
            self._file.seek(start)
            content = bytearray(self._file.read(shape.numel() * dtype.itemsize))
            return torch.frombuffer(content, dtype=dtype).view(shape)
        return self._held.get(key)

    def add_answer(self, prompt: Sequence[int], limits: str, answer: Sequence[int]) -> None:
        """Keep the tokens that ``full`` generated greedily; ``limits`` says what ended them."""
        self._answers[_digest(prompt, limits)] = list(answer)

    def answer(self, prompt: Sequence[int], limits: str) -> list[int] | None:
        """What was kept by :meth:`add_answer`."""
        return self._answers.get(_digest(prompt, limits))

    def add_batch(self, rows: Sequence[Row], requests: Sequence[Request], states: torch.Tensor) -> None:
        """Keep the states [N, D] of the rows' counted queries, in row order."""
        place, states = _places(rows), states.cpu()
        for b, row in enumerate(rows):
            for number, queries in row.queries.items():
                self.add(requests[number], states[[place[b, query] for query in queries]])

    def states(self, wrapped: WrappedModel, rows: Sequence[Row], requests: Sequence[Request]) -> torch.Tensor:
        """States [N, D] of the rows' counted queries under ``full``, in row order, on the CPU.

        Rows with a request that is not known are run, in one forward pass.
        """
        kept = {number: self.get(requests[number]) for row in rows for number in row.queries}
        missing = [row for row in rows if any(kept[number] is None for number in row.queries)]
        if missing:
            self.passes += 1
            full = make_strategy("full")
            # Laid out anew, because a row may begin behind a prefix that the strategy has read.
            requested = [[(number, requests[number]) for number in row.queries] for row in missing]
            missing = [row for items in requested for row in build_rows(items)]
            plan = make_plan(missing, full)
            _, session = wrapped.parallel(plan, full, keep_hidden=True, whole_logits=False)
            fresh = session.hidden_states.cpu()
            self.add_batch(missing, requests, fresh)
            place = _places(missing)
            for b, row in enumerate(missing):
                for number, queries in row.queries.items():
                    kept[number] = fresh[[place[b, query] for query in queries]]
        place = _places(rows)
        first = next(iter(kept.values()))
        out = torch.empty(len(place), first.shape[-1], dtype=first.dtype)
        for b, row in enumerate(rows):
            for number, queries in row.queries.items():
                out[[place[b, query] for query in queries]] = kept[number]
        return out

    def _write(self, key: bytes, states: torch.Tensor) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="kvacc-full-")
            self._file.seek(self._file_end)
            self._file.write(states.view(torch.uint8).numpy().tobytes())
            self._file.flush()
        except OSError:  # the disk is full: what is there stays readable
            self.file_bytes = self._file_end
            return
        self._filed[key] = (self._file_end, states.shape, states.dtype)
        self._file_end += states.nbytes


def _key(request: Request) -> bytes:
    """``full`` reads a request in the same way under every protocol and budget."""
    return _digest(request.tokens, str(len(request.targets)))


def _digest(tokens: Sequence[int], more: str) -> bytes:
    return hashlib.sha256(array("q", tokens).tobytes() + more.encode()).digest()


def _places(rows: Sequence[Row]) -> dict[tuple[int, int], int]:
    """(row, query) -> its number among the counted queries, in row order."""
    counted = {
        (b, query) for b, row in enumerate(rows) for queries in row.queries.values() for query in queries
    }
    return {at: n for n, at in enumerate(sorted(counted))}


@dataclass
class Divergence:
    """Fidelity at N counted queries, and at M scored targets of theirs, all on the CPU.

    Attributes:
        kl: float64 [N], nats. agrees: bool [N]. difference: float64 [M], nats.
    """

    kl: torch.Tensor
    agrees: torch.Tensor
    difference: torch.Tensor


def divergence(
    wrapped: WrappedModel,
    full: torch.Tensor,
    strategy: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
) -> Divergence:
    """Compare the distributions that follow from two sets of states [N, D].

    Args:
        rows: long [M], which of the N queries predicts each scored token. targets: long [M].

    Raises:
        KvaccError: a divergence is not a finite number.
    """
    size = max(1, PROJECTED_BYTES // (4 * 8 * wrapped.vocabulary))
    count = len(strategy)
    kl = torch.empty(count, dtype=torch.float64)
    agrees = torch.empty(count, dtype=torch.bool)
    difference = torch.empty(len(rows), dtype=torch.float64)
    for first in range(0, count, size):
        here = slice(first, first + size)
        # Equal shapes, so that equal states give equal bits.
        theirs = _logarithms(wrapped.project(full[here].to(strategy.device)))
        ours = _logarithms(wrapped.project(strategy[here]))
        weights = theirs.exp()
        # A token that cannot follow (probability 0) adds nothing, whatever the other side says.
        terms = torch.where(weights > 0, weights * (theirs - ours), 0.0)
        kl[here] = terms.sum(-1).clamp(min=0).cpu()
        agrees[here] = (theirs.argmax(-1) == ours.argmax(-1)).cpu()
        wanted = ((rows >= first) & (rows < first + size)).nonzero()[:, 0]
        at, token = (rows[wanted] - first).to(ours.device), targets[wanted].to(ours.device)
        difference[wanted] = (ours[at, token] - theirs[at, token]).cpu()
    if not bool(kl.isfinite().all() and difference.isfinite().all()):
        raise KvaccError(
            "a divergence from full is not a finite number (the model overflows in "
            f"{wrapped.model.dtype}); use dtype=bfloat16 or float32"
        )
    return Divergence(kl, agrees, difference)


def _logarithms(logits: torch.Tensor) -> torch.Tensor:
    """Logarithms of all probabilities, float64: in float32 the rounding of 50,000 terms is as
    large as the divergence of a budget that drops little."""
    if logits.device.type == "mps":  # has no float64
        logits = logits.cpu()
    return logits.double().log_softmax(-1)


@dataclass
class Bucket:
    """Sums over the scored tokens whose queries stand at positions of one bucket.

    ``compared`` tokens have a divergence, ``weighed`` ones an attention mass.
    """

    tokens: int = 0
    loglikelihood: float = 0.0
    compared: int = 0
    kl: float = 0.0
    agreements: int = 0
    difference: float = 0.0
    weighed: int = 0
    mass: float = 0.0


def bucket_of(position: int) -> tuple[int, int]:
    """First position of the bucket of ``position``, and the one behind its last: (0, 1), (1, 2),
    (2, 4), (4, 8) and so on."""
    power = position.bit_length()
    return (0, 1) if power == 0 else (1 << (power - 1), 1 << power)


@dataclass
class Meter:
    """What is summed over all scored tokens of a run, beside each request's own answer.

    Args:
        references: what to compare with; None sums log-likelihoods by position only.

    Attributes:
        buckets: (first position, one behind the last) -> sums.
        mass_by_head: layer -> float64 [heads], attention mass summed over ``weighed`` tokens.
        heads: layer -> heads that decide, of every layer that attends.
    """

    references: References | None = None
    buckets: dict[tuple[int, int], Bucket] = field(default_factory=dict)
    mass_by_head: dict[int, torch.Tensor] = field(default_factory=dict)
    heads: dict[int, int] = field(default_factory=dict)
    weighed: int = 0

    def clear(self) -> None:
        """Forget the sums; the references stay."""
        self.buckets, self.mass_by_head, self.heads, self.weighed = {}, {}, {}, 0

    def add(
        self,
        position: Sequence[int],
        logprob: Sequence[float],
        kl: Sequence[float] | None = None,
        agrees: Sequence[bool] | None = None,
        difference: Sequence[float] | None = None,
        mass: Sequence[float] | None = None,
    ) -> None:
        """Scored tokens: the position of each one's query, and what was found there."""
        for i, place in enumerate(position):
            bucket = self.buckets.setdefault(bucket_of(place), Bucket())
            bucket.tokens += 1
            bucket.loglikelihood += logprob[i]
            if kl is not None:
                bucket.compared += 1
                bucket.kl += kl[i]
                bucket.agreements += bool(agrees[i])
                bucket.difference += difference[i]
            if mass is not None and not math.isnan(mass[i]):
                bucket.weighed += 1
                bucket.mass += mass[i]

    def add_mass(self, by_head: dict[int, torch.Tensor], heads: dict[int, int], rows: torch.Tensor) -> None:
        """Attention mass by layer [N, H] at counted queries, each as often as it is in ``rows``."""
        self.heads = dict(heads)
        self.weighed += len(rows)
        for layer, mass in by_head.items():
            total = mass.cpu()[rows].sum(0)
            self.mass_by_head[layer] = self.mass_by_head.get(layer, 0) + total

    def mass_table(self, layers: int) -> list[list[float] | None] | None:
        """Mean attention mass [layers][heads]: 1 where a layer reads everything, None where it does
        not attend; None when nothing was weighed."""
        if not self.weighed:
            return None
        table: list[list[float] | None] = []
        for layer in range(layers):
            if layer in self.mass_by_head:
                table.append((self.mass_by_head[layer] / self.weighed).tolist())
            else:
                table.append([1.0] * self.heads[layer] if layer in self.heads else None)
        return table


def positions_of(plan: Plan, owners: Sequence[tuple[int, int, int]]) -> list[int]:
    """Position in the text of each scored query, given as (request, row, query)."""
    position = plan.position.tolist()
    return [position[b][query] for _, b, query in owners]
