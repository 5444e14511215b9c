"""lm-eval's task objects: its own YAML or ours, with documents from where they can be had."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvacc.errors import KvaccError, unknown
from kvacc.shots import FEWSHOT_SAMPLERS
from kvacc.task_catalog.catalog import BENCHMARKS, LONGTEXT, TaskInfo, find_task, task_names
from kvacc.task_catalog.options import check_options
from kvacc.task_catalog.sources import (
    DATA_DIR_VARIABLE,
    TaskSource,
    data_folder,
    hub_reachable,
    no_network,
    tasks_folder,
)

if TYPE_CHECKING:
    from lm_eval.api.task import Task


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
    for task in task_names().values():
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
        raise unknown("fewshot_sampler", fewshot_sampler, FEWSHOT_SAMPLERS)
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
        path = stock_yaml(task)
    else:
        path = tasks_folder() / task.yaml
    if source is TaskSource.HUB and not no_network():
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


def stock_yaml(task: TaskInfo) -> Path:
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
        "include": str(stock_yaml(task)),
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
