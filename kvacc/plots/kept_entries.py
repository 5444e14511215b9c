"""Which positions of one prompt each layer holds for the last query, from the model itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvacc.errors import KvaccError

if TYPE_CHECKING:
    from kvacc.engine.wrapped import WrappedModel
    from kvacc.strategy import Strategy

_MOST_BYTES = 4 * 2**30
"""Of the recorded decisions: a byte for each layer, KV head, query and position."""


@dataclass(frozen=True)
class KeptEntries:
    """What the last token of a prompt of T tokens could read.

    Attributes:
        shares: one for each layer of the model: T shares of KV heads for which the position is
            visible, or None for a layer in which the strategy does not act.
        heads: KV heads that decide.
    """

    strategy: str
    protocol: str
    shares: list[list[float] | None]
    heads: int

    @property
    def tokens(self) -> int:
        return len(next(layer for layer in self.shares if layer is not None))

    @property
    def kept_fraction(self) -> float:
        """Of the positions, over the layers in which the strategy acts."""
        acting = [sum(layer) for layer in self.shares if layer is not None]
        return sum(acting) / (len(acting) * self.tokens)


def kept_entries(
    wrapped: WrappedModel, strategy: Strategy, tokens: Sequence[int], protocol: str, tail_tokens: int = 32
) -> KeptEntries:
    """Read ``tokens`` under ``strategy``, and say what the last of them could read.

    Args:
        protocol: ``stream`` acts from the first token on. In ``context`` all but the last
            ``tail_tokens`` (at most half) are read densely and then compressed, in ``serve``
            all but the last one.

    Raises:
        KvaccError: a prompt of fewer than two tokens, one whose decisions do not fit into
            memory, a protocol that the strategy does not support, or one without decisions.
    """
    from kvacc.engine.plan import Request, build_rows, make_plan

    strategy.require_protocol(protocol)
    count = len(tokens)
    if count < 2:
        raise KvaccError(f"the prompt has {count} token; give one of at least 2")
    _require_memory(wrapped, count)
    dense = {"stream": 0, "context": count - min(tail_tokens, count // 2), "serve": count - 1}[protocol]
    request = Request(tuple(tokens), (tokens[0],), dense, dense or count)
    plan = make_plan(build_rows([(0, request)]), strategy)
    _, session = wrapped.parallel(plan, strategy, record=True)
    if not session.decisions:
        raise KvaccError(f"{strategy.name} keeps everything in every layer: there is nothing to show")
    shares: list[list[float] | None] = [None] * wrapped.layers
    heads = 0
    for layer, visible in session.decisions.items():
        shares[layer] = visible[0, :, -1, :].double().mean(0).tolist()
        heads = max(heads, visible.shape[1])
    return KeptEntries(repr(strategy), protocol, shares, heads)


def _require_memory(wrapped: WrappedModel, count: int) -> None:
    heads = getattr(wrapped.config, "num_key_value_heads", None) or wrapped.config.num_attention_heads
    needed = wrapped.layers * heads * count**2
    if needed > _MOST_BYTES:
        most = int((_MOST_BYTES / (wrapped.layers * heads)) ** 0.5)
        raise KvaccError(
            f"the prompt has {count} tokens, whose decisions would take {needed / 2**30:.1f} GiB; "
            f"give --tokens {most} or fewer"
        )
