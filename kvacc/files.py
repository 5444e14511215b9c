"""Writing a file in one step: it has all of its new content, or is as it was before."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from kvacc.errors import KvaccError


def write_whole(
    path: str | Path, content: str | bytes | Iterable[str], mend: str = "choose another file"
) -> Path:
    """Write ``path``, making its folder when needed; lines end as in ``content`` on every system.

    Raises:
        KvaccError: the file cannot be written; says ``mend``.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if isinstance(content, bytes):
                temporary.write_bytes(content)
            else:
                with open(temporary, "w", encoding="utf-8", newline="") as file:
                    file.writelines([content] if isinstance(content, str) else content)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise KvaccError(f"cannot write {path}: {error.strerror or error}; {mend}") from None
    return path
