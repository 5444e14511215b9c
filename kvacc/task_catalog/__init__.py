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

from kvacc.shots import FEWSHOT_SAMPLERS
from kvacc.task_catalog.catalog import (
    BENCHMARKS,
    GROUPS,
    LONGTEXT,
    RETENTION,
    SMOKE_TESTS,
    TaskInfo,
    find_task,
    members,
    task_names,
)
from kvacc.task_catalog.documents import chance_level, cluster_key, context_boundary, data_fingerprint
from kvacc.task_catalog.loading import load_tasks, quiet_lm_eval, write_task_yamls
from kvacc.task_catalog.options import (
    PATH_OPTIONS,
    canonical_options,
    check_options,
    content_label,
    every_option,
    no_such_option,
    option_names,
    option_problems,
    taken_options,
    takes_option,
)
from kvacc.task_catalog.sources import (
    DATA_DIR_VARIABLE,
    TaskSource,
    data_folder,
    hub_reachable,
    tasks_folder,
)

__all__ = [
    "BENCHMARKS",
    "DATA_DIR_VARIABLE",
    "FEWSHOT_SAMPLERS",
    "GROUPS",
    "LONGTEXT",
    "PATH_OPTIONS",
    "RETENTION",
    "SMOKE_TESTS",
    "TaskInfo",
    "TaskSource",
    "canonical_options",
    "chance_level",
    "check_options",
    "cluster_key",
    "content_label",
    "context_boundary",
    "data_fingerprint",
    "data_folder",
    "every_option",
    "find_task",
    "hub_reachable",
    "load_tasks",
    "members",
    "no_such_option",
    "option_names",
    "option_problems",
    "quiet_lm_eval",
    "taken_options",
    "takes_option",
    "task_names",
    "tasks_folder",
    "write_task_yamls",
]
