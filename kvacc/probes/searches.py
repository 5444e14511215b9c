"""The searches for what fits a memory limit: planned, made, and kept like other records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvacc.probes.cases import Search, case_id, plan_searches
from kvacc.probes.config import ProbeConfig
from kvacc.probes.records import CapacityRecord

if TYPE_CHECKING:
    from kvacc.probes.probed_model import ProbedModel
    from kvacc.results import EnvironmentRecord


@dataclass(frozen=True)
class SearchJob:
    """A search with its identity."""

    search: Search
    environment: EnvironmentRecord
    case_id: str


def search_jobs(
    config: ProbeConfig, environment: Callable[[str | None], EnvironmentRecord]
) -> list[SearchJob]:
    """Every search of the configuration.

    Args:
        environment: device as asked for -> where that is.
    """
    jobs = []
    for search in plan_searches(config):
        here = environment(search.entry.device)
        measured = {"searched": search.searched, **config.capacity.model_dump(exclude={"search"})}
        identity = case_id(search.planned.case, f"{here.processor}, {here.device}", measured)
        jobs.append(SearchJob(search, here, identity))
    return jobs


def search_capacity(config: ProbeConfig, job: SearchJob, model: ProbedModel) -> CapacityRecord:
    """Make a search.

    Raises:
        KvaccError: the case cannot run at all, or there is no limit where one is needed.
    """
    from kvacc.probes.capacity import largest_batch, longest_prompt

    find = longest_prompt if job.search.searched == "prompt_tokens" else largest_batch
    return find(
        model,
        job.search.planned,
        limit=config.capacity.limit,
        most=config.capacity.most,
        case_id=job.case_id,
        environment=job.environment,
    )


def outcome_of(record: CapacityRecord) -> str:
    """``fits 5,632, bound by prefill``"""
    return f"fits {record.fits:,}, bound by {record.bound_by}"
