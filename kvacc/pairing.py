"""Pairing a cell with the ``full`` cell, item by item, or saying why it cannot be done.

Two cells are compared only when they answered the same prompts: same model, task
version and data, and for every document the same document, prompt and target
hashes. Anything else would compare two benchmarks and call it a loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvacc.non_inferiority import detectable_drop, two_sided_p
from kvacc.results import METRIC_PREFIX, Cell
from kvacc.statistics import Difference, Flips, flips, items_stderr, paired_difference

FLOAT_NOISE = 1e-4
"""Largest log-likelihood difference (nats) between two runs of the same computation."""

DocumentKey = tuple[int, str]


@dataclass(frozen=True)
class Items:
    """A cell's documents, in order: what was asked, and the primary metric's values."""

    prompts: dict[DocumentKey, tuple[tuple[int, str, str], ...]]
    """(option, prompt hash, target hash) of each request of a document."""
    values: dict[DocumentKey, float]
    """Documents that have a value of the metric."""
    clusters: dict[DocumentKey, str]
    """Documents that share a passage or haystack share it."""
    loglikelihoods: dict[tuple[DocumentKey, int], float]
    """By document and option; generated answers have none."""

    def mean(self) -> float | None:
        """Average of the values; None without any."""
        return sum(self.values.values()) / len(self.values) if self.values else None

    def stderr(self) -> float | None:
        """Standard error of the average, clustered where documents share a context."""
        values = list(self.values.values())
        return items_stderr(values, [self.clusters[key] for key in self.values])


@dataclass(frozen=True)
class Comparison:
    """A strategy's cell against ``full`` on the same items."""

    difference: Difference | None
    """Strategy minus full, in the metric's unit; None with too few items for an interval."""
    flips: Flips | None
    """Items lost and gained; None when the metric is not 0 or 1 per item."""
    identical: bool
    """No log-likelihood differs by more than float noise: the strategy may have done nothing."""
    p_value: float | None = None
    """Two-sided, of "no difference"; None with too few items."""
    p_method: str | None = None
    """The test that it comes from."""
    detectable: float | None = None
    """Smallest true drop that items like these would show (80 % power), in the metric's unit."""


def metric_column(cell: Cell) -> str:
    """The samples column of the primary metric: ``acc,none`` is in ``metric_acc``."""
    return METRIC_PREFIX + cell.task.primary_metric.split(",")[0]


def read_items(cell: Cell) -> Items:
    """The documents of a cell, from its samples."""
    table = cell.load_samples()
    column = metric_column(cell)
    if column not in table.column_names:
        column = METRIC_PREFIX + cell.task.primary_metric
    names = ["doc_id", "doc_hash", "option", "prompt_hash", "target_hash", "cluster", "loglikelihood"]
    columns: dict[str, list[Any]] = table.select(names).to_pydict()
    has_metric = column in table.column_names
    metric = table[column].to_pylist() if has_metric else [None] * table.num_rows
    prompts: dict[DocumentKey, list[tuple[int, str, str]]] = {}
    values: dict[DocumentKey, float] = {}
    clusters: dict[DocumentKey, str] = {}
    loglikelihoods: dict[tuple[DocumentKey, int], float] = {}
    for doc_id, doc_hash, option, prompt, target, cluster, loglikelihood, value in zip(
        *(columns[name] for name in names), metric, strict=True
    ):
        key = (-1 if doc_id is None else doc_id, doc_hash or "")
        option = 0 if option is None else option
        prompts.setdefault(key, []).append((option, prompt or "", target or ""))
        # A document without a cluster of its own must not join the others without one.
        clusters[key] = cluster if cluster is not None else f"document {key}"
        if value is not None:
            values[key] = value
        if loglikelihood is not None:
            loglikelihoods[key, option] = loglikelihood
    return Items(
        prompts={key: tuple(sorted(prompts[key])) for key in sorted(prompts)},
        values={key: values[key] for key in sorted(values)},
        clusters=clusters,
        loglikelihoods=loglikelihoods,
    )


def why_not_paired(cell: Cell, items: Items, full: Cell, full_items: Items) -> str | None:
    """Why the two cells cannot be compared, or None when they can."""
    if model_identity(cell) != model_identity(full):
        return "the model differs from full's"
    if cell.task.version != full.task.version:
        return f"task version {cell.task.version} differs from full's {full.task.version}"
    if cell.task.primary_metric != full.task.primary_metric:
        return f"metric {cell.task.primary_metric} differs from full's {full.task.primary_metric}"
    if cell.task.data_fingerprint != full.task.data_fingerprint:
        return "the task's data differ from full's"
    if items.prompts.keys() != full_items.prompts.keys():
        return "the documents differ from full's"
    for key, requests in items.prompts.items():
        if requests != full_items.prompts[key]:
            return f"the prompts differ from full's (first at document {key[0]})"
    if not items.values or items.values.keys() != full_items.values.keys():
        return f"there are no values of {cell.task.primary_metric} per item"
    return None


def compare(items: Items, full_items: Items) -> Comparison:
    """Compare two cells that :func:`why_not_paired` allows to be compared."""
    keys = list(items.values)
    strategy_values = [items.values[key] for key in keys]
    full_values = [full_items.values[key] for key in keys]
    clusters = [items.clusters[key] for key in keys]
    tested = two_sided_p(full_values, strategy_values, clusters)
    binary = set(strategy_values) | set(full_values) <= {0.0, 1.0}
    return Comparison(
        difference=paired_difference(full_values, strategy_values, clusters),
        flips=flips(full_values, strategy_values) if binary else None,
        identical=_same_loglikelihoods(items.loglikelihoods, full_items.loglikelihoods),
        p_value=tested[0] if tested else None,
        p_method=tested[1] if tested else None,
        detectable=detectable_drop(full_values, strategy_values, clusters),
    )


def environment_differences(cell: Cell, full: Cell) -> list[str]:
    """Parts of the environment that can change numbers slightly and differ from full's."""
    names = ("kvacc", "torch", "transformers", "lm_eval", "device", "processor")
    return [name for name in names if _told(cell, name) != _told(full, name)]


def _told(cell: Cell, name: str) -> str:
    value = getattr(cell.environment, name)
    # "cpu, 2 threads": the number of threads changes the order of sums only, far below a flip.
    return value.partition(",")[0] if name == "device" else value


def model_identity(cell: Cell) -> dict[str, Any]:
    """The model's fingerprint without where it lay and ran, which do not change its weights."""
    return {name: value for name, value in cell.model.items() if name not in ("device", "device_map", "path")}


def _same_loglikelihoods(ours: dict, theirs: dict) -> bool:
    if not ours or ours.keys() != theirs.keys():
        return False
    # Equality first: two answers of probability 0 are both -inf, whose difference is NaN.
    return all(ours[key] == theirs[key] or abs(ours[key] - theirs[key]) <= FLOAT_NOISE for key in ours)
