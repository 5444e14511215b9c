"""The one exception for mistakes that a user can mend.

The command line prints its message as one line and exits with code 2; anything
else that escapes is a defect of kvacc and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KvaccError(ValueError):
    """Bad input. The message names the value, what is allowed and the mend."""


def nearest(value: str, allowed: Iterable[str]) -> str:
    """`` (did you mean 'h2o'?)`` for the closest allowed name, or an empty string."""
    match = difflib.get_close_matches(str(value), list(allowed), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""


def unknown(what: str, value: str, allowed: Iterable[str]) -> KvaccError:
    """The error for a name that is not in ``allowed``, with the nearest right one."""
    names = sorted(allowed)
    return KvaccError(f"unknown {what} {value!r}{nearest(value, names)}; known: {', '.join(names)}")


def one_line(error: object) -> str:
    """An exception's message, or any text, on one line."""
    return " ".join(str(error).split())
