"""lm-eval's task object for long texts: options in, documents and metrics out.

Every text is read in windows (the backend's ``window``, by default the model's context) under
protocol ``stream``: each token is predicted from the earlier ones of its window, under the budget.
lm-eval's own metrics weigh texts by their length; ``mean_bits_per_byte`` gives each text one
value, so that two runs can be compared text by text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from kvacc.tasks.longtext.texts import documents
from lm_eval.api.task import ConfigurableTask

METRICS = {
    "mean_bits_per_byte": "mean",
    "word_perplexity": "weighted_perplexity",
    "byte_perplexity": "weighted_perplexity",
    "bits_per_byte": "bits_per_byte",
}


class LongTextTask(ConfigurableTask):
    """Texts scored as a whole.

    Args:
        config: lm-eval's task configuration; ``texts`` and ``characters`` come with its metadata.

    Raises:
        KvaccError: the texts cannot be read.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        config = dict(config or {})
        config.pop("class", None)
        metadata = dict(config.get("metadata") or {})
        self.made = documents(metadata.get("texts"), metadata.get("characters"))
        config["process_results"] = scores
        config["metric_list"] = [
            {"metric": name, "aggregation": aggregation, "higher_is_better": False}
            for name, aggregation in METRICS.items()
        ]
        super().__init__(config=config)

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        """The split ``test`` with the documents; nothing is fetched from anywhere."""
        from datasets import Dataset

        self.dataset = {"test": Dataset.from_list(self.made)}


def scores(doc: dict[str, Any], results: list[Any]) -> dict[str, Any]:
    """lm-eval's metrics of a text's log-likelihood (nats), words and bytes counted as there."""
    [loglikelihood] = results
    text = doc["text"]
    words, size = len(re.split(r"\s+", text)), len(text.encode())
    return {
        "mean_bits_per_byte": -loglikelihood / (size * math.log(2)),
        "word_perplexity": (loglikelihood, words),
        "byte_perplexity": (loglikelihood, size),
        "bits_per_byte": (loglikelihood, size),
    }
