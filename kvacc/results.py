"""Results: one folder per cell, written once, atomically, and checked when read.

A cell's folder is named by its ``cell_id`` and holds two files:

``cell.json``
    what was run and what came out (:class:`Cell`), with a checksum of itself and
    of the other file;
``samples.parquet``
    one row per request (:data:`SAMPLE_COLUMNS`, and ``metric_<name>`` columns that
    repeat the document's value on each of its requests).

Files are the truth, never a shared database: writers of different cells share no
file, a retry is harmless, and merging two runs is copying folders. A folder appears
under its final name only when complete, so a run killed at any time leaves at most
a ``.writing-*`` folder, which the next writer removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from kvacc.errors import KvaccError
from kvacc.records import FIDELITY, SELECTION

if TYPE_CHECKING:
    import pyarrow

SCHEMA_VERSION = 1
CELL_FILE = "cell.json"
SAMPLES_FILE = "samples.parquet"
METRIC_PREFIX = "metric_"

SAMPLE_COLUMNS: dict[str, str] = {
    "doc_id": "int64",
    "doc_hash": "string",
    "prompt_hash": "string",
    "target_hash": "string",
    "cluster": "string",
    "option": "int64",
    "kind": "string",
    "loglikelihood": "float64",
    "greedy": "bool",
    "response": "string",
    "target": "string",
    "kept_fraction": "float64",
    "acted": "bool",
    "prompt_tokens": "int64",
    "scored_tokens": "int64",
    "unreachable_tokens": "int64",
    "truncated_tokens": "int64",
    "budget_entries": "int64",
    "bos_tokens": "int64",
    "moved_bytes": "float64",
    "attention_mass": "float64",
    "recall": "float64",
    "kl": "float64",
    "agreement": "float64",
    "loglikelihood_difference": "float64",
    "depth": "float64",
    "length": "int64",
}
"""Columns that every samples.parquet has, with their types; any may hold nulls."""
WHERE = ("depth", "length")
"""Of a retention task: where the asked fact lies in the haystack, 0 to 1 (null where that means
nothing), and the prompt's length as asked for, in tokens. Null for other tasks."""

# Sums of float32 probabilities exceed 1 by their rounding.
_Share = Annotated[float, Field(ge=0, le=1 + 1e-4, allow_inf_nan=False)]
_Natural = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]

_TEMPORARY_PREFIX = ".writing-"
_FOREIGN_LEFTOVER_AGE_S = 24 * 3600
_PROCESS_TOKEN = secrets.token_hex(4)
_COUNTER = itertools.count()


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
        return _read_samples(self._folder / SAMPLES_FILE, self.samples_sha256)


class CellResult(Cell):
    """A cell that was just computed, with its samples in memory."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True)

    samples: Any = Field(exclude=True, description="One dict per request, or a pyarrow.Table.")

    def load_samples(self) -> pyarrow.Table:
        """The samples as a table with the columns of samples.parquet."""
        return samples_table(self.samples)


def samples_table(samples: Sequence[dict[str, Any]] | pyarrow.Table) -> pyarrow.Table:
    """Samples with every column of :data:`SAMPLE_COLUMNS`, typed, sorted by document and option.

    Those of :data:`kvacc.records.SELECTION`, :data:`kvacc.records.FIDELITY` and :data:`WHERE` may be
    missing, as in older files, and are null then.

    Raises:
        KvaccError: a column is missing, or a score is not a number (NaN).
    """
    import pyarrow

    table = samples if isinstance(samples, pyarrow.Table) else _table_of_dicts(samples)
    for name in (*SELECTION, *FIDELITY, *WHERE):
        if name not in table.column_names:
            kind = pyarrow.type_for_alias(SAMPLE_COLUMNS[name])
            table = table.append_column(name, pyarrow.nulls(len(table), kind))
    missing = [name for name in SAMPLE_COLUMNS if name not in table.column_names]
    if missing:
        raise KvaccError(f"samples lack the columns {', '.join(missing)}; every request must record them")
    metrics = sorted(name for name in table.column_names if name.startswith(METRIC_PREFIX))
    types = {**SAMPLE_COLUMNS, **dict.fromkeys(metrics, "float64")}
    extra = [name for name in table.column_names if name not in types]
    try:
        columns = {name: table[name].cast(pyarrow.type_for_alias(kind)) for name, kind in types.items()}
    except pyarrow.ArrowInvalid as error:
        raise KvaccError(f"samples have a value of the wrong type: {_one_line(error)}") from None
    typed = pyarrow.table({**columns, **{name: table[name] for name in extra}})
    _refuse_nan(typed, ["loglikelihood", "kept_fraction", *SELECTION, *FIDELITY, *metrics], "samples")
    return typed.sort_by([("doc_id", "ascending"), ("option", "ascending")])


def write_cell(folder: str | Path, result: CellResult) -> Path:
    """Write ``<folder>/<cell_id>`` in one step; the first complete writer wins.

    Args:
        folder: the run's folder, made when needed.
        result: the cell with its samples; its checksums are filled in.

    Returns:
        The cell's folder.

    Raises:
        KvaccError: the folder cannot be written, or the samples are unusable.
    """
    import pyarrow.parquet

    table = samples_table(result.samples)
    with _published(Path(folder), result.cell_id, "write results") as temporary:
        pyarrow.parquet.write_table(table, temporary / SAMPLES_FILE, compression="zstd")
        result.samples_sha256 = _sha256_of_file(temporary / SAMPLES_FILE)
        result.record_sha256 = ""
        result.record_sha256 = _sha256_of_record(result.record())
        text = json.dumps(result.record(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        (temporary / CELL_FILE).write_text(text, encoding="utf-8")
    return Path(folder) / result.cell_id


@contextlib.contextmanager
def _published(folder: Path, cell_id: str, what: str) -> Iterator[Path]:
    """A new folder to write both files of a cell into; when the block ends it appears, whole and on
    the disk, as ``<folder>/<cell_id>``, unless a valid cell is there already.

    Raises:
        KvaccError: the folder cannot be written; says ``what`` was meant.
    """
    temporary = folder / temporary_name(cell_id)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        temporary.mkdir()
        try:
            yield temporary
            for path in (temporary / SAMPLES_FILE, temporary / CELL_FILE, temporary):
                _fsync(path)
            _publish(temporary, folder / cell_id)
            _fsync(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise KvaccError(
            f"cannot {what} to {folder}: {error.strerror or error}; choose another output folder"
        ) from None


def read_cell(path: str | Path) -> Cell:
    """The checked cell in folder ``path`` (its cell.json is accepted too).

    Raises:
        KvaccError: a file is missing, truncated, edited, or from a newer kvacc.
    """
    folder = Path(path)
    if folder.name == CELL_FILE:
        folder = folder.parent
    cell_path = folder / CELL_FILE
    mend = f"delete the folder {folder} and run the same command again"
    try:
        content = json.loads(cell_path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise KvaccError(f"{cell_path} is missing; {mend}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise KvaccError(f"{cell_path} is truncated or not JSON ({_one_line(error)}); {mend}") from None
    except OSError as error:
        raise KvaccError(f"{cell_path} cannot be read: {error.strerror}; mend its permissions") from None
    _require_schema(content, cell_path, mend)
    try:
        cell = Cell.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        if first["type"] == "extra_forbidden" and _is_unedited(content):
            # Optional fields are added without a new schema_version. Not damage, so never replaced.
            raise _FromNewerVersion(
                f"{cell_path}: {field} is not known to this kvacc; a newer one wrote it: update kvacc"
            ) from None
        raise KvaccError(f"{cell_path}: {field}: {_one_line(first['msg'])}; {mend}") from None
    if not _is_unedited(content):
        raise KvaccError(f"{cell_path} was edited after it was written (its checksum differs); {mend}")
    if cell.cell_id != folder.resolve().name:
        raise KvaccError(
            f"{cell_path} is cell {cell.cell_id}, but its folder is named {folder.resolve().name!r}; "
            f"rename the folder to {cell.cell_id}"
        )
    _verify_samples(folder / SAMPLES_FILE, cell.samples_sha256)
    cell._folder = folder
    return cell


def find_cell(folder: str | Path, cell_id: str) -> Cell | None:
    """The finished cell ``cell_id`` of a run's folder, or None when it has yet to run.

    Raises:
        KvaccError: it exists, but is damaged.
    """
    path = Path(folder) / cell_id
    return read_cell(path) if path.exists() else None


def read_cells(paths: Iterable[str | Path] | str | Path) -> list[Cell]:
    """Every cell below the given run folders, each once, sorted by ``cell_id``.

    A cell found twice with the same results counts once.

    Raises:
        KvaccError: no such folder, no cell in it, a damaged cell, or one cell with
            different results in two folders.
    """
    paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not paths:
        raise KvaccError("no results folder given; name one or more, such as results/quickstart")
    found: dict[str, Cell] = {}
    for folder in find_folders(paths):
        cell = read_cell(folder)
        other = found.setdefault(cell.cell_id, cell)
        if other is not cell and (conflict := conflict_of(other, cell)):
            raise KvaccError(conflict)
    return [found[cell_id] for cell_id in sorted(found)]


def find_folders(paths: Iterable[str | Path]) -> list[Path]:
    """The folders of the cells below the given run folders, unread and in order.

    Raises:
        KvaccError: a path does not exist, or has no cell below it.
    """
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise KvaccError(f"results folder {path} does not exist; make it with: kvacc run CONFIG")
        folders = list(_cell_folders(path.parent if path.name == CELL_FILE else path))
        if not folders:
            raise KvaccError(f"results folder {path} holds no finished cell; fill it with: kvacc run CONFIG")
        found.update(dict.fromkeys(folders))
    return list(found)


def conflict_of(one: Cell, other: Cell) -> str | None:
    """What is wrong with two folders that hold the same cell; None when their results are equal."""
    if _same_results(one, other):
        return None
    return (
        f"cell {one.cell_id} has different results in {one.folder} and {other.folder}; "
        "keep one of the two folders"
    )


def copy_cell(cell: Cell, folder: str | Path) -> Path:
    """Copy a cell that was read from a folder to ``<folder>/<cell_id>``, as :func:`write_cell` writes one.

    Returns:
        The cell's new folder. A valid cell that is there already stays.

    Raises:
        KvaccError: the folder cannot be written, or the cell was damaged since it was read.
    """
    if cell.folder is None:
        raise KvaccError(f"cell {cell.cell_id} was not read from a folder; use write_cell")
    source = cell.folder
    with _published(Path(folder), cell.cell_id, f"copy {source}") as temporary:
        for name in (SAMPLES_FILE, CELL_FILE):
            shutil.copyfile(source / name, temporary / name)
        _verify_samples(temporary / SAMPLES_FILE, cell.samples_sha256)
        if json.loads((temporary / CELL_FILE).read_bytes()).get("record_sha256") != cell.record_sha256:
            raise KvaccError(f"{source / CELL_FILE} changed while it was copied; run the same command again")
    return Path(folder) / cell.cell_id


def remove_leftovers(folder: str | Path) -> list[Path]:
    """Delete ``.writing-*`` folders whose writer is gone; returns those deleted.

    A writer on this machine is gone when its process is; one on another machine
    when its folder is a day old.
    """
    removed = []
    for path in sorted(Path(folder).glob(f"{_TEMPORARY_PREFIX}*")):
        if _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


@contextlib.contextmanager
def exclusive(folder: str | Path) -> Iterator[bool]:
    """Hold a folder against other processes that ask for it so. The system gives it back when one is killed.

    Yields:
        True when the folder is held; False where the file system has no such locks.
    """
    try:
        import fcntl
    except ImportError:
        # Windows.
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            held = True
        except OSError:
            held = False
        yield held
    finally:
        os.close(descriptor)


class _FromNewerVersion(KvaccError):
    """A cell that this kvacc must not replace, because it cannot judge it."""


def _require_schema(content: Any, cell_path: Path, mend: str) -> None:
    if not isinstance(content, dict):
        raise KvaccError(f"{cell_path} holds no JSON object; {mend}")
    version = content.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise KvaccError(f"{cell_path}: schema_version {version!r} is not a version; {mend}")
    if version > SCHEMA_VERSION:
        raise _FromNewerVersion(
            f"{cell_path}: schema_version {version} is newer than {SCHEMA_VERSION}, which this kvacc reads; "
            "update kvacc"
        )


def _is_unedited(content: dict[str, Any]) -> bool:
    return _sha256_of_record(content) == content.get("record_sha256")


def _publish(temporary: Path, target: Path) -> None:
    """Rename to the final name, unless a valid cell is already there."""
    for _ in range(2):
        try:
            os.rename(temporary, target)
            return
        except OSError:
            if not target.exists():
                raise
        try:
            read_cell(target)
            return
        except _FromNewerVersion:
            raise
        except KvaccError:
            # Damaged: renamed away first, so that no reader meets a half-deleted cell.
            discarded = target.parent / temporary_name(target.name)
            os.rename(target, discarded)
            if discarded.is_dir():
                shutil.rmtree(discarded)
            else:
                discarded.unlink()
    os.rename(temporary, target)


def temporary_name(cell_id: str) -> str:
    """A folder's name that says who writes in it, for :func:`remove_leftovers`."""
    host = socket.gethostname().replace("@", "_").replace("/", "_") or "localhost"
    return f"{_TEMPORARY_PREFIX}{cell_id}@{host}@{os.getpid()}@{_PROCESS_TOKEN}{next(_COUNTER)}"


def _is_abandoned(path: Path) -> bool:
    parts = path.name.split("@")
    own = temporary_name("x").split("@")
    if len(parts) != 4 or parts[1] != own[1] or not parts[2].isdigit():
        try:
            return time.time() - path.stat().st_mtime > _FOREIGN_LEFTOVER_AGE_S
        except OSError:
            return False
    if parts[2] == own[2]:
        # Containers reuse process ids: ours is told from a dead one's by the token.
        return not parts[3].startswith(_PROCESS_TOKEN)
    try:
        os.kill(int(parts[2]), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _cell_folders(root: Path) -> Iterable[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        if CELL_FILE in files or SAMPLES_FILE in files:
            subfolders.clear()
            yield Path(folder)


def _same_results(one: Cell, other: Cell) -> bool:
    """Equal apart from when, where and how fast it ran."""
    differs_freely = {"timing", "environment", "samples_sha256", "record_sha256", "warnings"}
    if one.model_dump(exclude=differs_freely) != other.model_dump(exclude=differs_freely):
        return False
    return one.samples_sha256 == other.samples_sha256 or one.load_samples().equals(other.load_samples())


def _table_of_dicts(samples: Sequence[dict[str, Any]]) -> pyarrow.Table:
    import pyarrow

    names: dict[str, None] = {}
    for row in samples:
        names.update(dict.fromkeys(row))
    text = {name for name, kind in SAMPLE_COLUMNS.items() if kind == "string"}
    columns: dict[str, Any] = {}
    try:
        for name in names if samples else SAMPLE_COLUMNS:
            values = [row.get(name) for row in samples]
            if name in text:
                values = [None if value is None else str(value) for value in values]
            kind = "float64" if name.startswith(METRIC_PREFIX) else SAMPLE_COLUMNS.get(name)
            columns[name] = pyarrow.array(values, type=pyarrow.type_for_alias(kind) if kind else None)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
        raise KvaccError(f"samples column {name!r} has a wrong value: {_one_line(error)}") from None
    return pyarrow.table(columns)


def _refuse_nan(table: pyarrow.Table, names: Iterable[str], what: str | Path) -> None:
    import pyarrow.compute

    for name in names:
        nan = pyarrow.compute.fill_null(pyarrow.compute.is_nan(table[name]), False).to_numpy()
        if nan.any():
            row = int(nan.argmax())
            raise KvaccError(
                f"{what}: {name} is NaN for document {table['doc_id'][row].as_py()}, "
                f"option {table['option'][row].as_py()}; the model's outputs overflowed: try dtype=float32"
            )


def _verify_samples(path: Path, sha256: str) -> None:
    mend = f"delete the folder {path.parent} and run the same command again"
    try:
        found = _sha256_of_file(path)
    except FileNotFoundError:
        raise KvaccError(f"{path} is missing; {mend}") from None
    except OSError as error:
        raise KvaccError(f"{path} cannot be read: {error.strerror}; mend its permissions") from None
    if found != sha256:
        raise KvaccError(f"{path} is truncated or was edited (its checksum differs from {CELL_FILE}); {mend}")


def _read_samples(path: Path, sha256: str) -> pyarrow.Table:
    import pyarrow
    import pyarrow.parquet

    _verify_samples(path, sha256)
    try:
        return samples_table(pyarrow.parquet.read_table(path))
    except (KvaccError, pyarrow.ArrowException) as error:
        # The checksum is right: it was written so, by something else than write_cell.
        raise KvaccError(f"{path}: {_one_line(error)}; delete the folder {path.parent}") from None


def _sha256_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_of_record(record: dict[str, Any]) -> str:
    text = json.dumps({**record, "record_sha256": ""}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
