"""The contract between a strategy and the engine, and the registry of strategies.

A strategy is one dataclass in one file of the ``strategies/`` folder (installed as
``kvacc.strategies``). Its fields are its hyper-parameters, so its ``repr`` is the
exact constructor call and can be stored beside a result. Adding a strategy is
adding a file: the registry scans the folder.

What a strategy says about itself are class attributes, asked before anything runs:

========================  =====================================================
``name``                  the word used on the command line and in results
``summary``               one line for ``kvacc strategies``
``source``                paper and section that define it
``protocols``             subset of ``stream``, ``context``, ``serve``
``acts_while_decoding``   keeps to its budget after the compression point too
``has_budget``            False for a strategy that keeps everything
``is_control``            True for a floor that a good strategy must beat
``causal``                False when a score can depend on later tokens
``physical_eviction``     False when hidden entries stay in memory
``offloads``              the cache is in host memory, and a selection is read
``chunked_prefill``       False when it matters how a prompt is cut into passes
========================  =====================================================

An :class:`EvictStrategy` forgets entries for good. The engine calls it with plain
tensors, on both execution paths, and knows nothing of what the scores mean:

1. a token arrives: its entry gets ``initial_score`` and joins the kept set;
2. the query attends over the kept set, itself included;
3. ``observe`` updates the scores from that attention;
4. if more than the budget is kept, ``keep`` says which entries stay.

Every decision ranks by score, higher first; of equal scores the lower position
stays. Shapes: B rows, H heads that decide (the KV heads), G query heads per KV
head, S stored entries.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvacc.budget import REFERENCES, Budget
from kvacc.errors import KvaccError, nearest, unknown

if TYPE_CHECKING:
    import torch

PROTOCOLS = ("stream", "context", "serve")


@dataclass(frozen=True)
class Strategy:
    """A KV-cache management method with its hyper-parameters.

    Args:
        budget: entries kept per KV head; anything :meth:`Budget.parse` reads.

    Raises:
        KvaccError: a hyper-parameter is out of range.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    source: ClassVar[str] = ""
    protocols: ClassVar[tuple[str, ...]] = PROTOCOLS
    """Where the strategy is defined, whatever its options; see :meth:`supported_protocols`."""
    acts_while_decoding: ClassVar[bool] = True
    has_budget: ClassVar[bool] = True
    is_control: ClassVar[bool] = False
    """A control is a floor that a good strategy must beat."""
    offloads: ClassVar[bool] = False
    """The cache lives in host memory; see :mod:`kvacc.select_strategy`."""
    file_sha256: ClassVar[str | None] = None
    """Of an included strategy's file (:mod:`kvacc.include`); None for kvacc's own."""

    budget: Budget = Budget.parse(1.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", Budget.parse(self.budget))
        self.validate()

    def validate(self) -> None:
        """Raise KvaccError when a hyper-parameter is out of range."""

    @property
    def causal(self) -> bool:
        """False when a score can depend on later tokens; every table then marks it."""
        return True

    @property
    def physical_eviction(self) -> bool:
        """False when hidden entries stay in memory, so that no memory is saved."""
        return True

    @property
    def chunked_prefill(self) -> bool:
        """True when reading a prompt in several forward passes gives the result of reading it in
        one. The engine replays causal decisions token by token, so only a strategy that looks at
        a prompt as a whole has to say False."""
        return self.causal

    @property
    def shares_trees(self) -> bool:
        """False when what a query reads depends on queries beside its own path, so that each
        answer option needs a row of its own."""
        return self.causal

    @property
    def needs_rotation(self) -> bool:
        """True when keys or queries are moved to other rotary positions."""
        return False

    def options(self) -> dict[str, Any]:
        """Hyper-parameters other than the budget, as plain values."""
        return {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init and f.name != "budget"
        }

    def supported_protocols(self) -> tuple[str, ...]:
        """The protocols that this strategy supports with these options."""
        return self.protocols

    def require_protocol(self, protocol: str) -> None:
        """Raise KvaccError unless this strategy is defined under ``protocol``."""
        if protocol not in PROTOCOLS:
            raise unknown("protocol", protocol, PROTOCOLS)
        supported = self.supported_protocols()
        if protocol not in supported:
            raise KvaccError(
                f"{self!r} does not support protocol {protocol!r}; it supports: {', '.join(supported)}"
            )


@dataclass(frozen=True)
class EvictStrategy(Strategy):
    """A strategy that forgets entries for good, by a score per entry and KV head."""

    compiled: ClassVar[str | None] = None
    """The compiled scan that replays ``observe`` and ``keep`` exactly, if any:
    ``"static"`` (scores never change) or ``"attention_sum"`` (scores add up the
    query's attention). None: the plain PyTorch scan calls the methods below."""

    needs_attention: ClassVar[bool] = True
    """False when scores do not depend on attention, so none has to be computed."""

    aggregate: ClassVar[str] = "mean"
    """How the attention of the G query heads of a KV head becomes one number:
    ``mean`` or ``max``. A strategy may turn it into a field."""

    @property
    def reads_full_rows(self) -> bool:
        """True when ``observe`` is given attention over *all* earlier tokens, evicted
        ones too. Such a strategy is a simulation: it cannot free memory."""
        return False

    @property
    def physical_eviction(self) -> bool:
        return not self.reads_full_rows

    def visible_from_all_queries(self, attention, position, causal, budget) -> torch.Tensor:
        """What each query reads, bool [B, H, T, T], of a strategy that is not ``causal``: it is
        given the attention of all queries at once, [B, H, G, T, T]."""
        raise NotImplementedError(f"{type(self).__name__} is not causal and must say what its queries read")

    @property
    def rotates_to_cache_positions(self) -> bool:
        """True when keys are rotated to their place in the cache, not in the text."""
        return False

    @property
    def needs_rotation(self) -> bool:
        return self.rotates_to_cache_positions

    def sink_count(self, budget: int) -> int:
        """First tokens that are always kept, at most ``budget``."""
        return 0

    def recent_count(self, budget: int) -> int:
        """Newest tokens that are always kept; with the sinks at most ``budget``."""
        return 0

    def initial_score(self, position: torch.Tensor, layer: int, heads: int) -> torch.Tensor:
        """Scores of entries when they are stored: ``position`` [...] -> float32 [..., heads]."""
        import torch

        return torch.zeros(*position.shape, heads, dtype=torch.float32, device=position.device)

    def observe(self, scores: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """Scores after one query.

        Args:
            scores: float32 [B, H, S].
            attention: float32 [B, H, G, S], the query's attention, 0 at hidden entries.
        """
        return scores

    def keep(
        self,
        scores: torch.Tensor,
        position: torch.Tensor,
        alive: torch.Tensor,
        seen: torch.Tensor,
        budget: torch.Tensor,
        recent: torch.Tensor,
        sinks: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Which entries stay, and the scores that they keep.

        Args:
            scores: float32 [B, H, S].
            position: long [B, H, S], place of each entry in the text.
            alive: bool [B, H, S], the entries kept so far.
            seen, budget, recent, sinks: long [B], for each row: tokens seen,
                entries allowed, newest and first tokens that must stay.

        Returns:
            bool [B, H, S], a subset of ``alive``; float32 [B, H, S].
        """
        seen, budget, recent, sinks = (x.view(-1, 1, 1) for x in (seen, budget, recent, sinks))
        protected = (position < sinks) | (position >= seen - recent)
        return top(scores, position, alive, protected, budget), scores


def top(scores, position, alive, protected, budget):
    """The ``budget`` best of the ``alive`` entries: protected ones first, then by
    score; of equal ones the lower position. All [B, H, S]; budget [B, 1, 1]."""
    import torch

    size = scores.shape[-1]
    if size == 0:
        return alive.clone()
    infinity = float("inf")
    rank = torch.where(protected, infinity, scores)
    excess = alive.sum(-1, keepdim=True) - budget
    if int(excess.max()) <= 1:
        # A decoding step: the worst entry is found without sorting; of equal ones the last goes.
        rank = torch.where(alive, rank, infinity)
        worst = alive & (rank == rank.amin(-1, keepdim=True))
        last = torch.where(worst, position, torch.iinfo(position.dtype).min).amax(-1, keepdim=True)
        return alive & ~(worst & (position == last) & (excess > 0))
    rank = torch.where(alive, rank, -infinity)
    # Stable sort of entries laid out by position: equal scores stay in text order.
    by_position = position.argsort(dim=-1, stable=True)
    order = rank.gather(-1, by_position).argsort(dim=-1, descending=True, stable=True)
    chosen = by_position.gather(-1, order)
    place = torch.arange(size, device=scores.device).expand_as(chosen)
    keep = torch.zeros_like(alive).scatter(-1, chosen, place < budget)
    return keep & alive


_INCLUDED: dict[str, type[Strategy]] = {}


def strategy_classes() -> dict[str, type[Strategy]]:
    """Every strategy by name: those of the ``strategies/`` folder, then the included ones."""
    return {**builtin_classes(), **_INCLUDED}


def register_included(classes: Mapping[str, type[Strategy]]) -> None:
    """Add strategies of a user's file (:mod:`kvacc.include`), by name."""
    _INCLUDED.update(classes)


@functools.cache
def builtin_classes() -> Mapping[str, type[Strategy]]:
    """Every strategy in the ``strategies/`` folder, by name."""
    import kvacc.strategies as package

    found: dict[str, type[Strategy]] = {}
    for module_info in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
        module = importlib.import_module(f"{package.__name__}.{module_info.name}")
        for value in vars(module).values():
            is_strategy = isinstance(value, type) and issubclass(value, Strategy)
            if is_strategy and value.__module__ == module.__name__ and value.name:
                if value.name in found:
                    raise KvaccError(
                        f"two strategies are named {value.name!r}: rename one in {module.__file__}"
                    )
                found[value.name] = value
    return found


def make_strategy(name: str, budget: Any = None, budget_of: str = "prompt", **options: Any) -> Strategy:
    """The strategy ``name`` with the given hyper-parameters.

    Raises:
        KvaccError: unknown name or option, or a value out of range.
    """
    classes = strategy_classes()
    if name not in classes:
        raise unknown("strategy", name, classes)
    cls = classes[name]
    known = [f.name for f in dataclasses.fields(cls) if f.init and f.name != "budget"]
    for option in options:
        if option not in known:
            raise KvaccError(
                f"strategy {name!r} has no option {option!r}{nearest(option, [*known, 'budget'])}; "
                f"its options: {', '.join(known) or 'none'}"
            )
    if budget_of not in REFERENCES:
        raise unknown("budget_of", budget_of, REFERENCES)
    if not cls.has_budget:
        if budget is not None and Budget.parse(budget) != Budget.parse(1.0):
            raise KvaccError(f"strategy {name!r} keeps every entry: leave the budget out, or give 1.0")
        return cls(**options)
    if budget is None:
        raise KvaccError(f"strategy {name!r} needs a budget: a count of entries (256) or a fraction (0.2)")
    if isinstance(budget, Budget) and budget_of != "prompt":
        budget = Budget(budget.amount, budget_of)
    return cls(budget=Budget.parse(budget, budget_of), **options)
