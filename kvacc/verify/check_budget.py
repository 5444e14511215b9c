"""Invariants 4 and 8: how much is kept, what is promised, and how it is stored."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvacc.verify.bench import Bench, Case, is_evict, is_select
from kvacc.verify.results import Failure, Result, Tally
from kvacc.verify.runs import Difference, Run, positions


def check_budget(bench: Bench) -> Result:
    """4. No query of any layer and head reads more than the budget allows, on either path;
    promised sinks and recents are among what it reads; bytes are those of the entries kept."""
    tally = Tally(4, bench.subject.label)
    if not bench.strategy.has_budget:
        tally.reasons.append("it has no budget: every entry is kept")
        return tally.result()
    for case in bench.cases:
        paths = {"parallel path": bench.parallel}
        if bench.is_causal:
            paths["step path"] = bench.step
        for name, path in paths.items():
            tally.cases += 1
            difference = _beyond_limits(case, path(case))
            if difference is not None:
                return tally.result(bench.failure(case, difference, f"on the {name}"))
    return tally.result(_wrong_bytes(bench, tally))


def _beyond_limits(case: Case, run: Run) -> Difference | None:
    """The first query that reads too much, or lacks what was promised."""
    for query in range(len(case.text)):
        for layer, read in sorted(run.reads.items()):
            for head in range(read.shape[0]):
                row = read[head, query, : query + 1]
                for what, expected, broken in _limits(case, query, row):
                    if broken:
                        return Difference(what, query, expected, positions(row), layer, head)
    return None


def _limits(case: Case, query: int, row: torch.Tensor) -> Iterator[tuple[str, str, bool]]:
    """(what, what is allowed, is it broken) of what the query at that position reads."""
    strategy, text = case.strategy, case.text
    if query < text.dense or (query == 0 and is_evict(strategy)):
        return  # a dense prefill reads everything, and nothing precedes the first token
    allowed = strategy.budget.entries(text.compressed, query + 1)
    if is_select(strategy):
        yield "entries read", f"at most {allowed}", int(row.sum()) > allowed
        return
    # What stayed after the token before, and the query's own entry.
    kept = strategy.budget.entries(text.compressed, query)
    joined = 0
    if text.dense and not strategy.acts_while_decoding:
        kept, joined = strategy.budget.entries(text.compressed, text.dense), query - text.dense
    most = kept + joined + 1
    yield "entries read", f"at most {kept} kept, {joined + 1} new", int(row.sum()) > most
    seen = query - joined
    sinks = min(strategy.sink_count(kept), seen)
    yield "sinks read", f"positions 0 to {sinks - 1}", not bool(row[:sinks].all())
    recents = min(strategy.recent_count(kept), seen)
    yield "recents read", f"positions {seen - recents} to {query}", not bool(row[seen - recents :].all())


def _wrong_bytes(bench: Bench, tally: Tally) -> Failure | None:
    """Bytes reported by the step path, against the entries that were kept or read."""
    if not bench.is_causal:
        tally.reasons.append("no bytes: there is no step path")
        return None
    case = bench.main_case
    if is_select(case.strategy):
        return _wrong_traffic(bench, tally, case)
    return _wrong_memory(bench, tally, case)


def _wrong_memory(bench: Bench, tally: Tally, case: Case) -> Failure | None:
    """What is held after a token, against the entries that the next query read."""
    held: list[_Held] = []
    run = bench.step_again(case, inspect=lambda session, columns: held.append(_Held(session)))
    size = bench.subject.entry_bytes
    tally.cases += 1
    for token, after in enumerate(held[:-1]):
        total = after.others
        for layer, (reported, stored, spare) in after.layers.items():
            # The next query's own entry is new: the others were kept.
            kept = run.reads[layer][:, token + 1, : token + 1].sum(-1)
            expected = int(kept.sum()) * size
            total += expected
            if reported != expected:
                difference = Difference("bytes reported", token, f"{expected}", f"{reported}", layer)
                return bench.failure(case, difference, "entries kept after this token x their size")
            # Heads share a rectangle, as wide as the one that keeps most.
            room = (int(kept.max()) + spare) * len(kept) * size
            if case.strategy.physical_eviction and stored > room:
                difference = Difference("bytes in memory", token, f"at most {room}", f"{stored}", layer)
                return bench.failure(case, difference, "evicted entries still hold memory")
        if after.total != total:
            difference = Difference("bytes of all layers", token, f"{total}", f"{after.total}")
            return bench.failure(case, difference, "what the session reports is not the sum of its layers")
    return None


class _Held:
    """Bytes that a step session reports and holds.

    Attributes:
        total: as the session reports.
        layers: layer -> (reported, in memory, slots that wait for the next token), where the
            strategy acts.
        others: in the model's own windows.
    """

    def __init__(self, session) -> None:
        self.total: int = session.measured_bytes()
        self.layers: dict[int, tuple[int, int, int]] = {}
        self.others = 0
        for index, layer in enumerate(session.cache.layers):
            if getattr(layer, "entries", None) is not None:
                stored = layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes()
                self.layers[index] = (layer.measured_bytes(), stored, int(getattr(layer, "any_order", False)))
            elif getattr(layer, "keys", None) is not None:
                self.others += layer.keys.nbytes + layer.values.nbytes


def _wrong_traffic(bench: Bench, tally: Tally, case: Case) -> Failure | None:
    """Bytes brought from the host pool, against what each query read besides its own entry."""
    moved: list[int] = []
    run = bench.step_again(case, inspect=lambda session, columns: moved.append(int(session.moved[-1][0])))
    tally.cases += 1
    for query in range(case.text.dense, len(case.text)):
        read = sum(int(read[:, query, :query].sum()) for read in run.reads.values())
        expected = read * bench.subject.entry_bytes
        if moved[query] != expected:
            difference = Difference("bytes moved", query, f"{expected}", f"{moved[query]}")
            return bench.failure(case, difference, "entries read besides the query's own x their size")
    return None


def check_heads(bench: Bench) -> Result:
    """8. One kept set per KV head (one in all where heads share a latent), and keys and values
    stored for the model's KV heads, not for its query heads."""
    tally = Tally(8, bench.subject.label)
    case = bench.main_case
    expected = bench.subject.deciding_heads
    for layer, read in sorted(bench.parallel(case).reads.items()):
        tally.cases += 1
        if read.shape[0] != expected:
            difference = Difference("heads that decide", 0, f"{expected}", f"{read.shape[0]}", layer)
            return tally.result(bench.failure(case, difference, "on the parallel path"))
    if not bench.is_causal:
        return tally.result()
    stored: dict[int, tuple[int, int | None]] = {}

    def note(session, columns) -> None:
        for index, layer in enumerate(session.cache.layers):
            if getattr(layer, "entries", None) is not None:
                stored[index] = (layer.keys.shape[1], layer.entries.alive.shape[1])
            elif getattr(layer, "keys", None) is not None:
                stored[index] = (layer.keys.shape[1], None)

    bench.step_again(case, inspect=note)
    for layer, (heads, deciding) in stored.items():
        tally.cases += 1
        if heads != bench.subject.stored_heads:
            difference = Difference("heads stored", 0, f"{bench.subject.stored_heads}", f"{heads}", layer)
            return tally.result(bench.failure(case, difference, "the model has that many KV heads"))
        if deciding is not None and deciding != expected:
            difference = Difference("heads that decide", 0, f"{expected}", f"{deciding}", layer)
            return tally.result(bench.failure(case, difference, "on the step path"))
    return tally.result()
