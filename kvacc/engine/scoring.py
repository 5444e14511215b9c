"""Log-likelihoods of continuations under a strategy: the parallel path, and the step
path that says the same one token at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from kvacc.engine import attention
from kvacc.engine.fidelity import Divergence, Meter, divergence, positions_of
from kvacc.engine.memory import batch_tokens_for
from kvacc.engine.parallel import ParallelSession
from kvacc.engine.plan import Plan, Request, Row, build_rows, make_plan
from kvacc.engine.prefix import Group, Prefix, group_by_prefix
from kvacc.engine.stepping import RowReading
from kvacc.engine.wrapped import ProjectedLogits, WrappedModel
from kvacc.errors import KvaccError
from kvacc.strategy import Strategy

LOGIT_BYTES = 256 * 2**20
"""Float32 log-softmax held at once, in bytes."""
DIVIDED = 0.75
"""A document wider than a batch is divided when its parts are at most this share of it."""
WHOLE_LOGIT_BYTES = 4 * LOGIT_BYTES
"""Logits of a batch up to which they are computed at once, in bytes; more (long texts scored as a
whole) are computed in blocks of rows."""

PASS_TOKENS = {"cpu": 48, "cuda": 2048}
"""A forward pass costs as much as reading so many tokens more: all weights are fetched, and every
operation is started, whatever it reads."""
EVEN_TOKENS = 1024
"""Padding that only attention sees counts as a whole token in rows of this width, and as a share of one
in narrower ones, where attention is the smaller part of the work. An estimate, not a measurement."""
MOST_PADDED = 2
"""Places of a packed batch, over the tokens that it may hold."""
PREFIX_SHARE = 8
"""A token of a shared prefix counts as an eighth of one in a batch: it is stored, not computed."""


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
        kl, agreement, loglikelihood_difference: against ``full``, where that is measured; as in
            :class:`kvacc.records.RequestRecord`.
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
    kl: float | None = None
    agreement: float | None = None
    loglikelihood_difference: float | None = None


def score_documents(
    wrapped: WrappedModel,
    documents: Sequence[Sequence[Request]],
    strategy: Strategy,
    batch_tokens: int | None = None,
    progress: Callable[[int], None] | None = None,
    reference: bool = False,
    meter: Meter | None = None,
) -> list[list[Score]]:
    """Score every request of every document on the parallel path.

    Args:
        documents: requests that may share tokens, such as the options of a question.
        batch_tokens: tokens per forward pass (padded ones in models that are given rows), by free
            memory when not given; halved when memory runs out.
        progress: called with the number of requests finished since the last call.
        meter: sums what is found at each position; with references it also has every strategy
            compared with ``full``, whose own answers are kept there when it is the strategy.

    Returns:
        a Score for each request, in the order given.
    """
    batch_tokens = batch_tokens or batch_tokens_for(wrapped.model)
    share = wrapped.shares_trees and strategy.shares_trees
    everything = Group(0, list(range(len(documents))))
    run = _Run(wrapped, strategy, share, batch_tokens, progress, reference, meter)
    numbered: list[list[tuple[int, Request]]] = []
    for document in documents:
        numbered.append(list(enumerate(document, start=len(run.requests))))
        run.requests += document
    for group in group_by_prefix(documents, strategy) if share else [everything]:
        run.score(group, [numbered[index] for index in group.documents])
    answers = iter([run.scores[number] for number in range(len(run.requests))])
    return [[next(answers) for _ in document] for document in documents]


@dataclass
class _Run:
    """The scoring of documents, group by group."""

    wrapped: WrappedModel
    strategy: Strategy
    share: bool
    batch_tokens: int
    progress: Callable[[int], None] | None
    reference: bool
    meter: Meter | None
    requests: list[Request] = field(default_factory=list)
    scores: dict[int, Score] = field(default_factory=dict)

    def score(self, group: Group, documents: list[list[tuple[int, Request]]]) -> None:
        """Score the documents of one group, which may share a prefix."""
        prefix = self._prefix(group, documents[0][0][1]) if group.tokens else None
        after = prefix.tokens if prefix else 0
        rows = [
            row for items in documents for row in _rows_within(items, self.share, self.batch_tokens, after)
        ]
        # Longest first: memory problems show at once, and neighbours pad each other little.
        rows.sort(key=lambda row: -len(row.tokens))
        sizes: list[int] = []
        while rows:
            if not sizes:
                # A row's own copy of the prefix takes memory, too.
                widths = [len(row.tokens) + after // PREFIX_SHARE for row in rows]
                sizes = batch_sizes(
                    widths, self.batch_tokens, self._pass_tokens, packs=self.wrapped.shares_trees
                )
            count = sizes.pop(0)
            batch, rest = rows[:count], rows[count:]
            try:
                done = _score_batch(
                    self.wrapped, batch, self.strategy, self.requests, self.reference, self.meter, prefix
                )
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                rows, sizes = self._smaller(batch, rest, after), []
                continue
            self.scores |= done
            if self.progress:
                self.progress(len(done))
            rows = rest

    @property
    def _pass_tokens(self) -> int:
        return PASS_TOKENS.get(self.wrapped.device.type, PASS_TOKENS["cpu"])

    def _prefix(self, group: Group, request: Request) -> Prefix | None:
        try:
            return self.wrapped.read_prefix(request, group.tokens, self.strategy, self.reference)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None  # each document reads it by itself, or says that it does not fit

    def _smaller(self, batch: list[Row], rest: list[Row], after: int) -> list[Row]:
        """The rows to go on with when ``batch`` did not fit in memory."""
        if len(batch) > 1:
            self.batch_tokens = max(1, self.batch_tokens // 2)
            return batch + rest
        halves = _split(batch[0], self.requests, self.share, after)
        if not halves:
            raise KvaccError(
                f"one row of {after + len(batch[0].tokens)} tokens does not fit in memory; "
                "use a smaller model, a lower max_length or another device"
            ) from None
        return sorted(halves + rest, key=lambda row: -len(row.tokens))


def batch_sizes(widths: Sequence[int], limit: int, pass_tokens: int, packs: bool = False) -> list[int]:
    """How many of the rows, longest first, go into each batch, so that padding and passes together
    cost least.

    Args:
        widths: tokens of each row, descending; a batch is as wide as its first.
        limit: tokens of a batch, except where one row is wider: padded ones, or with ``packs`` those
            that are read.
        pass_tokens: what a pass costs, whatever it reads.
        packs: only attention sees padding (:mod:`kvacc.engine.packing`).
    """
    count = len(widths)
    before = [0, *itertools.accumulate(widths)]
    cost, size = [0.0] * (count + 1), [0] * count
    for first in range(count - 1, -1, -1):
        price = min(1.0, widths[first] / EVEN_TOKENS) if packs else 1.0
        best = None
        for end in range(first + 1, count + 1):
            read = before[end] - before[first]
            padded = (end - first) * widths[first]
            fits = read <= limit and padded <= MOST_PADDED * limit if packs else padded <= limit
            if not fits and end > first + 1:
                break
            here = read + price * (padded - read) + cost[end]
            if best is None or here < best:
                best, size[first] = here, end - first
        cost[first] = best + pass_tokens
    sizes, first = [], 0
    while first < count:
        sizes.append(size[first])
        first += size[first]
    return sizes


def is_out_of_memory(error: BaseException) -> bool:
    """GPUs raise a class of their own; PyTorch's CPU allocator says it in words."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _split(row: Row, requests: Sequence[Request], share: bool, after: int) -> list[Row]:
    """Two rows for the requests of one; none where there is a single request."""
    items = [(number, requests[number]) for number in row.queries]
    half = len(items) // 2
    parts = (items[:half], items[half:]) if half else ()
    return [row for part in parts for row in build_rows(part, share, after)]


def _rows_within(items: list[tuple[int, Request]], share: bool, limit: int, after: int) -> list[Row]:
    """Trees of a document's requests, none wider than a batch where dividing them helps."""
    rows = build_rows(items, share, after)
    widest = max((len(row.tokens) for row in rows), default=0)
    if len(items) > 1 and widest > limit and any(len(row.queries) > 1 for row in rows):
        half = len(items) // 2
        parts = (items[:half], items[half:])
        divided = [row for part in parts for row in _rows_within(part, share, limit, after)]
        # Options share their context: where that is nearly all, parts would be as wide as the whole.
        if max(len(row.tokens) for row in divided) <= DIVIDED * widest:
            return divided
    return rows


def _score_batch(
    wrapped: WrappedModel,
    rows: list[Row],
    strategy: Strategy,
    requests: list[Request],
    reference: bool,
    meter: Meter | None,
    prefix: Prefix | None,
) -> dict[int, Score]:
    plan = make_plan(rows, strategy)
    references = meter.references if meter else None
    compares = references is not None and strategy.name != "full"
    size = int(plan.counted.sum()) * wrapped.vocabulary * wrapped.model.dtype.itemsize
    logits, session = wrapped.parallel(
        plan,
        strategy,
        reference=reference,
        weigh=compares,
        keep_hidden=references is not None,
        whole_logits=size <= WHOLE_LOGIT_BYTES,
        prefix=prefix,
    )
    order = {tuple(at): n for n, at in enumerate(plan.counted.nonzero().tolist())}
    wanted, targets, owners = [], [], []
    for b, row in enumerate(rows):
        for number, queries in row.queries.items():
            for query, target in zip(queries, requests[number].targets, strict=True):
                wanted.append(order[b, query])
                targets.append(target)
                owners.append((number, b, query))
    wanted, targets = torch.tensor(wanted), torch.tensor(targets)
    logprobs, best = token_logprobs(logits, wanted, targets)
    if not all(map(math.isfinite, logprobs)):
        raise KvaccError(
            f"{strategy!r}: a log-likelihood is not a finite number (the model overflows in "
            f"{wrapped.model.dtype}); use dtype=bfloat16 or float32"
        )
    found = None
    if compares:
        full = references.states(wrapped, rows, requests)
        found = divergence(wrapped, full, session.hidden_states, wanted, targets)
    elif references is not None:
        references.add_batch(rows, requests, session.hidden_states)
    kept = (session.kept / session.layers).cpu()
    hidden, moved = session.hidden.cpu(), session.moved.cpu()
    mass = _by_layer(session.mass, kept.shape, wrapped.layers)
    recall = _by_layer(session.recall, kept.shape, wrapped.layers)
    gathered: dict[int, list[Query]] = {}
    for i, (number, b, query) in enumerate(owners):
        measured = Query(
            logprobs[i], best[i], float(kept[b, query]), bool(hidden[b, query]), float(moved[b, query])
        )
        measured.mass = None if mass is None else mass[b, query]
        measured.recall = None if recall is None else recall[b, query]
        if found is not None:
            n = wanted[i]
            measured.kl, measured.agrees = float(found.kl[n]), bool(found.agrees[n])
            measured.difference = float(found.difference[i])
        gathered.setdefault(number, []).append(measured)
    if meter:
        _add_to_meter(meter, plan, session, owners, wanted, logprobs, found, mass)
    selects = bool(session.recall)
    return {number: _combine(queries, selects) for number, queries in gathered.items()}


def _add_to_meter(
    meter: Meter,
    plan: Plan,
    session: ParallelSession,
    owners: list[tuple[int, int, int]],
    wanted: torch.Tensor,
    logprobs: list[float],
    found: Divergence | None,
    mass: torch.Tensor | None,
) -> None:
    position = positions_of(plan, owners)
    if found is None:
        meter.add(position, logprobs)
        return
    at = mass[[b for _, b, _ in owners], [query for _, _, query in owners]] if mass is not None else None
    meter.add(
        position,
        logprobs,
        found.kl[wanted].tolist(),
        found.agrees[wanted].tolist(),
        found.difference.tolist(),
        None if at is None else at.nanmean(-1).tolist(),
    )
    meter.add_mass(session.mass_by_head, session.heads, wanted)


@dataclass
class Query:
    """What was measured of one scored query; ``mass`` and ``recall`` [layers], NaN in a layer
    that reads everything, where they are known."""

    logprob: float
    greedy: bool
    kept: float
    hidden: bool
    moved: float = 0.0
    mass: torch.Tensor | None = None
    recall: torch.Tensor | None = None
    kl: float | None = None
    agrees: bool | None = None
    difference: float | None = None


def _by_layer(measured: dict[int, torch.Tensor], shape: torch.Size, layers: int) -> torch.Tensor | None:
    """float64 [B, T, layers], NaN in a layer that reads everything; None when none was measured."""
    if not measured:
        return None
    out = torch.full((*shape, layers), float("nan"), dtype=torch.float64)
    for layer, value in measured.items():
        out[..., layer] = value.cpu()
    return out


def _combine(queries: list[Query], selects: bool) -> Score:
    count = len(queries)
    score = Score(
        sum(query.logprob for query in queries),
        all(query.greedy for query in queries),
        sum(query.kept for query in queries) / count,
        any(query.hidden for query in queries),
        sum(query.moved for query in queries) / count if selects else None,
    )
    for name in ("mass", "recall"):
        if getattr(queries[0], name) is None:
            continue
        mean = torch.stack([getattr(query, name) for query in queries]).mean(0)
        whole = "attention_mass" if name == "mass" else name
        score = replace(score, **{whole: float(mean.nanmean()), f"{name}_by_layer": _known(mean)})
    if queries[0].kl is not None:
        score = replace(
            score,
            kl=math.fsum(query.kl for query in queries) / count,
            agreement=sum(query.agrees for query in queries) / count,
            loglikelihood_difference=math.fsum(query.difference for query in queries),
        )
    return score


def _known(values: torch.Tensor) -> tuple[float | None, ...]:
    return tuple(None if math.isnan(value) else value for value in values.tolist())


def token_logprobs(
    logits: torch.Tensor | ProjectedLogits, rows: torch.Tensor, targets: torch.Tensor
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


def step_forward(
    wrapped: WrappedModel, session, tokens: torch.Tensor, first: int, last_only: bool = False
) -> torch.Tensor:
    """One forward pass of ``tokens`` [B, n] at columns ``first`` on; logits [B, n, vocabulary], or
    with ``last_only`` those of the last column alone where the family can leave out the others."""
    columns = torch.arange(first, first + tokens.shape[1], device=tokens.device)
    arguments = {}
    if last_only and wrapped.model._supports_logits_to_keep():
        arguments["logits_to_keep"] = 1
    if wrapped.takes_positions:
        arguments["position_ids"] = (columns - session.padding[:, None]).clamp(min=0)
    if bool((session.padding > 0).any()):
        # Recurrent layers of hybrid models skip padding by this mask.
        whole = torch.arange(first + tokens.shape[1], device=tokens.device)
        arguments["attention_mask"] = (whole >= session.padding[:, None]).long()
    out = wrapped.model(input_ids=tokens, cache=session.cache, use_cache=True, **arguments)
    return out.logits
