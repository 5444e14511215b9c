"""What the backend measured about each request, beside lm-eval's own answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestRecord:
    """One request as the engine ran it.

    ``kept_fraction`` is measured, not derived: KV entries visible to a query over the
    tokens it could see, averaged over the scored queries, layers and KV heads.
    """

    task: str
    doc_id: int | None
    option: int
    """lm-eval's ``Instance.idx``: the answer option of a multiple-choice document."""
    kind: str
    """``loglikelihood``, ``loglikelihood_rolling`` or ``generate_until``."""
    prompt_tokens: int
    scored_tokens: int
    """Continuation tokens scored, or tokens generated."""
    truncated_tokens: int
    """Tokens cut from the left because the model's context is shorter."""
    budget_entries: int | None
    """Entries allowed per KV head; None without a budget."""
    kept_fraction: float
    acted: bool
    """The strategy hid at least one entry from at least one scored query."""
    unreachable_tokens: int
    """Scored tokens whose distribution came from an uncompressed prefill."""
    bos_tokens: int = 0
    """Beginning-of-sequence tokens that the prompt starts with. 0 or 2 where a model expects 1 changes
    its scores, and which token is the first attention sink."""
    loglikelihood: float | None = None
    greedy: bool | None = None
