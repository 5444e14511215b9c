"""kvacc: what a KV-cache strategy costs in accuracy, and what it buys in memory and time.

``import kvacc`` is light: it imports neither torch nor transformers. It registers the
lm-eval backend ``kvacc`` by name, so that afterwards
``lm_eval.simple_evaluate(model="kvacc", model_args=...)`` finds it.
"""

from __future__ import annotations

import importlib
from typing import Any

# Both cost under a tenth of a second and import neither torch nor NumPy. lm_eval.models has to
# come first: lm-eval fills its registry with its own backends only while that is empty.
import lm_eval.models  # noqa: F401
from lm_eval.api.registry import model_registry

__version__ = "0.1.0"

# Imported when first asked for: name -> module.
_LAZY = {
    "Budget": "kvacc.budget",
    "KvaccError": "kvacc.errors",
    "KvaccLM": "kvacc.backend",
    "load_config": "kvacc.config",
    "make_strategy": "kvacc.strategy",
    "run_sweep": "kvacc.sweep",
}

__all__ = ["Budget", "KvaccError", "KvaccLM", "load_config", "make_strategy", "run_sweep"]

# A name to be imported when it is asked for. It must be the class's own module, or lm-eval
# takes the class for another backend of the same name. Newer releases of lm-eval have it
# already, from the entry point.
if "kvacc" not in model_registry:
    model_registry.register("kvacc", target="kvacc.backend:KvaccLM")


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
