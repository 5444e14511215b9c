"""Options of ``kvacc_longtext``, checked before anything is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvacc.errors import nearest

OPTIONS = ("texts", "window", "characters")
"""``texts`` and ``characters`` as in :func:`kvacc.tasks.longtext.texts.documents`; ``window``, tokens of
a window, goes to the backend."""


def problems(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(option, what is wrong with it), for every option that is wrong."""
    for name, value in options.items():
        if name not in OPTIONS:
            close = nearest(name, OPTIONS)
            yield name, f"task kvacc_longtext has no option {name!r}{close}; known: {', '.join(OPTIONS)}"
        elif name == "texts":
            if not isinstance(value, str) or not Path(value).expanduser().exists():
                yield name, f"texts {value!r} does not exist; name a .txt or .jsonl file, or a folder of them"
        elif not isinstance(value, int) or isinstance(value, bool) or value < 2:
            yield name, f"{name} {value!r} is not a whole number of at least 2"
