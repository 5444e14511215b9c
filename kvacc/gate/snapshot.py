"""A cell as the gate compares it: what was run, and the value of every item.

The same record is made of fresh results and read from a baseline file, so that both sides
of a comparison have gone through the same code. A thousand items take some 30 kB.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any

import numpy
from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvacc.errors import KvaccError
from kvacc.pairing import model_identity, read_items
from kvacc.results import METRIC_PREFIX, Cell
from kvacc.shots import DEFAULT_SAMPLER, shots_text

FIDELITY = ("kl", "agreement")
"""Columns of the samples that compare the next-token distributions with ``full``'s."""
_PROMPT_BYTES = 4
_SPEC_KEYS = (
    "model", "strategy", "options", "budget", "budget_of", "protocol", "task", "shots", "limit", "seed",
    "tail_tokens",
)  # fmt: skip
_ENVIRONMENT = ("kvacc", "torch", "transformers", "lm_eval", "device", "processor")


class Packed(BaseModel):
    """Numbers of one type as base64 of their little-endian bytes; zeros and ones as single bits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str = Field(pattern="^(bits|float32|float64|int32)$")
    count: int = Field(ge=0)
    base64: str

    @classmethod
    def of(cls, values: Any, kind: str) -> Packed:
        """Pack a flat list of numbers."""
        if kind == "bits":
            data = numpy.packbits(numpy.asarray(values, dtype=numpy.uint8))
        else:
            data = numpy.asarray(values, dtype=numpy.dtype(kind).newbyteorder("<"))
        return cls(type=kind, count=len(values), base64=base64.b64encode(data.tobytes()).decode())

    def numbers(self) -> numpy.ndarray:
        """The numbers, as float64 or int64."""
        data = base64.b64decode(self.base64, validate=True)
        if self.type == "bits":
            return numpy.unpackbits(numpy.frombuffer(data, numpy.uint8), count=self.count).astype(float)
        found = numpy.frombuffer(data, numpy.dtype(self.type).newbyteorder("<"))
        return found.astype(numpy.int64 if self.type == "int32" else numpy.float64)

    @model_validator(mode="after")
    def _holds_what_it_says(self) -> Packed:
        bits = {"bits": 1, "float32": 32, "float64": 64, "int32": 32}[self.type]
        try:
            size = len(base64.b64decode(self.base64, validate=True))
        except binascii.Error:
            raise ValueError("base64 is damaged") from None
        if size != (self.count * bits + 7) // 8:
            raise ValueError(f"{self.count} numbers of type {self.type} do not fit {size} bytes")
        return self


class Snapshot(BaseModel):
    """One cell, with one value for each item. Items are ordered by document."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    cell_id: str = Field(description="Of the results folder that it was taken from.")
    spec: dict[str, Any] = Field(description="What was asked for.")
    task: dict[str, Any] = Field(description="Name, version, kind, data fingerprint, metric, chance.")
    model: dict[str, Any] = Field(description="Fingerprint of the model, without where it lay.")
    environment: dict[str, str] = Field(description="Versions and hardware, told but never compared.")
    strategy: str = Field(description="The exact constructor call.")
    score: float = Field(allow_inf_nan=False, description="The primary metric over all items.")
    kept_fraction: float = Field(allow_inf_nan=False, description="Visible entries / tokens seen.")
    acted_items: int = Field(description="Documents with a hidden entry.")
    prompts: str = Field(description="The first 4 bytes of a hash of each document's requests, base64.")
    values: Packed = Field(description="The primary metric of each document.")
    clusters: Packed | None = Field(description="Text that a document shares, by number; null: none.")
    depths: Packed | None = Field(description="Place of the fact in the text, 0 to 1; null: no such task.")
    loglikelihoods: Packed | None = Field(description="Of each request, in nats; null: all generated.")
    responses_sha256: str | None = Field(description="Of all generated answers; null: none generated.")
    fidelity: dict[str, Packed] = Field(default_factory=dict, description="Distance from full, by document.")

    @property
    def label(self) -> str:
        """``smollm2-135m h2o 0.2 stream kvacc_passkey 0-shot``, for a person to read."""
        spec = self.spec
        model = str(self.model.get("name") or spec["model"].get("pretrained"))
        parts = [model.rstrip("/").rsplit("/", 1)[-1], self.setting, spec["task"], self.shots_label]
        options = spec.get("task_options") or {}
        return " ".join([*parts, *(f"{name}={options[name]}" for name in sorted(options))])

    @property
    def task_label(self) -> str:
        """``kvacc_passkey length=256``: the task with its options."""
        options = self.spec.get("task_options") or {}
        return " ".join([self.spec["task"], *(f"{name}={options[name]}" for name in sorted(options))])

    @property
    def setting(self) -> str:
        """``h2o 0.2 stream``; ``full`` alone, which protocols do not change."""
        spec = self.spec
        if spec["strategy"] == "full":
            return "full"
        budget = [] if spec["budget"] is None else [spec["budget"]]
        of = [] if spec["budget_of"] == "prompt" else [f"of {spec['budget_of']}"]
        return " ".join([spec["strategy"], *budget, *of, spec["protocol"]])

    @property
    def fewshot_sampler(self) -> str:
        """How examples were chosen; baselines say it only where it is not lm-eval's default."""
        return self.spec.get("fewshot_sampler", DEFAULT_SAMPLER)

    @property
    def shots_label(self) -> str:
        """``5-shot``, or ``5-shot first_n``."""
        return shots_text(self.spec["shots"], self.fewshot_sampler)

    @property
    def items(self) -> int:
        """Documents."""
        return self.values.count

    def cluster_labels(self) -> numpy.ndarray | None:
        """A number per document, equal where documents share a text; None where none do."""
        return None if self.clusters is None else self.clusters.numbers()

    def _require_whole_lists(self) -> None:
        lists = {"clusters": self.clusters, "depths": self.depths, **self.fidelity}
        for name, packed in lists.items():
            if packed is not None and packed.count != self.items:
                raise ValueError(f"{name} has {packed.count} entries for {self.items} items")
        if not self.items:
            raise ValueError("there are no items")
        values = self.values.numbers()
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError("values has a number that is not between 0 and 1")
        if len(self.prompt_hashes()) != self.items:
            raise ValueError(f"prompts has {len(self.prompt_hashes())} entries for {self.items} items")

    def prompt_hashes(self) -> list[bytes]:
        """The hash of each document's requests."""
        data = base64.b64decode(self.prompts, validate=True)
        return [data[start : start + _PROMPT_BYTES] for start in range(0, len(data), _PROMPT_BYTES)]

    @model_validator(mode="after")
    def _is_whole(self) -> Snapshot:
        try:
            self._require_whole_lists()
        except binascii.Error:
            raise ValueError("prompts: base64 is damaged") from None
        for key in _SPEC_KEYS:
            if key not in self.spec:
                raise ValueError(f"spec lacks {key!r}")
        for key in ("version", "kind", "data_fingerprint", "primary_metric"):
            if key not in self.task:
                raise ValueError(f"task lacks {key!r}")
        return self


def snapshot(cell: Cell) -> Snapshot:
    """The snapshot of a cell with its samples.

    Raises:
        KvaccError: the samples are damaged, or the metric has no value in [0, 1] per item.
    """
    items = read_items(cell)
    documents = list(items.prompts)
    metric = cell.task.primary_metric
    where = f"cell {cell.cell_id} ({cell.spec.strategy}, {cell.task.name})"
    if not documents:
        raise KvaccError(f"{where} has no items; run it again")
    if items.values.keys() != items.prompts.keys():
        raise KvaccError(
            f"{where}: {len(items.values)} of {len(documents)} items have a value of {metric}; "
            "the gate compares item by item: leave this task out"
        )
    values = [items.values[key] for key in documents]
    if not all(0 <= value <= 1 for value in values):
        wrong = next(value for value in values if not 0 <= value <= 1)
        raise KvaccError(
            f"{where}: {metric} is {wrong:g} for an item; the gate needs values between 0 and 1: "
            "leave this task out"
        )
    table = cell.load_samples()
    spec = cell.spec.model_dump(mode="json")
    if spec["fewshot_sampler"] == DEFAULT_SAMPLER:
        del spec["fewshot_sampler"]  # as in baselines from before there was a choice
    answers = [answer for answer in table["response"].to_pylist() if answer is not None]
    return Snapshot(
        cell_id=cell.cell_id,
        spec={
            **spec,
            "model": {**spec["model"], "pretrained": _without_path(spec["model"].get("pretrained"))},
        },
        task=cell.task.model_dump(
            mode="json",
            include={"name", "version", "kind", "source", "data_fingerprint", "primary_metric", "chance"},
        ),
        model=model_identity(cell),
        environment={name: str(getattr(cell.environment, name)) for name in _ENVIRONMENT},
        strategy=cell.strategy.repr,
        score=cell.scores[metric].value,
        kept_fraction=cell.measured.kept_fraction,
        acted_items=cell.measured.acted_items,
        prompts=base64.b64encode(b"".join(_prompt_hash(items.prompts[key]) for key in documents)).decode(),
        values=_packed_values(values),
        clusters=_packed_clusters([items.clusters[key] for key in documents]),
        depths=_packed_depths(table, documents, metric),
        loglikelihoods=_packed_or_none([items.loglikelihoods[key] for key in sorted(items.loglikelihoods)]),
        responses_sha256=_sha256("\0".join(answers)) if answers else None,
        fidelity=_fidelity(table, documents),
    )


def _without_path(pretrained: Any) -> Any:
    """A local folder's own name: the model is told by its content, wherever it lies."""
    text = str(pretrained)
    return text.rstrip("/").rsplit("/", 1)[-1] if text.startswith("/") else pretrained


def _prompt_hash(requests: tuple[tuple[int, str, str], ...]) -> bytes:
    return hashlib.sha256(repr(requests).encode()).digest()[:_PROMPT_BYTES]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _packed_values(values: list[float]) -> Packed:
    return Packed.of(values, "bits" if set(values) <= {0.0, 1.0} else "float64")


def _packed_or_none(values: list[float]) -> Packed | None:
    return Packed.of(values, "float32") if values else None


def _packed_clusters(labels: list[str]) -> Packed | None:
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(label, len(numbers)) for label in labels]
    return None if len(numbers) == len(labels) else Packed.of(found, "int32")


def _packed_depths(table: Any, documents: list, metric: str) -> Packed | None:
    """Depth of each document, from its own column or from the metrics by depth; -1 without one."""
    found: dict[tuple, float] = {}
    keys = list(zip(table["doc_id"].to_pylist(), table["doc_hash"].to_pylist(), strict=True))
    if "depth" in table.column_names:
        depths = table["depth"].to_pylist()
        found = {key: depth for key, depth in zip(keys, depths, strict=True) if depth is not None}
    if not found:
        # Older retention cells have only metric_acc_depth_50 and the like, null at other depths.
        start = f"{METRIC_PREFIX}{metric.split(',')[0]}_depth_"
        for name in table.column_names:
            if name.startswith(start) and name[len(start) :].isdecimal():
                there = table[name].is_valid().to_pylist()
                found |= {
                    key: int(name[len(start) :]) / 100 for key, has in zip(keys, there, strict=True) if has
                }
    if not found:
        return None
    return Packed.of([found.get(key, -1.0) for key in documents], "float32")


def _fidelity(table: Any, documents: list) -> dict[str, Packed]:
    """Mean over each document's requests, weighted by their scored tokens, of what was measured."""
    result = {}
    for name in FIDELITY:
        if name not in table.column_names:
            continue
        sums: dict[tuple, float] = {}
        weights: dict[tuple, float] = {}
        columns = (table[column].to_pylist() for column in ("doc_id", "doc_hash", "scored_tokens", name))
        for doc_id, doc_hash, tokens, value in zip(*columns, strict=True):
            if value is not None:
                key = (doc_id, doc_hash)
                sums[key] = sums.get(key, 0.0) + tokens * value
                weights[key] = weights.get(key, 0.0) + tokens
        if all(weights.get(key) for key in documents):
            result[name] = Packed.of([sums[key] / weights[key] for key in documents], "float64")
    return result
