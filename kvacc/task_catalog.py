"""The tasks that kvacc knows by name, and where their documents come from.

===========  ================================================================
kind         what it is
===========  ================================================================
benchmark    one of lm-eval's own six tasks: id, prompt and metrics unchanged.
             Documents from the hub, or from a data folder.
smoke        ``kvacc_mini_*``: 48 embedded items in a benchmark's format. They
             show that a setup works; they are no benchmark.
retention    generated haystacks: what does a strategy forget, and where? They
             take options (length, depths, ...) and are made for a tokenizer.
longtext     texts scored as a whole: log-likelihood by position.
===========  ================================================================

A data folder holds ``<task>/<split>.jsonl`` files with the hub's field names; it is
named by ``data_dir`` or the environment variable ``KVACC_DATA_DIR``. It has no training
split, so few-shot examples come from the evaluated split, and lm-eval leaves out the
document itself. It does so only where few-shot split and *test* split carry the same
name: naming the few-shot split alone would put the answer into the prompt.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvacc.errors import KvaccError, nearest, unknown

if TYPE_CHECKING:
    from lm_eval.api.task import Task

    from kvacc.tasks.retention.sketch import Kind

DATA_DIR_VARIABLE = "KVACC_DATA_DIR"
LONGTEXT = "longtext"
_PAGES = "wikitext/test.jsonl"
"""In a data folder: one page of WikiText a line, in the field ``page``."""
FEWSHOT_SAMPLERS = ("default", "first_n")


class TaskSource(StrEnum):
    """Where a task's documents come from."""

    HUB = "hub"
    FOLDER = "folder"
    EMBEDDED = "embedded"


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


def data_folder(data_dir: str | Path | None = None) -> Path | None:
    """``data_dir``, else the folder that ``KVACC_DATA_DIR`` names, else None (use the hub)."""
    named = data_dir or os.environ.get(DATA_DIR_VARIABLE)
    return Path(named).expanduser() if named else None


def tasks_folder() -> Path:
    """The folder of kvacc's own task YAMLs."""
    import kvacc.tasks

    return Path(next(iter(kvacc.tasks.__path__)))


def write_task_yamls(folder: str | Path, data_dir: str | Path | None = None) -> Path:
    """Write one YAML per task into ``folder``, ready for lm-eval's ``include_path``.

    kvacc's own tasks are always there. With a data folder, so are those benchmarks whose
    file it has; they override lm-eval's own of the same name. The files point at absolute
    paths, so they are for this machine and this run.

    Raises:
        KvaccError: a data folder is named but does not exist.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    named = data_folder(data_dir)
    if named is not None and not named.is_dir():
        find_task(BENCHMARKS[0]).data_file(data_dir)  # raises
    for task in _TASKS.values():
        if task.kind == LONGTEXT and task.source(data_dir) is TaskSource.FOLDER:
            _write_yaml(folder / f"{task.name}.yaml", _folder_variant(task, data_dir))
        elif task.kind != "benchmark":
            _write_yaml(folder / f"{task.name}.yaml", {"include": str(tasks_folder() / task.yaml)})
        elif named is not None and task.available(data_dir)[0]:
            _write_yaml(folder / f"{task.name}.yaml", _folder_variant(task, data_dir))
    return folder


def load_tasks(
    names: Iterable[str],
    *,
    data_dir: str | Path | None = None,
    num_fewshot: int | None = None,
    seed: int = 1234,
    fewshot_sampler: str | None = None,
    options: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> dict[str, Task]:
    """lm-eval task objects, ready for ``lm_eval.evaluator.evaluate(task_dict=...)``.

    Args:
        names: tasks of the catalog.
        data_dir: folder of benchmark files; else ``KVACC_DATA_DIR``; else the hub.
        num_fewshot: examples per prompt; None leaves lm-eval's default, which is 0 here.
        seed: of lm-eval's few-shot sampler. Building a task's prompts advances that
            generator: call ``task.set_fewshot_seed(seed)`` before each further evaluation
            of the same object, or its prompts differ.
        fewshot_sampler: ``default`` (other examples for every document) or ``first_n``
            (the first n documents, the same for all, so prompts share a prefix).
        options: of retention tasks, see :class:`kvacc.tasks.retention.settings.Settings`; every
            named task has to take them.
        tokenizer: the model's, which retention tasks count their length with; without one, a
            word counts as 1.3 tokens.

    Raises:
        KvaccError: an unknown task, sampler or option, a missing file, an unreachable hub, or
            a length that has no room for the facts.
    """
    tasks = [find_task(name) for name in names]
    if fewshot_sampler is not None and fewshot_sampler not in FEWSHOT_SAMPLERS:
        raise unknown("few-shot sampler", fewshot_sampler, FEWSHOT_SAMPLERS)
    if num_fewshot is not None and num_fewshot < 0:
        raise KvaccError(f"num_fewshot {num_fewshot} is negative; give 0 or more")
    for task in tasks:
        check_options(task, options or {})
    loaded = {}
    with tempfile.TemporaryDirectory(prefix="kvacc-tasks-") as folder, quiet_lm_eval():
        for task in tasks:
            loaded[task.name] = _load(task, data_dir, Path(folder), options or {}, tokenizer)
    for task in loaded.values():
        if num_fewshot is not None or task.config.num_fewshot is None:
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        if fewshot_sampler is not None:
            _use_sampler(task, fewshot_sampler)
        task.set_fewshot_seed(seed=seed)
    return loaded


def option_names(name: str) -> tuple[str, ...]:
    """The options that a task, or some task of a group, takes; none for names unknown."""
    if name not in _TASKS and name not in GROUPS:
        return ()
    found: dict[str, None] = {}
    for task in map(find_task, members(name)):
        if task.kind == LONGTEXT:
            from kvacc.tasks.longtext.settings import OPTIONS

            found.update(dict.fromkeys(OPTIONS))
        elif task.generator is not None:
            found.update(dict.fromkeys(task.kind_of_documents().options))
    return tuple(found)


def takes_option(name: str, option: str) -> bool:
    """True when a task, or some task of a group, takes the option."""
    return option in option_names(name)


def taken_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``options`` that the task takes."""
    return {option: value for option, value in options.items() if takes_option(name, option)}


def every_option() -> tuple[str, ...]:
    """Every option that some task takes."""
    return tuple(dict.fromkeys(option for task in _TASKS for option in option_names(task)))


def no_such_option(names: Iterable[str], option: str) -> str:
    """What to say when none of the tasks and groups takes an option."""
    names = list(names)
    shown = names[0] if len(names) == 1 else f"none of {', '.join(names)}"
    known = tuple(dict.fromkeys(known for name in names for known in option_names(name)))
    if known:
        takes = "has no option" if len(names) == 1 else "has the option"
        return f"{shown} {takes} {option!r}{nearest(option, known)}; known: {', '.join(known)}"
    if option in every_option():
        takes = "takes no options" if len(names) == 1 else "takes options"
        return f"{shown} {takes}: {option} belongs to generated tasks, such as {GROUPS[RETENTION][0]}"
    every = every_option()
    return f"there is no task option {option!r}{nearest(option, every)}; known: {', '.join(every)}"


PATH_OPTIONS = ("filler", "texts")
"""Options that name a file or a folder: a cell is known by its content, not by its place."""


def canonical_options(task: TaskInfo, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options as a cell states them, and the paths among them as they are read.

    Stated are those that differ from their defaults, and of a path the name and a hash of the
    content, so that equal questions have equal options on every machine.

    Raises:
        KvaccError: an option that ``task`` does not take, a value that it refuses, or no such file.
    """
    check_options(task, options)
    stated = dict(options)
    if task.generator is not None:
        from kvacc.tasks.retention.settings import canonical

        stated = canonical(task.kind_of_documents(), options)
    paths = {name: stated[name] for name in PATH_OPTIONS if stated.get(name) is not None}
    return {**stated, **{name: content_label(path) for name, path in paths.items()}}, paths


def content_label(path: str | Path) -> str:
    """``book.txt@`` and a hash of the content; of a folder, of its text files in order of their names.

    Raises:
        KvaccError: there is no such file or folder.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        files = sorted(file for file in place.iterdir() if file.suffix in (".txt", ".jsonl"))
    else:
        files = [place]
    digest = hashlib.sha256()
    for file in files:
        try:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        except OSError as error:
            raise KvaccError(f"{str(file)!r} cannot be read: {error.strerror}; name a text file") from None
    return f"{place.resolve().name}@{digest.hexdigest()[:16]}"


def check_options(task: TaskInfo, options: Mapping[str, Any]) -> None:
    """Raise KvaccError for the first option that ``task`` does not take, or a value that it refuses."""
    for _, what in option_problems(task, options):
        raise KvaccError(what)


def option_problems(task: TaskInfo, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(option, what is wrong with it), for every option that is wrong."""
    if not task.takes_options:
        for name in options:
            yield name, no_such_option([task.name], name)
        return
    if task.kind == LONGTEXT:
        from kvacc.tasks.longtext.settings import problems as longtext_problems

        yield from longtext_problems(options)
        return
    from kvacc.tasks.retention.settings import problems

    yield from problems(task.kind_of_documents(), options)


def _load(
    task: TaskInfo, data_dir: str | Path | None, folder: Path, options: Mapping[str, Any], tokenizer: Any
) -> Task:
    from lm_eval.tasks import TaskManager

    from kvacc.tasks.retention.measure import tokenizer_in_use

    source = task.source(data_dir)
    if source is TaskSource.FOLDER:
        path = folder / f"{task.name}.yaml"
        _write_yaml(path, _folder_variant(task, data_dir))
    elif source is TaskSource.HUB:
        path = _stock_yaml(task)
    else:
        path = tasks_folder() / task.yaml
    if source is TaskSource.HUB and not _offline():
        # Without this check, an unreachable hub costs minutes of retries.
        reachable, reason = hub_reachable()
        if not reachable:
            raise _unreachable(task, reason)
    try:
        # A path, and not a name: lm-eval then need not read its 14,000 other YAMLs.
        with tokenizer_in_use(tokenizer):
            manager = TaskManager(include_defaults=False, metadata=dict(options))
            return manager.load([str(path)])["tasks"][task.name]
    except KvaccError:
        raise
    except Exception as error:
        if source is TaskSource.FOLDER:
            raise KvaccError(
                f"{task.data_file(data_dir)} could not be read as documents of task {task.name!r}: "
                f"{_one_line(error)}"
            ) from error
        if source is TaskSource.HUB:
            raise _unreachable(task, _one_line(error)) from error
        raise


def _unreachable(task: TaskInfo, reason: str) -> KvaccError:
    return KvaccError(
        f"task {task.name!r} could not be loaded from the hub ({reason}); name a folder with its data "
        f"(data_dir or {DATA_DIR_VARIABLE}), or use kvacc_mini_{task.name}"
    )


def _one_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"


def _stock_yaml(task: TaskInfo) -> Path:
    """The YAML of one of lm-eval's own tasks, without importing lm-eval."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise KvaccError("lm-eval is not installed; install it with: pip install lm-eval")
    path = Path(spec.submodule_search_locations[0]) / "tasks" / task.yaml
    if not path.is_file():
        raise KvaccError(f"the installed lm-eval has no tasks/{task.yaml}; install lm-eval 0.4.13")
    return path


def _folder_variant(task: TaskInfo, data_dir: str | Path | None) -> dict[str, Any]:
    """A YAML that reads a task's documents from the data folder and changes nothing else."""
    if task.kind == LONGTEXT:
        own = str(tasks_folder() / task.yaml)
        return {"include": own, "metadata": {"version": 1.0, "texts": str(task.data_file(data_dir))}}
    return {
        "include": str(_stock_yaml(task)),
        "task": task.name,
        "tag": None,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {task.split: str(task.data_file(data_dir))}},
        "training_split": None,
        "validation_split": None,
        # The same name twice is what makes lm-eval leave the document itself out.
        "test_split": task.split,
        "fewshot_split": task.split,
    }


def _write_yaml(path: Path, content: dict[str, Any]) -> None:
    import yaml

    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def _use_sampler(task: Task, name: str) -> None:
    from lm_eval.api.samplers import get_sampler

    task.sampler = get_sampler(name)(list(task.fewshot_docs()))


@contextlib.contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """Hold back lm-eval's warnings about defaults of its own YAMLs, and progress bars of a second's work."""
    import datasets

    logger = logging.getLogger("lm_eval.api.task")
    level = logger.level
    bars = datasets.are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()


def chance_level(task: Task) -> float | None:
    """Expected accuracy of a blind guess: the mean of 1 / options over the documents.

    None for a task that is not multiple choice.
    """
    if task.OUTPUT_TYPE != "multiple_choice":
        return None
    with quiet_lm_eval():
        documents = list(task.eval_docs)
    return sum(1 / len(task.doc_to_choice(document)) for document in documents) / len(documents)


def data_fingerprint(task: Task, limit: int | None = None) -> str:
    """SHA-256 over the evaluated documents in their order, the first ``limit`` if given."""
    digest = hashlib.sha256()
    with quiet_lm_eval():
        documents = task.eval_docs
    count = len(documents) if limit is None else min(limit, len(documents))
    for index in range(count):
        text = json.dumps(documents[index], sort_keys=True, ensure_ascii=False, default=str)
        digest.update(text.encode() + b"\n")
    return digest.hexdigest()


def cluster_key(task_name: str, doc: dict[str, Any], doc_id: int) -> str:
    """Documents whose scores are not independent share this key.

    They share a haystack or passage, a source video (HellaSwag), or are the two
    halves of a WinoGrande twin: same options and same opening words.
    """
    shared: str | None = None
    if isinstance(doc.get("context") or doc.get("passage"), str):
        shared = doc.get("context") or doc["passage"]
    elif doc.get("source_id"):
        shared = str(doc["source_id"])
    elif {"sentence", "option1", "option2"} <= doc.keys():
        options = sorted((doc["option1"].lower(), doc["option2"].lower()))
        shared = " ".join([*options, *doc["sentence"].lower().split()[:4]])
    if shared is None:
        return f"{task_name}/{doc_id}"
    return f"{task_name}/{hashlib.sha256(shared.encode()).hexdigest()[:16]}"


def context_boundary(doc: dict[str, Any], context: str, num_fewshot: int | None) -> int | None:
    """Where the context segment ends in a prompt, for the protocol ``context``.

    Args:
        doc: the document.
        context: the prompt as lm-eval built it, few-shot examples and chat template included.
        num_fewshot: examples in the prompt.

    Returns:
        The index of the first character after the context segment, so that
        ``context[:boundary]`` is compressed and ``context[boundary:]`` is not. In this order:
        the end of the document's own haystack or passage; the start of the question, where
        examples stand before it; else None.
    """
    for field in ("context", "passage"):
        text = doc.get(field)
        if isinstance(text, str) and text.strip():
            # The last occurrence: an example may have been drawn on the same passage.
            start = context.rfind(text)
            if start >= 0 and context[start + len(text) :].strip():
                return start + len(text)
    if not num_fewshot:
        return None
    start = _question_start(doc, context, num_fewshot)
    return start if start else None


def _question_start(doc: dict[str, Any], context: str, num_fewshot: int) -> int | None:
    """Where the last question starts behind ``num_fewshot`` examples, or None."""
    found = [(context.rfind(text), text) for text in _question_texts(doc)]
    # WinoGrande's prompt holds one of two options, and its twin, with the other one, may be
    # an example: the question is what ends last. If one option ends the other ("race car"
    # and "car"), it is the longer.
    found = [(start + len(text), len(text), start) for start, text in found if start >= 0]
    if found:
        return max(found)[-1]
    # An unknown format: examples end with a blank line. More blank lines than examples are
    # a description (before the examples) or part of a question: only the place of one of
    # the document's own texts tells which.
    blank_lines = context.count("\n\n")
    if blank_lines < num_fewshot:
        return None
    end = len(context)
    if blank_lines > num_fewshot:
        texts = [v for v in doc.values() if isinstance(v, str) and len(v) >= 20 and v in context]
        if not texts:
            return None
        end = context.rfind(max(texts, key=len))
    place = context.rfind("\n\n", 0, end)
    return place + 2 if place >= 0 else None


def _question_texts(doc: dict[str, Any]) -> Iterator[str]:
    """The question as the six formats write it; what stands in the prompt after the examples."""
    if "goal" in doc:
        yield f"Question: {doc['goal']}\nAnswer:"
    if "query" in doc:
        yield doc["query"]
    if "premise" in doc and doc.get("question") in ("cause", "effect"):
        connector = {"cause": "because", "effect": "therefore"}[doc["question"]]
        yield f"{doc['premise'].strip()[:-1]} {connector}"
    if "question_stem" in doc:
        yield doc["question_stem"]
    if {"sentence", "option1", "option2"} <= doc.keys() and "_" in doc["sentence"]:
        opening = doc["sentence"][: doc["sentence"].index("_")]
        yield opening + doc["option1"]
        yield opening + doc["option2"]


def hub_reachable(timeout_s: float = 3) -> tuple[bool, str]:
    """Whether the hub answers, and a reason in words. Honours ``HF_HUB_OFFLINE`` and ``HF_ENDPOINT``."""
    offline = _offline()
    if offline:
        return False, f"{offline} is set"
    import urllib.error
    import urllib.request

    from huggingface_hub import constants

    request = urllib.request.Request(f"{constants.ENDPOINT}/api/datasets/baber/piqa", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s):
            return True, "the hub answers"
    except urllib.error.HTTPError as error:
        return False, f"the hub answers with status {error.code}"
    except (OSError, ValueError) as error:
        return False, f"the hub does not answer: {getattr(error, 'reason', error)}"


def _offline() -> str | None:
    """The environment variable that forbids the network, if one does."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "TRUE", "YES", "ON"):
            return name
    return None
