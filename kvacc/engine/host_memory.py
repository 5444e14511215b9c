"""What is host memory on a machine whose only memory is the host's.

Without a GPU an offloaded cache's pool and what is brought from it are allocations of one kind.
The pool is allocated inside :func:`on_host`, so that a meter can tell them apart as a GPU would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

ON_HOST: ContextVar[bool] = ContextVar("kvacc_on_host", default=False)
"""True while host memory is allocated."""


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Tensors made inside the block stand for host memory."""
    token = ON_HOST.set(True)
    try:
        yield
    finally:
        ON_HOST.reset(token)
