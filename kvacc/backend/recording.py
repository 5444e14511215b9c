"""A record of each request: what the engine did for it and measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lm_eval.api.instance import Instance

from kvacc.backend.generation import GeneratedRow
from kvacc.backend.requests import Prepared, empty_text
from kvacc.budget import EVERYTHING
from kvacc.engine.scoring import Score
from kvacc.records import RequestRecord, fidelity_of, mean_fidelity, mean_selection, selection_of
from kvacc.strategy import Strategy


@dataclasses.dataclass(frozen=True)
class Recorder:
    """Makes the records of requests that ran under a strategy."""

    strategy: Strategy
    bos_token_id: int | None

    def scored(self, prepared: Prepared, score: Score, kind: str = "loglikelihood") -> RequestRecord:
        instance, request = prepared.instance, prepared.request
        return RequestRecord(
            task=instance.task_name,
            doc_id=instance.doc_id,
            option=instance.idx,
            kind=kind,
            prompt_tokens=prepared.prompt_tokens,
            scored_tokens=len(request.targets),
            truncated_tokens=prepared.truncated,
            budget_entries=self._entries(request.compressed, len(request.tokens)),
            kept_fraction=score.kept_fraction,
            acted=score.hidden,
            unreachable_tokens=prepared.unreachable if self.strategy.has_budget else 0,
            bos_tokens=self._leading_bos(request.tokens),
            loglikelihood=score.loglikelihood,
            greedy=score.greedy,
            **selection_of(score),
            **fidelity_of(score),
            compared_tokens=0 if score.kl is None else len(request.targets),
        )

    def rolling(
        self, instance: Instance, windows: list[Prepared], scores: list[Score], total: float
    ) -> RequestRecord:
        """One record of a whole text, its windows weighted by their tokens."""
        if not windows:  # an empty text: nothing to score, and nothing hidden
            nothing = Score(total, True, 1.0, False)
            return self.scored(empty_text(instance), nothing, "loglikelihood_rolling")
        counts = [len(w.request.targets) for w in windows]
        scored = sum(counts)
        kept = sum(s.kept_fraction * n for s, n in zip(scores, counts, strict=True)) / scored
        greedy, hidden = all(s.greedy for s in scores), any(s.hidden for s in scores)
        measured = mean_selection(scores, counts) | mean_fidelity(scores, counts)
        merged = Score(total, greedy, kept, hidden, **measured)
        record = self.scored(windows[0], merged, "loglikelihood_rolling")
        compared = 0 if merged.kl is None else scored
        return dataclasses.replace(record, scored_tokens=scored, compared_tokens=compared)

    def generated(self, instance: Instance, row: GeneratedRow) -> RequestRecord:
        prompt, measured = row.prompt, row.measured
        length = len(prompt.tokens)
        return RequestRecord(
            task=instance.task_name,
            doc_id=instance.doc_id,
            option=instance.idx,
            kind="generate_until",
            prompt_tokens=length,
            scored_tokens=measured.tokens,
            truncated_tokens=prompt.truncated,
            budget_entries=self._entries(prompt.reading.compressed, length + measured.tokens),
            kept_fraction=measured.kept_fraction,
            acted=measured.hidden,
            # The first token comes from the prompt's last query.
            unreachable_tokens=int(prompt.reading.dense >= length and self.strategy.has_budget),
            bos_tokens=self._leading_bos(prompt.tokens),
            **selection_of(measured),
        )

    def _leading_bos(self, tokens: Sequence[int]) -> int:
        # Chat templates may use the same token to open every turn; only the first are meant.
        return next((i for i, token in enumerate(tokens) if token != self.bos_token_id), len(tokens))

    def _entries(self, compressed: int, seen: int) -> int | None:
        """The budget that held at the end of a request of ``seen`` tokens; None without a limit."""
        entries = self.strategy.budget.entries(compressed, seen) if self.strategy.has_budget else EVERYTHING
        return None if entries == EVERYTHING else entries
