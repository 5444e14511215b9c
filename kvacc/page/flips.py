"""The items that a strategy lost or gained, for the page's explorer.

Texts of documents are not in the results; an item is told by its number and the hash of
its content, with both answers and how sure each was. The margin is the log-likelihood of
the right option minus that of the best wrong one, in nats: above 0 the item is right.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvacc.leaderboard_rows import Row
from kvacc.pairing import DocumentKey, metric_column
from kvacc.results import METRIC_PREFIX, Cell

MOST_BYTES = 400_000
"""Of all flips as JSON. Beyond it each row shows fewer, those that moved farthest, and says so."""
_LONGEST_ANSWER = 60


@dataclass(frozen=True)
class Answer:
    """How a cell answered one document."""

    right: bool
    options: tuple[float | None, ...]
    """Log-likelihood of each option."""
    response: str | None
    """A generated answer."""
    target: str | None

    def pick(self) -> int | None:
        """The option with the highest log-likelihood, the first of equals as in lm-eval."""
        known = [value for value in self.options if value is not None]
        if len(known) < 2 or len(known) < len(self.options):
            return None
        return max(range(len(known)), key=lambda option: (known[option], -option))

    def margin(self, correct: int) -> float | None:
        """Of option ``correct``, in nats; None where it is not finite."""
        others = [value for option, value in enumerate(self.options) if option != correct]
        if None in self.options or not others:
            return None
        margin = self.options[correct] - max(others)
        return round(margin, 3) + 0.0 if abs(margin) < float("inf") else None


def flip_data(cells: Mapping[str, Cell], rows: Sequence[Row], most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """What the explorer shows.

    Returns:
        ``documents``, a list for each table with ``[id, hash, right answer, full's answer,
        full's margin, rows that lost it, rows that gained it]`` per flipped item; and ``rows``:
        cell id -> ``{table, compared, lost, gained, hidden}``, each flip as ``[place among the
        documents, answer, margin]``.
    """
    tables: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        tables[row.group].append(row)
    documents: list[list[list[Any]]] = []
    entries: dict[str, dict[str, Any]] = {}
    for members in tables.values():
        compared = [row for row in members if row.flips_lost is not None]
        if compared:
            known, found = _table(cells, members, compared)
            for entry in found.values():
                entry["table"] = len(documents)
            documents.append(known)
            entries.update(found)
    return _fitting(documents, entries, most_bytes)


def _table(
    cells: Mapping[str, Cell], members: Sequence[Row], compared: Sequence[Row]
) -> tuple[list[list[Any]], dict[str, dict[str, Any]]]:
    """Documents and rows of one table."""
    answers = {row.cell_id: _answers(cells[row.cell_id]) for row in members if row.is_full or row in compared}
    picks = compared[0].metric.split(",")[0] == "acc"
    documents: dict[DocumentKey, list[Any]] = {}
    entries: dict[str, dict[str, Any]] = {}
    for row in compared:
        full = answers[_baseline(row, members, cells).cell_id]
        own = answers[row.cell_id]
        flipped = [key for key in own if own[key].right != full[key].right]
        lost, gained = [], []
        for key in flipped:
            correct = _correct(full[key], own[key]) if picks else None
            if key not in documents:
                answer, margin = _shown(full[key], correct, picks)
                target = correct if correct is not None else _cut(full[key].target)
                documents[key] = [key[0], key[1][:8], target, answer, margin, 0, 0]
            documents[key][5 if full[key].right else 6] += 1
            (lost if full[key].right else gained).append((key, *_shown(own[key], correct, picks)))
        if (len(lost), len(gained)) != (row.flips_lost, row.flips_gained):
            raise RuntimeError(
                f"flips of cell {row.cell_id}: {len(lost)}/{len(gained)}, the row says otherwise"
            )
        entries[row.cell_id] = {"lost": lost, "gained": gained, "compared": len(compared)}
    ordered = sorted(documents)
    place = {key: index for index, key in enumerate(ordered)}
    for entry in entries.values():
        for way in ("lost", "gained"):
            entry[way] = [
                [place[key], answer, margin] for key, answer, margin in sorted(entry[way], key=lambda e: e[0])
            ]
    return [documents[key] for key in ordered], entries


def _baseline(row: Row, members: Sequence[Row], cells: Mapping[str, Cell]) -> Row:
    """The full cell that the row was compared with, by the leaderboard's own rule."""
    protocol = cells[row.cell_id].spec.protocol
    full = [other for other in members if other.is_full]
    return min(full, key=lambda other: (cells[other.cell_id].spec.protocol != protocol, other.cell_id))


def _answers(cell: Cell) -> dict[DocumentKey, Answer]:
    """By document, those that have a value of the primary metric."""
    table = cell.load_samples()
    metric = metric_column(cell)
    if metric not in table.column_names:
        metric = METRIC_PREFIX + cell.task.primary_metric
    names = ["doc_id", "doc_hash", "option", "loglikelihood", "response", "target", metric]
    by_document: dict[DocumentKey, list[dict[str, Any]]] = defaultdict(list)
    for sample in table.select(names).to_pylist():
        if sample[metric] is not None:
            key = (-1 if sample["doc_id"] is None else sample["doc_id"], sample["doc_hash"] or "")
            by_document[key].append(sample)
    return {
        key: Answer(
            right=samples[0][metric] == 1,
            options=tuple(
                sample["loglikelihood"] for sample in sorted(samples, key=lambda s: s["option"] or 0)
            ),
            response=samples[0]["response"],
            target=samples[0]["target"],
        )
        for key, samples in by_document.items()
    }


def _correct(full: Answer, own: Answer) -> int | None:
    """The right option of an item that flipped: what the side that is right chose."""
    return (full if full.right else own).pick()


def _shown(answer: Answer, correct: int | None, picks: bool) -> tuple[Any, float | None]:
    """An answer, as an option's number or as text, and its margin."""
    if answer.response is not None:
        return _cut(answer.response), None
    if not picks or correct is None:
        return None, None
    return answer.pick(), answer.margin(correct)


def _cut(text: str | None) -> str | None:
    if text is None:
        return None
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_ANSWER else text[: _LONGEST_ANSWER - 1] + "\u2026"


def _fitting(documents: list, entries: dict[str, dict[str, Any]], most_bytes: int) -> dict[str, Any]:
    """At most ``most_bytes`` of flips, cut evenly: the same most for every row and direction."""
    longest = max([len(e[way]) for e in entries.values() for way in ("lost", "gained")] or [0])
    most = longest
    while True:
        data = _cut_to(documents, entries, most)
        if most <= 1 or len(json.dumps(data, separators=(",", ":"))) <= most_bytes:
            return data
        most = int(most * 0.8)


def _cut_to(documents: list, entries: dict[str, dict[str, Any]], most: int) -> dict[str, Any]:
    """Documents that no row shows any more are left out too."""
    kept: dict[str, dict[str, Any]] = {}
    used: list[set[int]] = [set() for _ in documents]
    for cell_id, entry in entries.items():
        known = documents[entry["table"]]
        shown = {way: _farthest(entry[way], known, most) for way in ("lost", "gained")}
        hidden = sum(len(entry[way]) - len(shown[way]) for way in shown)
        kept[cell_id] = {"table": entry["table"], "compared": entry["compared"], "hidden": hidden, **shown}
        used[entry["table"]] |= {flip[0] for way in shown.values() for flip in way}
    places = [{old: new for new, old in enumerate(sorted(numbers))} for numbers in used]
    for entry in kept.values():
        for way in ("lost", "gained"):
            entry[way] = [[places[entry["table"]][old], *rest] for old, *rest in entry[way]]
    return {
        "documents": [[known[i] for i in sorted(u)] for known, u in zip(documents, used, strict=True)],
        "rows": kept,
    }


def _farthest(flips: list[list[Any]], documents: list[list[Any]], most: int) -> list[list[Any]]:
    """The ``most`` whose margin moved farthest, in the order of documents."""
    if len(flips) <= most:
        return flips

    def moved(flip: list[Any]) -> float:
        before, after = documents[flip[0]][4], flip[2]
        return 0.0 if before is None or after is None else abs(after - before)

    return sorted(sorted(flips, key=lambda flip: (-moved(flip), flip[0]))[:most])
