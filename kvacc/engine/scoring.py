"""Log-likelihoods of continuations under a strategy: the parallel path, and the step
path that says the same one token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kvacc.engine import attention
from kvacc.engine.parallel import ParallelSession
from kvacc.engine.plan import Request, Row, build_rows, make_plan
from kvacc.engine.stepping import RowReading
from kvacc.engine.wrapped import WrappedModel
from kvacc.errors import KvaccError
from kvacc.strategy import Strategy

LOGIT_BYTES = 256 * 2**20
"""Float32 log-softmax held at once, in bytes."""


@dataclass(frozen=True)
class Score:
    """One request's answer.

    Attributes:
        loglikelihood: sum over the continuation's tokens, natural logarithm.
        greedy: every token of the continuation was the most likely one.
        kept_fraction: visible over possible entries, mean over scored queries, layers, heads.
        hidden: an entry was hidden from a scored query.
        moved_bytes, attention_mass, recall, mass_by_layer, recall_by_layer: of strategies
            that select, as in :class:`kvacc.records.RequestRecord`.
    """

    loglikelihood: float
    greedy: bool
    kept_fraction: float
    hidden: bool
    moved_bytes: float | None = None
    attention_mass: float | None = None
    recall: float | None = None
    mass_by_layer: tuple[float | None, ...] | None = None
    recall_by_layer: tuple[float | None, ...] | None = None


def default_batch_tokens(device: torch.device) -> int:
    """Tokens of a batch: enough to keep matrix multiplications at full speed."""
    return 2048 if device.type == "cpu" else 16384


def score_documents(
    wrapped: WrappedModel,
    documents: Sequence[Sequence[Request]],
    strategy: Strategy,
    batch_tokens: int | None = None,
    progress: Callable[[int], None] | None = None,
    reference: bool = False,
) -> list[list[Score]]:
    """Score every request of every document on the parallel path.

    Args:
        documents: requests that may share tokens, such as the options of a question.
        batch_tokens: padded tokens per forward pass; halved when memory runs out.
        progress: called with the number of requests finished since the last call.

    Returns:
        a Score for each request, in the order given.
    """
    batch_tokens = batch_tokens or default_batch_tokens(wrapped.device)
    share = wrapped.shares_trees and strategy.shares_trees
    numbered: list[Request] = []
    rows: list[Row] = []
    for document in documents:
        items = list(enumerate(document, start=len(numbered)))
        numbered += document
        rows += _rows_within(items, share, batch_tokens)
    scores: list[Score | None] = [None] * len(numbered)
    # Longest first: memory problems show at once, and neighbours pad each other little.
    rows.sort(key=lambda row: -len(row.tokens))
    while rows:
        count = max(1, batch_tokens // len(rows[0].tokens))
        batch, rest = rows[:count], rows[count:]
        try:
            done = _score_batch(wrapped, batch, strategy, numbered, reference)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if len(batch) > 1:
                batch_tokens = max(1, batch_tokens // 2)
                continue
            halves = _split(batch[0], numbered, share)
            if not halves:
                raise KvaccError(
                    f"one row of {len(batch[0].tokens)} tokens does not fit in memory; "
                    "use a smaller model, a lower max_length or another device"
                ) from None
            rows = sorted(halves + rest, key=lambda row: -len(row.tokens))
            continue
        for number, score in done:
            scores[number] = score
        if progress:
            progress(len(done))
        rows = rest
    answers = iter(scores)
    return [[next(answers) for _ in document] for document in documents]


def is_out_of_memory(error: BaseException) -> bool:
    """GPUs raise a class of their own; PyTorch's CPU allocator says it in words."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _split(row: Row, requests: Sequence[Request], share: bool) -> list[Row]:
    """Two rows for the requests of one; none where there is a single request."""
    items = [(number, requests[number]) for number in row.queries]
    half = len(items) // 2
    return build_rows(items[:half], share) + build_rows(items[half:], share) if half else []


def _rows_within(items: list[tuple[int, Request]], share: bool, limit: int) -> list[Row]:
    """Trees of a document's requests, none wider than a batch where that can be helped."""
    rows = build_rows(items, share)
    if len(items) > 1 and any(len(row.tokens) > limit and len(row.queries) > 1 for row in rows):
        half = len(items) // 2
        return _rows_within(items[:half], share, limit) + _rows_within(items[half:], share, limit)
    return rows


def _score_batch(
    wrapped: WrappedModel, rows: list[Row], strategy: Strategy, requests: list[Request], reference: bool
) -> list[tuple[int, Score]]:
    plan = make_plan(rows, strategy)
    logits, session = wrapped.parallel(plan, strategy, reference=reference)
    order = {tuple(at): n for n, at in enumerate(plan.counted.nonzero().tolist())}
    wanted, targets, owners = [], [], []
    for b, row in enumerate(rows):
        for number, queries in row.queries.items():
            for query, target in zip(queries, requests[number].targets, strict=True):
                wanted.append(order[b, query])
                targets.append(target)
                owners.append((number, b, query))
    logprobs, best = token_logprobs(logits, torch.tensor(wanted), torch.tensor(targets))
    if not all(map(math.isfinite, logprobs)):
        raise KvaccError(
            f"{strategy!r}: a log-likelihood is not a finite number (the model overflows in "
            f"{wrapped.model.dtype}); use dtype=bfloat16 or float32"
        )
    kept = (session.kept / session.layers).cpu()
    hidden, moved = session.hidden.cpu(), session.moved.cpu()
    quality = _by_layer(session, wrapped.layers)
    gathered: dict[int, list[Query]] = {}
    for i, (number, b, query) in enumerate(owners):
        measured = Query(
            logprobs[i], best[i], float(kept[b, query]), bool(hidden[b, query]), float(moved[b, query])
        )
        measured.mass, measured.recall = (values[b, query] for values in quality) if quality else (None, None)
        gathered.setdefault(number, []).append(measured)
    return [(number, _combine(queries, bool(quality))) for number, queries in gathered.items()]


@dataclass
class Query:
    """What was measured of one scored query; ``mass`` and ``recall`` [layers], NaN in a layer
    that reads everything, of strategies that select."""

    logprob: float
    greedy: bool
    kept: float
    hidden: bool
    moved: float = 0.0
    mass: torch.Tensor | None = None
    recall: torch.Tensor | None = None


def _by_layer(session: ParallelSession, layers: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Mass and recall [B, T, layers] of a strategy that selects."""
    if not session.mass:
        return None
    out = []
    for measured in (session.mass, session.recall):
        values = torch.full((*session.kept.shape, layers), float("nan"), dtype=torch.float64)
        for layer, value in measured.items():
            values[..., layer] = value.cpu()
        out.append(values)
    return out[0], out[1]


def _combine(queries: list[Query], selects: bool) -> Score:
    count = len(queries)
    score = Score(
        sum(query.logprob for query in queries),
        all(query.greedy for query in queries),
        sum(query.kept for query in queries) / count,
        any(query.hidden for query in queries),
        sum(query.moved for query in queries) / count if selects else None,
    )
    if queries[0].mass is None:
        return score
    mass = torch.stack([query.mass for query in queries]).mean(0)
    recall = torch.stack([query.recall for query in queries]).mean(0)
    return replace(
        score,
        attention_mass=float(mass.nanmean()),
        recall=float(recall.nanmean()),
        mass_by_layer=_known(mass),
        recall_by_layer=_known(recall),
    )


def _known(values: torch.Tensor) -> tuple[float | None, ...]:
    return tuple(None if math.isnan(value) else value for value in values.tolist())


def token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor
) -> tuple[list[float], list[bool]]:
    """Log-probability of ``targets[i]`` in ``logits[rows[i]]``, float32, and whether it is
    the most likely token. logits: [N, vocabulary]."""
    # log_softmax as in lm-eval's `hf` backend, not logsumexp: float32 rounds the two
    # differently (1e-5 a token), and long continuations would differ in the third decimal.
    # Rows are shared by options, so the wanted tokens of a row are read while it is there.
    size = max(1, LOGIT_BYTES // (8 * logits.shape[-1]))
    logprobs = torch.empty(len(rows))
    best = torch.empty(len(rows), dtype=torch.bool)
    for first in range(0, logits.shape[0], size):
        block = logits[first : first + size].float().log_softmax(-1)
        wanted = ((rows >= first) & (rows < first + size)).nonzero()[:, 0]
        at = (rows[wanted] - first).to(block.device)
        token = targets[wanted].to(block.device)
        logprobs[wanted] = block[at, token].cpu()
        best[wanted] = (block.argmax(-1)[at] == token).cpu()
    return logprobs.tolist(), best.tolist()


def score_by_steps(
    wrapped: WrappedModel, requests: Sequence[Request], strategy: Strategy
) -> tuple[list[Score], list[torch.Tensor]]:
    """The same on the step path, one token per forward pass, as one left-padded batch.

    Slow; the oracle of :func:`score_documents` and the meaning of its numbers.

    Returns:
        scores, and the logits [targets, vocabulary] of each request.
    """
    width = max(len(r.tokens) for r in requests)
    padding = [width - len(r.tokens) for r in requests]
    session = wrapped.step(
        strategy, [RowReading(p, r.dense, r.compressed) for p, r in zip(padding, requests, strict=True)]
    )
    tokens = torch.tensor([[0] * p + list(r.tokens) for p, r in zip(padding, requests, strict=True)])
    tokens = tokens.to(wrapped.device)
    values: list[list[Query]] = [[] for _ in requests]
    kept_logits: list[list[torch.Tensor]] = [[] for _ in requests]
    with attention.active(session), torch.inference_mode():
        for column in range(width):
            logits = step_forward(wrapped, session, tokens[:, column : column + 1], column)[:, -1]
            for b, request in enumerate(requests):
                which = column - padding[b] - request.first_scored
                if which < 0:
                    continue
                logprob, best = token_logprobs(
                    logits[b : b + 1], torch.tensor([0]), torch.tensor([request.targets[which]])
                )
                kept, hidden = session.passes[-1]
                # A prefill has its entries on the device, although here it is read by steps.
                moved = 0.0 if column - padding[b] < request.dense else float(session.moved[-1][b])
                values[b].append(Query(logprob[0], best[0], float(kept[b]), bool(hidden[b]), moved))
                kept_logits[b].append(logits[b])
    selects = strategy.offloads
    return [_combine(v, selects) for v in values], [torch.stack(x) for x in kept_logits]


def step_forward(wrapped: WrappedModel, session, tokens: torch.Tensor, first: int) -> torch.Tensor:
    """One forward pass of ``tokens`` [B, n] at columns ``first`` on; logits [B, n, vocabulary]."""
    columns = torch.arange(first, first + tokens.shape[1], device=tokens.device)
    arguments = {}
    if wrapped.takes_positions:
        arguments["position_ids"] = (columns - session.padding[:, None]).clamp(min=0)
    if bool((session.padding > 0).any()):
        # Recurrent layers of hybrid models skip padding by this mask.
        whole = torch.arange(first + tokens.shape[1], device=tokens.device)
        arguments["attention_mask"] = (whole >= session.padding[:, None]).long()
    out = wrapped.model(input_ids=tokens, cache=session.cache, use_cache=True, **arguments)
    return out.logits
