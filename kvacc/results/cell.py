"""cell.json: what was run and what came out, part by part."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from kvacc.errors import KvaccError
from kvacc.results.layout import SAMPLES_FILE, SCHEMA_VERSION
from kvacc.results.samples import read_samples, samples_table
from kvacc.shots import DEFAULT_SAMPLER

if TYPE_CHECKING:
    import pyarrow


# Sums of float32 probabilities exceed 1 by their rounding.
_Share = Annotated[float, Field(ge=0, le=1 + 1e-4, allow_inf_nan=False)]
_Natural = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Record(BaseModel):
    """A part of cell.json: unknown fields are refused, so that none gets lost."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class SpecRecord(_Record):
    """What was asked for; ``cell_id`` is a hash of it."""

    model: dict[str, Any] = Field(description="Model as asked for: pretrained, revision, dtype and so on.")
    strategy: str = Field(description="Name of the strategy.")
    options: dict[str, Any] = Field(default_factory=dict, description="Hyper-parameters except the budget.")
    budget: str | None = Field(default=None, description="Entries kept, canonical text; null for full.")
    budget_of: str = Field(default="prompt", description="What a fraction refers to: prompt or seen.")
    protocol: str = Field(description="When compression acts: stream, context or serve.")
    task: str = Field(description="Task id.")
    shots: int | None = Field(default=None, description="Few-shot examples; null is the task's own.")
    limit: int | None = Field(default=None, description="First items of the task used; null is all.")
    seed: int = Field(default=1234, description="Seed of the few-shot sampler.")
    tail_tokens: int = Field(default=32, description="Tokens after the context where the task marks none.")
    task_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the task that differ from its defaults; a file by name and content hash.",
    )
    fidelity: bool = Field(default=False, description="Whether distributions were compared with full's.")
    fewshot_sampler: str = Field(
        default=DEFAULT_SAMPLER, description="How examples were chosen: default or first_n, as in lm-eval."
    )

    @field_validator("budget", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return value if value is None or isinstance(value, (str, bool)) else str(value)


class TaskRecord(_Record):
    """The task as it was run."""

    name: str = Field(description="Task id.")
    version: str = Field(description="Version from the task's own metadata.")
    kind: str = Field(description="benchmark, smoke or retention.")
    source: str = Field(description="Where the documents came from: hub, folder or embedded.")
    data_fingerprint: str = Field(description="sha256 over the documents evaluated.")
    num_items: int = Field(ge=0, description="Documents scored.")
    metrics: list[str] = Field(description="Metrics reported.")
    primary_metric: str = Field(description="The metric that the leaderboard shows.")
    chance: float | None = Field(default=None, description="Score of guessing, in the primary metric's unit.")
    why_source: str = Field(default="", description="Why this source was used.")

    @field_validator("version", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return value if isinstance(value, str) else str(value)


class Score(_Record):
    """One metric's value over all items."""

    value: float = Field(description="Average over the items, in the metric's unit (accuracy: 0 to 1).")
    stderr: float | None = Field(default=None, description="Standard error of value; null when unknown.")

    @field_validator("value", "stderr")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{value} is not a finite number")
        return value


class MeasuredRecord(_Record):
    """What the strategy did, counted while it ran."""

    kept_fraction: float = Field(ge=0, le=1 + 1e-9, description="Visible entries / tokens seen, averaged.")
    acted_share: float = Field(ge=0, le=1 + 1e-9, description="Share of documents with a hidden entry.")
    acted_items: int = Field(ge=0, description="Documents with a hidden entry.")
    budget_entries_median: float | None = Field(default=None, description="Median budget in entries.")
    unreachable_share: float = Field(
        default=0.0, ge=0, le=1 + 1e-9, description="Share of scored tokens predicted before any compression."
    )
    truncated_requests: int = Field(default=0, ge=0, description="Requests cut from the left to fit.")
    scored_tokens: int = Field(default=0, ge=0, description="Tokens scored or generated.")
    prompt_tokens_median: float | None = Field(default=None, description="Median prompt length in tokens.")
    bos_tokens_median: float | None = Field(
        default=None, description="Median count of beginning-of-sequence tokens in a prompt."
    )
    moved_bytes_per_token: float | None = Field(
        default=None, ge=0, allow_inf_nan=False, description="Bytes from host memory per scored token."
    )
    attention_mass: _Share | None = Field(
        default=None,
        description="Share of the true attention on what was read, over layers in which the strategy acts.",
    )
    recall: _Share | None = Field(
        default=None, description="Share of the true top entries that were read, over the layers that select."
    )
    mass_by_layer: list[_Share | None] | None = Field(
        default=None, description="attention_mass of each layer; null where it reads everything."
    )
    recall_by_layer: list[_Share | None] | None = Field(
        default=None, description="recall of each layer; null where it reads everything."
    )


class PositionRecord(_Record):
    """Means over the scored tokens whose queries stand at one bucket of positions."""

    start: int = Field(ge=0, description="First position; 0 is the first token of a text or window.")
    end: int = Field(ge=1, description="Position behind the last.")
    tokens: int = Field(ge=1, description="Scored tokens.")
    kl: _Natural = Field(description="KL(full || strategy), nats per token.")
    agreement: _Share = Field(description="Share of tokens with the same most likely token.")
    loglikelihood_difference: _Finite = Field(description="Strategy minus full, nats per token.")
    mass: _Share | None = Field(
        default=None, description="Attention mass, over the layers in which the strategy acts."
    )


class FidelityRecord(_Record):
    """Distance of the strategy's next-token distributions from full's, on the same tokens."""

    tokens: int = Field(ge=1, description="Tokens compared.")
    kl: _Natural = Field(description="KL(full || strategy), nats per token.")
    kl_stderr: _Natural | None = Field(default=None, description="Standard error, documents clustered.")
    agreement: _Share = Field(description="Share of tokens with the same most likely token.")
    agreement_stderr: _Natural | None = Field(default=None, description="Standard error, likewise.")
    loglikelihood_difference: _Finite = Field(description="Strategy minus full, nats per token.")
    loglikelihood_difference_stderr: _Natural | None = Field(
        default=None, description="Standard error, likewise."
    )
    mass_by_layer_and_head: list[list[_Share] | None] | None = Field(
        default=None,
        description="Attention mass [layers][KV heads]: 1 where a layer reads everything, null where it "
        "does not attend.",
    )
    by_position: list[PositionRecord] = Field(
        default_factory=list, description="The same by position of the query, in buckets that double."
    )


class CurveRecord(_Record):
    """Log-likelihood of the tokens predicted at one bucket of positions of a window."""

    start: int = Field(ge=0, description="First position; 0 is the first token of a window.")
    end: int = Field(ge=1, description="Position behind the last.")
    tokens: int = Field(ge=1, description="Scored tokens.")
    loglikelihood: _Finite = Field(description="Sum over them, nats; perplexity is exp(-sum / tokens).")


class StrategyRecord(_Record):
    """What the strategy says about itself."""

    causal: bool = Field(description="False when a score could depend on later tokens.")
    physical_eviction: bool = Field(description="False when hidden entries stay in memory.")
    is_control: bool = Field(default=False, description="True for a floor that a good strategy must beat.")
    offloads: bool = Field(default=False, description="True when the cache lives in host memory.")
    repr: str = Field(description="The exact constructor call.")


class EnvironmentRecord(_Record):
    """Versions and hardware."""

    kvacc: str = Field(description="Version of kvacc.")
    torch: str = Field(description="Version of torch.")
    transformers: str = Field(description="Version of transformers.")
    lm_eval: str = Field(description="Version of lm-eval.")
    python: str = Field(description="Version of Python.")
    platform: str = Field(description="Operating system.")
    processor: str = Field(description="Processor.")
    device: str = Field(description="Device that ran the model.")
    commit: str | None = Field(default=None, description="Commit of kvacc when run from a checkout.")


class TimingRecord(_Record):
    """Time spent; never a latency figure, because scoring may be masked."""

    seconds: float = Field(ge=0, description="Wall time of the evaluation in seconds.")
    started: str = Field(description="Start in UTC, ISO 8601.")


class Cell(_Record):
    """The content of cell.json."""

    schema_version: int = Field(default=SCHEMA_VERSION, description="Version of this layout.")
    cell_id: str = Field(min_length=1, description="Short hash of spec; also the folder's name.")
    spec: SpecRecord = Field(description="What was asked for.")
    task: TaskRecord = Field(description="The task as it was run.")
    model: dict[str, Any] = Field(description="Fingerprint of the loaded model.")
    scores: dict[str, Score] = Field(description="Scores by metric.")
    measured: MeasuredRecord = Field(description="What the strategy did.")
    strategy: StrategyRecord = Field(description="What the strategy says about itself.")
    environment: EnvironmentRecord = Field(description="Versions and hardware.")
    timing: TimingRecord = Field(description="Time spent.")
    fidelity: FidelityRecord | None = Field(
        default=None, description="Distance from full; null where it was not measured."
    )
    curve: list[CurveRecord] | None = Field(
        default=None, description="By position, of texts scored as a whole; null for other tasks."
    )
    samples_sha256: str = Field(default="", description="Checksum of samples.parquet, set by write_cell.")
    warnings: list[str] = Field(default_factory=list, description="What a reader of the score must know.")
    record_sha256: str = Field(default="", description="Checksum of this file, set by write_cell.")

    _folder: Path | None = PrivateAttr(default=None)

    @field_validator("cell_id")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if value.startswith(".") or "/" in value or "\\" in value or "@" in value:
            raise ValueError(f"{value!r} cannot be a folder's name")
        return value

    @model_validator(mode="after")
    def _has_primary_score(self) -> Cell:
        if self.task.primary_metric not in self.scores:
            raise ValueError(f"scores lack the primary metric {self.task.primary_metric!r}")
        return self

    @property
    def folder(self) -> Path | None:
        """Where the cell was read from; None for one that was just computed."""
        return self._folder

    def record(self) -> dict[str, Any]:
        """cell.json as plain values, whatever subclass this is."""
        return self.model_dump(mode="json", include=set(Cell.model_fields))

    def load_samples(self) -> pyarrow.Table:
        """samples.parquet as a table, one row per request.

        Raises:
            KvaccError: the file is missing, truncated or edited.
        """
        if self._folder is None:
            raise KvaccError(f"cell {self.cell_id} was not read from a folder, so it has no samples file")
        return read_samples(self._folder / SAMPLES_FILE, self.samples_sha256)


class CellResult(Cell):
    """A cell that was just computed, with its samples in memory."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True)

    samples: Any = Field(exclude=True, description="One dict per request, or a pyarrow.Table.")

    def load_samples(self) -> pyarrow.Table:
        """The samples as a table with the columns of samples.parquet."""
        return samples_table(self.samples)
