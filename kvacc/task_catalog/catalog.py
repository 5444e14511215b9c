"""The tasks by name, and what is known of each before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvacc.errors import KvaccError, unknown
from kvacc.task_catalog.sources import DATA_DIR_VARIABLE, TaskSource, data_folder, hub_reachable

if TYPE_CHECKING:
    from kvacc.tasks.retention.sketch import Kind


LONGTEXT = "longtext"
_PAGES = "wikitext/test.jsonl"
"""In a data folder: one page of WikiText a line, in the field ``page``."""


@dataclass(frozen=True)
class TaskInfo:
    """What is known of a task before it is loaded.

    Args:
        name: lm-eval's task id.
        kind: ``benchmark``, ``smoke``, ``retention`` or ``longtext``.
        description: one line for ``kvacc tasks``.
        chance: expected score of a blind guess, in the units of ``default_metric``.
        default_metric: the metric that tables show.
        yaml: the task's YAML, relative to lm-eval's tasks (benchmarks) or to ours.
        split: for benchmarks, the split that is evaluated.
    """

    name: str
    kind: str
    description: str
    chance: float | None
    default_metric: str
    yaml: str
    split: str | None = None
    generator: str | None = None
    """Of a retention task: its name in ``kvacc.tasks.retention.kinds``."""

    @property
    def takes_options(self) -> bool:
        """True for a task that has options: one that is generated, for a tokenizer, or reads texts."""
        return self.generator is not None or self.kind == LONGTEXT

    def kind_of_documents(self) -> Kind:
        """The generator of a retention task."""
        from kvacc.tasks.retention.kinds import KINDS

        return KINDS[self.generator]

    def source(self, data_dir: str | Path | None = None) -> TaskSource:
        """Where :func:`load_tasks` would take the documents from."""
        if self.kind == LONGTEXT:
            folder = data_folder(data_dir)
            has_pages = folder is not None and (folder / _PAGES).is_file()
            return TaskSource.FOLDER if has_pages else TaskSource.EMBEDDED
        if self.kind != "benchmark":
            return TaskSource.EMBEDDED
        return TaskSource.HUB if data_folder(data_dir) is None else TaskSource.FOLDER

    def available(self, data_dir: str | Path | None = None) -> tuple[bool, str]:
        """Whether the documents can be reached, and a reason in words."""
        source = self.source(data_dir)
        if source is TaskSource.EMBEDDED:
            return True, "embedded in kvacc"
        if source is TaskSource.HUB:
            return hub_reachable()
        try:
            return True, f"data folder {self.data_file(data_dir).parent.parent}"
        except KvaccError as error:
            return False, str(error)

    def data_file(self, data_dir: str | Path | None = None) -> Path:
        """The absolute path of the benchmark's file in the data folder.

        Raises:
            KvaccError: no folder is named, it does not exist, or it lacks the file.
        """
        folder = data_folder(data_dir)
        if folder is None:
            raise KvaccError(f"no data folder is named; give data_dir or set {DATA_DIR_VARIABLE}")
        if not folder.is_dir():
            raise KvaccError(
                f"data folder {str(folder)!r} does not exist; correct data_dir or {DATA_DIR_VARIABLE}, "
                "or leave both out to use the hub"
            )
        path = folder / (_PAGES if self.kind == LONGTEXT else f"{self.name}/{self.split}.jsonl")
        if not path.is_file():
            raise KvaccError(
                f"data folder {str(folder)!r} has no {self.name}/{self.split}.jsonl, "
                f"which task {self.name!r} needs; add the file, or use kvacc_mini_{self.name}"
            )
        return path.resolve()


def _benchmark(name: str, title: str, options: int, yaml: str, split: str = "validation") -> TaskInfo:
    return TaskInfo(name, "benchmark", title, 1 / options, "acc", yaml, split)


def _smoke(benchmark: TaskInfo) -> TaskInfo:
    name = f"kvacc_mini_{benchmark.name}"
    description = f"smoke test: 48 embedded items in the format of {benchmark.name}; not a benchmark"
    return TaskInfo(name, "smoke", description, benchmark.chance, "acc", f"mini/{name}.yaml")


def _retention(generator: str, description: str) -> tuple[TaskInfo, TaskInfo]:
    name, kind = f"kvacc_{generator}", "retention"
    chosen = f"{description}; 1 of 4 by log-likelihood"
    generated = f"{description}; generated"
    yaml, yaml_generated = f"{kind}/{name}.yaml", f"{kind}/{name}_generate.yaml"
    return (
        TaskInfo(name, kind, chosen, 0.25, "acc", yaml, generator=generator),
        # A blind guess of a whole answer is right once in thousands of tries.
        TaskInfo(
            f"{name}_generate", kind, generated, 0.0, "exact_match", yaml_generated, generator=generator
        ),
    )


_BENCHMARKS = (
    _benchmark("piqa", "PIQA: which of two ways does a household job", 2, "piqa/piqa.yaml"),
    _benchmark("hellaswag", "HellaSwag: which of four endings follows", 4, "hellaswag/hellaswag.yaml"),
    _benchmark("copa", "COPA: which of two is the cause or effect", 2, "super_glue/copa/default.yaml"),
    _benchmark("winogrande", "WinoGrande: whom or what does a blank refer to", 2, "winogrande/default.yaml"),
    _benchmark(
        "openbookqa", "OpenBookQA: elementary science, four options", 4, "openbookqa/openbookqa.yaml", "test"
    ),
    _benchmark("boolq", "BoolQ: yes or no about a passage", 2, "super_glue/boolq/default.yaml"),
)
_TASKS = {
    task.name: task
    for task in (
        *_BENCHMARKS,
        *map(_smoke, _BENCHMARKS),
        *_retention("passkey", "a number of five digits hidden in prose"),
        *_retention("needle", "one sentence about a person hidden in prose"),
        *_retention("multi_needle", "several numbers hidden in prose, one asked for"),
        *_retention("all_needles", "several numbers hidden in prose, all asked for"),
        *_retention("keyvalue", "one of many values, looked up among near-duplicate keys"),
        *_retention("variables", "chains of assignments, the value of the last variable asked for"),
        *_retention("last_record", "a value updated several times, its newest state asked for"),
        *_retention("dialogue", "a name told in one turn of a dialogue, asked for many turns later"),
        *_retention("instructions", "rules at the start, all to be obeyed in order at the end"),
        *_retention("recall", "a passage to be given again word for word"),
        *_retention("word_count", "a long list of words, the most frequent one asked for"),
        TaskInfo(
            "kvacc_longtext",
            LONGTEXT,
            "texts scored token by token: perplexity by position",
            None,
            "mean_bits_per_byte",
            "longtext/kvacc_longtext.yaml",
        ),  # fmt: skip
    )
}
BENCHMARKS = tuple(task.name for task in _BENCHMARKS)
SMOKE_TESTS = tuple(name for name, task in _TASKS.items() if task.kind == "smoke")
RETENTION = "retention"
GROUPS = {RETENTION: tuple(name for name, task in _TASKS.items() if task.kind == RETENTION)}
"""Names that stand for several tasks, in configurations."""


def task_names() -> dict[str, TaskInfo]:
    """Every task of the catalog by name, benchmarks first."""
    return dict(_TASKS)


def find_task(name: str) -> TaskInfo:
    """The task ``name``.

    Raises:
        KvaccError: unknown; names the nearest right name.
    """
    if name not in _TASKS:
        raise unknown("task", name, _TASKS)
    return _TASKS[name]


def members(name: str) -> tuple[str, ...]:
    """The tasks that ``name`` stands for: those of a group, or itself.

    Raises:
        KvaccError: neither a task nor a group; names the nearest right name.
    """
    if name in GROUPS:
        return GROUPS[name]
    if name not in _TASKS:
        raise unknown("task", name, (*_TASKS, *GROUPS))
    return (name,)
