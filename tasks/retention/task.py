"""lm-eval's task object for all retention tasks: options in, documents and metrics out.

A YAML file names the kind (``dataset_name``) and the form (``output_type``). Everything else
follows from the options, which come with the task's metadata: lm-eval puts there what its
command line has in ``--metadata`` and ``--model_args``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvacc.tasks.retention.documents import shared_documents
from kvacc.tasks.retention.filler import filler_stamp
from kvacc.tasks.retention.kinds import KINDS
from kvacc.tasks.retention.measure import Measure, measure_for
from kvacc.tasks.retention.scoring import GENERATED, metric_names, multiple_choice
from kvacc.tasks.retention.settings import Settings, settings_of, taken
from lm_eval.api.task import ConfigurableTask

_SPARE_TOKENS = 8
"""What an answer may take beyond the right one's tokens."""


class RetentionTask(ConfigurableTask):
    """A retention task in one of its two forms.

    Args:
        config: lm-eval's task configuration, with ``dataset_name`` (the kind) and metadata.

    Raises:
        KvaccError: an option out of range, no room for the facts, or no such filler.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        config = dict(config or {})
        config.pop("class", None)
        metadata = dict(config.get("metadata") or {})
        self.kind = KINDS[config["dataset_name"]]
        # Other tasks' options and the model's arguments come along: they are not ours to judge.
        self.settings: Settings = settings_of(self.kind, taken(self.kind, metadata))
        measure = measure_for(metadata)
        self.made = shared_documents(self.kind, self.settings, measure, filler_stamp(self.settings.filler))
        generates = config["output_type"] == "generate_until"
        exact = "exact_match" if generates else "acc"
        depths = sorted({doc["depth"] for doc in self.made if doc["depth"] is not None})
        config["process_results"] = GENERATED[self.kind.form] if generates else multiple_choice
        config["metric_list"] = [
            {"metric": name, "aggregation": "mean", "higher_is_better": True}
            for name in metric_names(exact, depths)
        ]
        if generates:
            config["generation_kwargs"] = {
                **(config.get("generation_kwargs") or {}),
                "max_gen_toks": _longest_answer(self.made, measure) + _SPARE_TOKENS,
            }
        super().__init__(config=config)

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        """The split ``test`` with the documents; nothing is fetched from anywhere."""
        from datasets import Dataset

        self.dataset = {"test": Dataset.from_list(self.made)}


def _longest_answer(made: list[dict[str, Any]], measure: Measure) -> int:
    return max(measure.part(" " + answer) for answer in {doc["answer"] for doc in made})
