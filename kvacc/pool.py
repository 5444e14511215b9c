"""The host pool's capacity limit: which offloaded entry a new one overwrites.

Source: InfiniGen (2406.19707), its limit on host memory. A pool in host memory holds at
most ``capacity`` entries per KV head. Once it is full, every arriving entry overwrites
a victim:

===========  ==========================================================================
``fifo``     the oldest arrival
``lru``      the entry that was fetched (or, never fetched, arrived) longest ago
``counter``  the entry fetched least often; all counters of a head are halved when one
             of them saturates, so that old fame fades
===========  ==========================================================================

Of equal entries the oldest goes. A victim is always an entry that is still held: the
authors' simulation looks for it among all entries, finds the same evicted one again and
again, and so in effect holds on to everything.
"""

from __future__ import annotations

import torch

from kvacc.errors import KvaccError, unknown

POLICIES = ("fifo", "lru", "counter")
COUNTER_LIMIT = 255
"""A counter of one byte is full here."""


class Pool:
    """What the pool holds, per row and KV head.

    One step is one token: tell :meth:`used` what its query fetched of the pool, then
    :meth:`store` its own entry. B rows, H KV heads, W columns stored so far (padding included).

    Args:
        capacity: long [B], entries held per KV head; its device is the pool's.
        policy: ``fifo``, ``lru`` or ``counter``.
        heads: H.
        counter_limit: value at which a counter saturates.

    Attributes:
        held: bool [B, H, W], the entries in the pool.
        evictions: long [B, H], entries overwritten so far.

    Raises:
        KvaccError: unknown policy, or a capacity below 1.
    """

    def __init__(
        self, capacity: torch.Tensor, policy: str, heads: int, counter_limit: int = COUNTER_LIMIT
    ) -> None:
        if policy not in POLICIES:
            raise unknown("pool policy", policy, POLICIES)
        if int(capacity.min()) < 1:
            raise KvaccError(f"pool capacity {int(capacity.min())} holds nothing; give 1 entry or more")
        self.policy = policy
        self.counter_limit = counter_limit
        self.capacity = capacity
        rows, device = capacity.shape[0], capacity.device
        self.held = torch.zeros(rows, heads, 0, dtype=torch.bool, device=device)
        self.evictions = torch.zeros(rows, heads, dtype=torch.long, device=device)
        # What a victim is chosen by, lowest first, long [B, H, W]: the step of the last use
        # (lru), the number of uses (counter), or nothing, so that the oldest goes (fifo).
        self._worth = torch.zeros(rows, heads, 0, dtype=torch.long, device=device)

    def store(self, real: torch.Tensor, evicts: torch.Tensor | None = None) -> torch.Tensor:
        """The entries of the next token arrive, in one column.

        Args:
            real: bool [B]; False at padding, which is never held.
            evicts: bool [B]; False in rows that read a dense prefill, where nothing is
                overwritten, whatever the capacity, until :meth:`shrink`. By default all True.

        Returns:
            bool [B, H, W], the entries overwritten now, over the columns of after the call.
        """
        evicts = torch.ones_like(real) if evicts is None else evicts
        victims = self._evict_to(self.capacity - real.long(), evicts & real)
        self._append(real)
        return torch.nn.functional.pad(victims, (0, 1))

    def shrink(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Evict down to the capacity, by the policy, after a dense prefill.

        Args:
            rows: bool [B], which; all by default.

        Returns:
            bool [B, H, W], the entries overwritten now.
        """
        return self._evict_to(self.capacity, torch.ones_like(self.capacity).bool() if rows is None else rows)

    def used(self, selected: torch.Tensor) -> None:
        """A query fetched ``selected``, bool [B, H or 1, W]; columns
        that the pool does not hold count for nothing."""
        fetched = selected & self.held
        if self.policy == "lru":
            self._worth = self._worth.masked_fill(fetched, 2 * self.held.shape[-1] - 1)
        elif self.policy == "counter":
            counts = self._worth + fetched
            saturated = (counts >= self.counter_limit).any(-1, keepdim=True)
            self._worth = torch.where(saturated, counts // 2, counts)

    def reorder(self, rows: torch.Tensor) -> None:
        """Row i becomes what row ``rows[i]`` was (beam search); long [B']."""
        self.capacity, self.held, self.evictions, self._worth = (
            x.index_select(0, rows.to(x.device))
            for x in (self.capacity, self.held, self.evictions, self._worth)
        )

    def _append(self, real: torch.Tensor) -> None:
        rows, heads, width = self.held.shape
        # Even times are arrivals; the uses between two of them have the odd time.
        worth = 2 * width if self.policy == "lru" else 0
        self.held = torch.cat([self.held, real[:, None, None].expand(rows, heads, 1)], -1)
        self._worth = torch.nn.functional.pad(self._worth, (0, 1), value=worth)

    def _rank(self) -> torch.Tensor:
        """The worth of what is held; more than any worth where nothing is."""
        return self._worth.masked_fill(~self.held, torch.iinfo(torch.long).max)

    def _evict_to(self, limit: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Evict what the ``rows`` bool [B] hold beyond ``limit`` long [B]."""
        victims = torch.zeros_like(self.held)
        excess = (self.held.sum(-1) - limit[:, None]).clamp(min=0) * rows[:, None]
        if not bool(excess.any()):
            return victims
        # Stable: of equal entries the oldest comes first. What is not held comes last.
        order = self._rank().argsort(dim=-1, stable=True)
        place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
        victims = victims.scatter(-1, order, place < excess[..., None])
        self.held = self.held & ~victims
        self.evictions = self.evictions + victims.sum(-1)
        return victims
