"""InfiniGen: keep everything in host memory, guess what the next layer will read, fetch that.

Lee et al., "InfiniGen: Efficient Generative Inference of Large Language Models with
Dynamic KV Cache Management", OSDI 2024, arXiv:2406.19707, section 4. Queries and keys
are skewed offline so that a few columns carry most of their size; while layer l-1 runs,
its attention input gives a guess of layer l's query, which those columns of the keys
turn into speculated logits; entries within ``alpha`` of the highest are fetched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

from kvacc.budget import Budget
from kvacc.calibration import calibration_digest
from kvacc.errors import KvaccError, unknown
from kvacc.select_strategy import (
    Selection,
    Selector,
    SelectStrategy,
    SpeculationSettings,
    best_of_group,
    count_true,
    highest,
)

CHOICES = {
    "columns": ("paper", "union", "query"),
    "speculate_from": ("previous", "current"),
    "counts": ("mean", "own"),
    "current_token": ("always", "ranked"),
    "pool_policy": ("counter", "lru", "fifo"),
}


@dataclass(frozen=True)
class InfiniGen(SelectStrategy):
    """Read the entries whose speculated logit is within ``alpha`` of the highest.

    The budget caps what is read, the query's own entry included; while all that was seen
    fits in it, all is read, as in the authors' simulation. With several query heads per KV
    head (the paper has one) an entry is as near to the highest as it is for the query head
    that wants it most.

    Args:
        alpha: distance below the highest speculated logit of a head that is still read; the
            paper's 4 for OPT and 5 for Llama. ``inf`` reads up to the budget.
        partial_ratio: share of the skewed columns that the guess uses (0.3 in the paper;
            0.1 and 0.2 in the authors' scripts), rounded up.
        columns: which: ``paper``, the largest sums of absolute queries and keys; ``union``
            and ``query``, the authors' accuracy and speed code. The paper sums over each
            prompt; in ``stream`` that would read later tokens, so the sums are over the
            calibration text, as in the authors' accuracy code.
        dense_layers: first layers that read everything: 1 in the paper (nothing runs before
            layer 0), 2 in the authors' code. 0 needs ``speculate_from=current``.
        speculate_from: ``previous``, the attention input of the layer before, or ``current``,
            the layer's own query: an oracle that leaves no time to fetch.
        counts: every head reads as many entries as its layer's heads need on average, rounded
            down (``mean``, paper), or as many as it needs itself (``own``).
        current_token: the query's own entry is ``always`` read, since it is on the device, or
            ``ranked`` with the others as in the authors' simulation.
        skew: False leaves the columns as they are (the paper's ablation).
        pool: entries that host memory holds per KV head, as a fraction or a count. When it is
            full a new entry overwrites the victim of ``pool_policy``. It limits what can be
            read; the step path does not reuse the victims' memory, and counts it as held.
        pool_policy: ``counter`` (the paper's choice), ``lru`` or ``fifo``.
        calibration: ``prose``, a text of this project's, or the path of a text file.
        calibration_digest: of that text; filled in, and checked when given.
    """

    name: ClassVar[str] = "infinigen"
    summary: ClassVar[str] = "selects from an offloaded cache by queries guessed from the layer before"
    source: ClassVar[str] = "arXiv:2406.19707, section 4"

    dense_layers: int = 1
    alpha: float = 4.0
    partial_ratio: float = 0.3
    columns: str = "paper"
    speculate_from: str = "previous"
    counts: str = "mean"
    current_token: str = "always"
    skew: bool = True
    pool: float | int | str = 1.0
    pool_policy: str = "counter"
    calibration: str = "prose"
    calibration_digest: str = ""

    def validate(self) -> None:
        super().validate()
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise unknown(f"infinigen {name}", getattr(self, name), allowed)
        if not _is_number(self.alpha) or not self.alpha >= 0:
            raise KvaccError(f"infinigen: alpha {self.alpha!r} is not a number of at least 0 (or inf)")
        if not _is_number(self.partial_ratio) or not 0 < self.partial_ratio <= 1:
            raise KvaccError(f"infinigen: partial_ratio {self.partial_ratio!r} is not in (0, 1]")
        if not isinstance(self.skew, bool):
            raise KvaccError(f"infinigen: skew {self.skew!r} is neither true nor false")
        if self.dense_layers == 0 and self.speculate_from == "previous":
            raise KvaccError(
                "infinigen: dense_layers 0 leaves layer 0 no layer before it to guess from; give 1 or more, "
                "or speculate_from=current"
            )
        object.__setattr__(self, "alpha", float(self.alpha))
        object.__setattr__(self, "pool", str(Budget.parse(self.pool)))
        # The text is part of what is run: results must not be reused after it was edited.
        digest = calibration_digest(self.calibration)
        if self.calibration_digest not in ("", digest):
            raise KvaccError(
                f"infinigen: calibration text {self.calibration!r} has digest {digest}, not "
                f"{self.calibration_digest}: it was edited; leave calibration_digest out to use it so"
            )
        object.__setattr__(self, "calibration_digest", digest)

    @property
    def speculation(self) -> SpeculationSettings:
        return SpeculationSettings(
            self.calibration,
            self.calibration_digest,
            self.skew,
            self.partial_ratio,
            self.columns,
            self.speculate_from,
        )

    @property
    def is_pool_limited(self) -> bool:
        return Budget.parse(self.pool) != Budget.parse(1.0)

    @property
    def shares_trees(self) -> bool:
        return not self.is_pool_limited  # what the pool holds depends on every query before

    @property
    def selects_ahead(self) -> bool:
        ahead = self.speculate_from == "previous" and self.current_token == "always"
        return ahead and not self.is_pool_limited

    def selector(self, layer):
        return LimitedPool(self, layer) if self.is_pool_limited else Speculated(self, layer)


def _is_number(value) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


class Speculated(Selector):
    """The partial keys of a layer, and what speculated queries want of them."""

    def __init__(self, strategy: InfiniGen, layer) -> None:
        super().__init__(layer)
        self.strategy = strategy

    def extend(self, new):
        self.append("partial_keys", self.layer.skewed(new.key), dim=2)

    def select(self, asked):
        return Selection(self.choose(asked, asked.readable[:, None]))

    def choose(self, asked, held):
        """What is read of the entries ``held``, bool [B, H or 1, n, W]."""
        strategy, width = self.strategy, asked.readable.shape[-1]
        itself = (asked.itself() & asked.readable)[:, None]  # [B, 1, n, W]
        always = strategy.current_token == "always"
        candidates = held & ~itself if always else held
        logits = asked.logits(asked.speculated, self.state["partial_keys"][:, :, :width])
        nearness = best_of_group(logits, self.layer.heads, candidates)
        count = count_true((nearness >= -strategy.alpha) & candidates)  # [B, H, n]
        if strategy.counts == "mean":
            count = count.sum(1, keepdim=True) // self.layer.heads
        cap = (asked.budget - 1 if always else asked.budget)[:, None]
        chosen = highest(nearness, count.minimum(cap), candidates)
        fits = (asked.position < asked.budget)[:, None, :, None]
        if bool(fits.any()):
            chosen = chosen | (fits & candidates)
        return chosen | itself if always else chosen


class LimitedPool(Speculated):
    """The same from a pool that forgets: token by token, since each query changes what was used."""

    def __init__(self, strategy, layer):
        from kvacc.pool import Pool

        super().__init__(strategy, layer)
        budget = Budget.parse(strategy.pool)
        capacity = layer.compressed.new_tensor([budget.entries(int(n)) for n in layer.compressed])
        self.pool = Pool(capacity, strategy.pool_policy, layer.heads)

    def select(self, asked):
        read = asked.readable[:, None].repeat(1, self.layer.heads, 1, 1)
        for i in range(asked.readable.shape[1]):
            one = asked.part(i)
            held = one.readable[:, None].repeat(1, self.layer.heads, 1, 1)
            held[:, :, 0, :-1] &= self.pool.held
            acts = one.acts[:, None, :, None]
            chosen = (self.choose(one, held) & acts) | (held & ~acts)
            self.pool.used(chosen[:, :, 0, :-1] & acts[:, :, 0])
            self.pool.store(one.readable[:, 0, -1], one.acts[:, 0])
            self.pool.shrink(one.compresses[:, 0])
            read[:, :, i, : held.shape[-1]] = chosen[:, :, 0]
        return Selection(read)

    def reorder(self, rows):
        super().reorder(rows)
        self.pool.reorder(rows)
