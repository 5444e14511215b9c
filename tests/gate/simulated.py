"""Simulated runs for the gate: paired zeros and ones with a known truth, as the gate takes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy

from kvacc.gate.matching import Pair


class Numbers:
    """Stands for a ``Packed`` list."""

    def __init__(self, values):
        self.values = values

    def numbers(self):
        return self.values


@dataclass
class Cell:
    """What the verdicts read of a snapshot, without its checks: thousands are made."""

    values: Numbers
    labels: numpy.ndarray | None
    task: dict
    setting: str = "h2o 0.2 stream"
    label: str = "cell"
    cell_id: str = "id"
    fewshot_sampler: str = "default"
    shots_label: str = "0-shot"
    spec: dict = field(default_factory=lambda: {"strategy": "h2o", "options": {}, "shots": 0})
    model: dict = field(default_factory=lambda: {"name": "m"})
    depths: None = None
    loglikelihoods: Numbers | None = None
    responses_sha256: None = None
    fidelity: dict = field(default_factory=dict)

    @property
    def task_label(self):
        return self.task["name"]

    def cluster_labels(self):
        return self.labels


def independent(random, items, discordance, drop):
    """(before, now): each item is lost with (discordance + drop) / 2 and gained with the rest."""
    draw = random.random(items)
    change = numpy.where(draw < (discordance + drop) / 2, -1, numpy.where(draw < discordance, 1, 0))
    before = numpy.where(change == 0, random.random(items) < 0.6, change < 0).astype(float)
    return before, before + change, None


def clustered(random, haystacks, questions, discordance, drop, together=1.0):
    """The same, where the questions about one haystack flip together with chance ``together``."""
    items = haystacks * questions
    labels = numpy.repeat(numpy.arange(haystacks), questions)
    shared = numpy.repeat(random.random(haystacks), questions)
    draw = numpy.where(random.random(items) < together, shared, random.random(items))
    change = numpy.where(draw < (discordance + drop) / 2, -1, numpy.where(draw < discordance, 1, 0))
    before = numpy.where(change == 0, random.random(items) < 0.6, change < 0).astype(float)
    return before, before + change, labels


def pair(sample, task="task", kind="benchmark"):
    """A pair whose log-likelihoods moved, so that nothing counts as unchanged."""
    before, now, labels = sample
    about = {"name": task, "kind": kind, "primary_metric": "acc", "chance": None}
    moved = SimpleNamespace(numbers=lambda: numpy.ones(1))
    return Pair(
        Cell(Numbers(before), labels, about, loglikelihoods=Numbers(numpy.zeros(1))),
        Cell(Numbers(now), labels, about, loglikelihoods=moved),
    )


def verdicts(make_pairs, limits, runs, seed=20261130):
    """The gate's verdict in each of so many runs."""
    from kvacc.gate.verdicts import judge

    random = numpy.random.default_rng(seed)
    return [judge(make_pairs(random), limits).verdict for _ in range(runs)]


def share(found, verdict):
    """How often, in [0, 1]."""
    return sum(one is verdict for one in found) / len(found)
