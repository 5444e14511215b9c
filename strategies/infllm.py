"""InfLLM: sinks, a local window, and blocks of the distant past looked up by representatives.

Xiao et al., "InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient
Context Memory", NeurIPS 2024, arXiv:2402.04617, section 3. Tokens that leave the local
window form blocks; the keys of a block that the queries of their local window wanted most
represent it; the blocks whose representatives suit the query best are read, all at one
fixed distance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import ClassVar

from kvacc.errors import KvaccError, unknown
from kvacc.select_strategy import Selection, Selector, SelectStrategy, count_option, dots, highest

POSITIONS = ("fixed", "original")


@dataclass(frozen=True)
class InfLLM(SelectStrategy):
    """Read the first tokens, the newest, and the best blocks between them.

    The budget holds ``init`` first tokens (at most a quarter of it), blocks in the share that
    the local window leaves, and the window with the rest. A budget too small for a block
    retrieves nothing: it is sinks and recent tokens, as for short prompts in the paper. Each
    query retrieves for itself, as the authors do while decoding; in a prefill they retrieve
    once for 512 queries. A block exists once all its tokens have left the window.

    Args:
        init: first tokens that are always read (the authors' 128).
        local_fraction: share of the budget that the local window gets at least (the authors'
            4,096 of 6,272 tokens are 0.65).
        block: tokens per block (128).
        representatives: keys that stand for a block (4).
        positions: ``fixed``: first tokens and blocks are read at the distance of the local
            window's far end, as in the paper. ``original``: where they are in the text (the
            only choice for models without rotary embeddings).
    """

    name: ClassVar[str] = "infllm"
    summary: ClassVar[str] = "selects blocks by representative keys, beside sinks and a local window"
    source: ClassVar[str] = "arXiv:2402.04617, section 3"

    init: int = 128
    local_fraction: float = 0.65
    block: int = 128
    representatives: int = 4
    positions: str = "fixed"

    def validate(self) -> None:
        super().validate()
        count_option(self, "init")
        count_option(self, "block", 1)
        count_option(self, "representatives", 1)
        if self.positions not in POSITIONS:
            raise unknown("infllm positions", self.positions, POSITIONS)
        share = self.local_fraction
        if not isinstance(share, Real) or isinstance(share, bool) or not 0 < share <= 1:
            raise KvaccError(f"infllm: local_fraction {share!r} is not in (0, 1]")
        if self.budget.of == "seen":
            raise KvaccError(
                "infllm: its window has one length per request; use budget_of=prompt or a count of entries"
            )

    @property
    def needs_rotation(self) -> bool:
        return self.positions == "fixed"

    @property
    def shares_trees(self) -> bool:
        return False  # which keys represent a block depends on the queries after it

    def parts(self, budget: int) -> tuple[int, int, int]:
        """First tokens, local window and number of blocks of a budget in entries."""
        init = min(self.init, budget // 4)
        local = max(1, math.ceil(Fraction(repr(float(self.local_fraction))) * budget))
        blocks = max(0, budget - init - local) // self.block
        return init, budget - init - blocks * self.block, blocks

    def selector(self, layer):
        return Blocks(self, layer)


class Blocks(Selector):
    """State: ``key`` [B, K, W, D] and ``wanted`` [B, K, W], the sum of an entry's products with
    the queries of its local window (equation 2 of the paper, but for its constant factor)."""

    def __init__(self, strategy: InfLLM, layer) -> None:
        super().__init__(layer)
        self.strategy = strategy
        parts = [strategy.parts(int(budget)) for budget in self._budgets(layer)]
        self.init, self.local, self.blocks = layer.compressed.new_tensor(parts).T

    def _budgets(self, layer):
        return [self.strategy.budget.entries(int(length)) for length in layer.compressed]

    def extend(self, new):
        self.append("key", new.key.float(), dim=2)
        self.append("wanted", new.key.new_zeros(new.key.shape[:3]).float(), dim=2)

    def select(self, asked):
        import torch

        strategy, readable = self.strategy, asked.readable
        width, place = readable.shape[-1], asked.entry_position
        init, local, blocks = (x[:, None, None] for x in (self.init, self.local, self.blocks))
        age = asked.position[..., None] - place[:, None]  # [B, n, W]
        near = readable & (age < local)
        sinks = readable & (place[:, None] < init)
        key, wanted = self.state["key"][:, :, :width], self.state["wanted"]
        products = dots(asked.query, key)
        rows, query_heads, count, _ = products.shape
        # A key is wanted by the queries that follow it in its local window.
        within = (readable & (age >= 1) & (age <= local))[:, None]
        received = (products * within).sum(2).unflatten(1, (key.shape[1], -1)).sum(2)
        wanted[:, :, :width] += received

        first = place - init[:, 0]  # place among the tokens after the sinks
        block = (first // strategy.block).clamp(min=0)  # [B, W]
        number = int(block.max()) + 1
        if int(self.blocks.max()) == 0:
            return self._selection(near, sinks, asked)
        belongs = torch.nn.functional.one_hot(block, number).bool() & (first >= 0)[..., None]  # [B, W, N]
        belongs &= readable.any(1)[..., None]
        members = belongs.transpose(1, 2)[:, None].expand(-1, key.shape[1], -1, -1)  # [B, K, N, W]
        scores = wanted[:, :, None, :width].expand(members.shape)
        best = highest(scores, place.new_full((1, 1, 1), strategy.representatives), members)
        query, unrotated = asked.query, key
        if self.layer.rotate:
            query = self.layer.rotate(query, (self.local[:, None] - asked.position)[:, None])
            unrotated = self.layer.rotate(key, -place[:, None])
        relevance = dots(query, best.float() @ unrotated).mean(1, keepdim=True)  # [B, 1, n, N]
        last = self.init[:, None] + (torch.arange(number, device=place.device) + 1) * strategy.block - 1
        complete = (last[:, None] <= asked.position[..., None] - local)[:, None]
        chosen = highest(relevance, self.blocks[:, None, None], complete)[:, 0]
        retrieved = chosen.float() @ belongs.transpose(1, 2).float() > 0
        return self._selection(near, sinks | (retrieved & readable), asked)

    def _selection(self, near, distant, asked):
        heads = self.layer.heads
        # While all that was seen fits in the budget, all is near.
        near = near | (asked.readable & (asked.position < asked.budget)[..., None])
        visible = (near | distant)[:, None].expand(-1, heads, -1, -1)
        if not self.layer.rotate:
            return Selection(visible)
        distance = self.local[:, None].expand_as(asked.position)
        return Selection(visible, (distant & ~near)[:, None], distance)

    def reorder(self, rows):
        super().reorder(rows)
        self.init, self.local, self.blocks = self.init[rows], self.local[rows], self.blocks[rows]
