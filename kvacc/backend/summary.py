"""What the records say together: beside lm-eval's results, and in its log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvacc.records import (
    SELECTION,
    RequestRecord,
    fidelity_words,
    mean_fidelity,
    mean_selection,
    selection_words,
    weighted_mean,
)
from kvacc.strategy import Strategy


def model_info(strategy: Strategy, protocol: str, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Into lm-eval's results: what ran, and what it kept."""
    tokens = [r.scored_tokens for r in records]
    scored = sum(tokens)
    selection = mean_selection(records, tokens)
    selection["moved_bytes_per_token"] = selection.pop("moved_bytes")
    # Means over the scored tokens, where they were measured.
    means = selection | _per_token(records)
    return {
        "kvacc_strategy": repr(strategy),
        "kvacc_strategy_file_sha256": strategy.file_sha256,
        "kvacc_protocol": protocol,
        "kvacc_causal": strategy.causal,
        "kvacc_requests_acted_on": sum(r.acted for r in records),
        "kvacc_requests": len(records),
        "kvacc_kept_fraction": weighted_mean([r.kept_fraction for r in records], tokens),
        "kvacc_unreachable_share": sum(r.unreachable_tokens for r in records) / scored if scored else None,
        "kvacc_truncated_requests": sum(r.truncated_tokens > 0 for r in records),
        **{f"kvacc_{name}": value for name, value in means.items() if value is not None},
    }


def log_lines(strategy: Strategy, protocol: str, records: Sequence[RequestRecord]) -> Iterator[str]:
    """A line for each task beside lm-eval's table, which has no place for it."""
    for task in dict.fromkeys(r.task for r in records):
        mine = [r for r in records if r.task == task]
        scored = sum(r.scored_tokens for r in mine) or 1
        kept = weighted_mean([r.kept_fraction for r in mine], [r.scored_tokens for r in mine]) or 0.0
        acted = sum(r.acted for r in mine)
        out = sum(r.unreachable_tokens for r in mine) / scored
        means = mean_selection(mine, [r.scored_tokens for r in mine])
        words = selection_words(*(means[name] for name in SELECTION))
        fidelity = _per_token(mine)
        words += fidelity_words(fidelity["kl"], fidelity["agreement"])
        parts = [f"kept {kept:.1%}", *words, f"acted on {acted} of {len(mine)} requests"]
        notes = "" if strategy.causal else ", non-causal: it reads later tokens"
        if strategy.has_budget and not acted:
            notes += ", did not act: this is the full cache's score"
        yield (
            f"{task}: {strategy.name}, {protocol}: {', '.join(parts)}, "
            f"{out:.0%} of scored tokens out of reach{notes}"
        )


def _per_token(records: Sequence[RequestRecord]) -> dict[str, float | None]:
    """Fidelity averaged over the scored tokens of requests that were compared with ``full``."""
    known = [record for record in records if record.kl is not None]
    tokens = [record.compared_tokens for record in known]
    means = mean_fidelity(known, tokens)
    total = means["loglikelihood_difference"]
    return means | {"loglikelihood_difference": None if total is None else total / sum(tokens)}
