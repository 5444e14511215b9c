"""A cell's fidelity: what was compared with ``full`` request by request, as means with errors.

The engine (:mod:`kvacc.engine.fidelity`) gives each request its divergence, agreement and
log-likelihood difference, and sums by layer, head and position. Here they become the
:class:`~kvacc.results.FidelityRecord` of a cell. All means are over tokens, so a long answer
counts as often as it has tokens; standard errors treat documents that share a cluster as one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvacc.records import FIDELITY, RequestRecord
from kvacc.results import CurveRecord, FidelityRecord, PositionRecord

if TYPE_CHECKING:
    from kvacc.engine.fidelity import Bucket, Meter


def token_mean(
    values: Sequence[float], tokens: Sequence[int], clusters: Sequence[str]
) -> tuple[float, float | None]:
    """Mean over tokens of requests' values, and its standard error.

    The mean is a ratio of two sums that both vary, ``sum w x / sum w``. Its error is that of the
    mean of the linearised values ``r + w (x - r) / mean(w)`` (Cochran, Sampling Techniques, 1977,
    section 6.3), clustered as in :func:`kvacc.statistics.items_stderr`.

    Args:
        values: means over the tokens of each request. tokens: how many, at least 1.
        clusters: requests of one cluster are not independent.

    Returns:
        the mean, and its standard error; None where no spread can be seen.
    """
    from kvacc.statistics import items_stderr

    total = sum(tokens)
    mean = math.fsum(value * weight for value, weight in zip(values, tokens, strict=True)) / total
    average = total / len(tokens)
    linearised = [
        mean + weight * (value - mean) / average for value, weight in zip(values, tokens, strict=True)
    ]
    return mean, items_stderr(linearised, clusters)


def fidelity_record(
    records: Sequence[RequestRecord], clusters: Sequence[str], meter: Meter, layers: int
) -> FidelityRecord | None:
    """The fidelity of a cell; None when no request was compared with ``full``.

    Args:
        records: of all its requests. clusters: of their documents.
        meter: the sums over these requests. layers: of the model.
    """
    known = [(r, cluster) for r, cluster in zip(records, clusters, strict=True) if r.kl is not None]
    if not known:
        return None
    compared, of_cluster = zip(*known, strict=True)
    tokens = [record.compared_tokens for record in compared]
    found: dict[str, float | None] = {}
    for name in FIDELITY:
        values = [getattr(record, name) for record in compared]
        if name == "loglikelihood_difference":  # a request's is a sum
            values = [value / count for value, count in zip(values, tokens, strict=True)]
        found[name], found[f"{name}_stderr"] = token_mean(values, tokens, of_cluster)
    return FidelityRecord(
        tokens=sum(tokens),
        **found,
        mass_by_layer_and_head=meter.mass_table(layers),
        by_position=[
            _position(at, bucket) for at, bucket in sorted(meter.buckets.items()) if bucket.compared
        ],
    )


def _position(at: tuple[int, int], bucket: Bucket) -> PositionRecord:
    count = bucket.compared
    return PositionRecord(
        start=at[0],
        end=at[1],
        tokens=count,
        kl=bucket.kl / count,
        agreement=bucket.agreements / count,
        loglikelihood_difference=bucket.difference / count,
        mass=bucket.mass / bucket.weighed if bucket.weighed else None,
    )


def curve_records(meter: Meter) -> list[CurveRecord]:
    """Log-likelihood by position of everything that was scored."""
    return [
        CurveRecord(start=at[0], end=at[1], tokens=bucket.tokens, loglikelihood=bucket.loglikelihood)
        for at, bucket in sorted(meter.buckets.items())
    ]
