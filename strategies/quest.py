"""Quest: read the pages of the cache that could hold the largest attention logits.

Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", ICML
2024, arXiv:2406.10774, section 3.3 and Algorithm 1. Keys lie in pages of consecutive
tokens; the minimum and maximum of each channel over a page bound from above the logit
of any key in it, and a query reads the pages with the highest bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvacc.select_strategy import (
    Selection,
    Selector,
    SelectStrategy,
    best_of_group,
    count_option,
    dots,
    highest,
)


@dataclass(frozen=True)
class Quest(SelectStrategy):
    """Read ``budget // page_size`` pages.

    While all that was seen fits in the budget, all is read. A budget smaller than a page
    (a fraction of a short prompt) reads the newest tokens. With several query heads per KV
    head (the paper has one) a page's bound is taken relative to each query head's best
    page, and the one that wants it most counts. The authors leave the cache on the device
    and save its bandwidth; here it is in host memory, so the bytes that they would read
    are the bytes moved.

    Args:
        page_size: tokens per page.
        min_pages: pages read at least, whatever the budget; the authors' code has 3. At the
            default 0 the budget is never exceeded.
        dense_layers: first layers that read everything; 2 as in the paper.
    """

    name: ClassVar[str] = "quest"
    summary: ClassVar[str] = "selects pages by a bound on their largest logit"
    source: ClassVar[str] = "arXiv:2406.10774, section 3.3"

    dense_layers: int = 2
    page_size: int = 16
    min_pages: int = 0

    def validate(self) -> None:
        super().validate()
        count_option(self, "page_size", 1)
        count_option(self, "min_pages")

    def selector(self, layer):
        return Pages(self, layer)


class Pages(Selector):
    """The bounds of each page, growing with its tokens.

    State, for M entries: ``low``, ``high`` [B, M, K, D], minimum and maximum over the page of
    an entry up to itself, and its ``place`` [B, M] in the text. A page's own bounds are those
    at its last entry; only they, and the newest ones, are held on.
    """

    def __init__(self, strategy: Quest, layer) -> None:
        super().__init__(layer)
        self.strategy = strategy
        self.columns = None  # long [M], ascending
        self.width = 0

    def extend(self, new):
        import torch

        count = new.key.shape[2]
        arrived = torch.arange(self.width, self.width + count, device=new.key.device)
        self.columns = arrived if self.columns is None else torch.cat([self.columns, arrived])
        self.width += count
        key = new.key.transpose(1, 2)
        for name, value in (("low", key), ("high", key), ("place", new.position)):
            self.append(name, value, dim=1)
        first = len(self.columns) - count
        slot = torch.searchsorted(self.columns, new.previous.clamp(min=0).contiguous())
        within = new.position % self.strategy.page_size
        for step in range(1, self.strategy.page_size):  # a page's tokens in order
            row, token = ((within == step) & new.real & (new.previous >= 0)).nonzero(as_tuple=True)
            for name, narrow in (("low", torch.minimum), ("high", torch.maximum)):
                bounds = self.state[name]
                bounds[row, first + token] = narrow(bounds[row, first + token], bounds[row, slot[row, token]])

    def settle(self):
        is_last = (self.state["place"] + 1) % self.strategy.page_size == 0
        held = is_last.any(0) | (self.columns == self.width - 1)
        self.columns = self.columns[held]
        self.state = {name: value[:, held] for name, value in self.state.items()}

    def select(self, asked):
        import torch

        strategy, heads = self.strategy, self.layer.heads
        readable, width = asked.readable, asked.readable.shape[-1]
        own_page = asked.position.clamp(min=0) // strategy.page_size  # [B, n]
        page = asked.entry_position.clamp(min=0) // strategy.page_size  # [B, W]
        # Before the query's own page all are complete: a page's last entry has its bounds.
        is_last = (self.state["place"] + 1) % strategy.page_size == 0
        here = (self.columns < width) & is_last.any(0)
        columns, place = self.columns[here], self.state["place"][:, here]
        complete = readable[:, :, columns] & is_last[:, None, here]
        complete &= (place // strategy.page_size)[:, None] < own_page[..., None]
        positive, negative = asked.query.float().clamp(min=0), asked.query.float().clamp(max=0)
        low, high = (self.state[name].transpose(1, 2).float() for name in ("low", "high"))
        # The most that q . k can be for low <= k <= high, summed over channels.
        bound = dots(positive, high[:, :, here]) + dots(negative, low[:, :, here])
        bound = bound.masked_fill(~complete[:, None], float("-inf"))
        slot = torch.searchsorted(self.columns, asked.own)
        group = bound.shape[1] // low.shape[1]
        own_low, own_high = (x[:, :, slot].repeat_interleave(group, 1) for x in (low, high))
        own_bound = (positive * own_high + negative * own_low).sum(-1, keepdim=True)
        by_page = bound.new_full((*bound.shape[:3], int(page.max()) + 1), float("-inf"))
        of_column = (place // strategy.page_size)[:, None, None].expand_as(bound)
        by_page.scatter_reduce_(3, of_column, bound, "amax")
        by_page.scatter_(3, own_page[:, None, :, None].expand_as(own_bound), own_bound)
        exists = (by_page > float("-inf")).any(1, keepdim=True)
        pages = (asked.budget // strategy.page_size).clamp(min=strategy.min_pages)
        chosen = highest(best_of_group(by_page, heads, exists), pages[:, None], exists)
        read = chosen.gather(-1, page[:, None, None].expand(-1, heads, readable.shape[1], -1))
        age = asked.position[..., None] - asked.entry_position[:, None]  # [B, n, W]
        newest = (age < asked.budget[..., None]) & (pages == 0)[..., None]
        fits = (asked.position < asked.budget)[..., None]
        return Selection((read | (newest | fits)[:, None]) & readable[:, None])
