"""Configuration of a sweep, and the cells that it plans.

A configuration is a YAML file (see ``configs/``)::

    models: [{pretrained: smollm2-135m, dtype: float32}]
    strategies:
      - full                                   # short for {name: full}
      - {name: h2o, budgets: [0.5, 0.2], recent_fraction: 0.5}
    protocols: [stream]
    tasks: [piqa, {name: kvacc_needle, length: [512, 1024]}]
    limit: 100

:func:`load_config` reports every mistake at once, each with ``file:line:column``.
:func:`plan_cells` multiplies it out: models x strategies x budgets x protocols x
tasks x shots. Nothing here loads a model or a document.
"""

from kvacc.config.cells import BASELINE, CellSpec, plan_cells
from kvacc.config.entries import (
    AUTO,
    ModelEntries,
    ModelEntry,
    StrategyEntries,
    StrategyEntry,
    TaskEntry,
    strategy_from_words,
    strategy_identity,
)
from kvacc.config.loading import (
    add_included,
    config_from,
    load_config,
    packaged_configs,
    packaged_probe_configs,
    read_document,
    resolve_models_and_includes,
)
from kvacc.config.parts import Part, as_list, by_name, faults_at, one_of
from kvacc.config.run_config import RunConfig
from kvacc.config.validation import validated

__all__ = [
    "AUTO",
    "BASELINE",
    "CellSpec",
    "ModelEntries",
    "ModelEntry",
    "Part",
    "RunConfig",
    "StrategyEntries",
    "StrategyEntry",
    "TaskEntry",
    "add_included",
    "as_list",
    "by_name",
    "config_from",
    "faults_at",
    "load_config",
    "one_of",
    "packaged_configs",
    "packaged_probe_configs",
    "plan_cells",
    "read_document",
    "resolve_models_and_includes",
    "strategy_from_words",
    "strategy_identity",
    "validated",
]
