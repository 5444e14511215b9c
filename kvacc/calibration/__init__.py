"""Calibration text: what a model reads once so that InfiniGen can choose its rotations.

``prose`` was written for this project. Text from an evaluated task must not stand in its
place: the authors' own prompt is made of sentences in the form of COPA, which they then
evaluate.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path

from kvacc.errors import KvaccError

PROSE = "prose"
"""The text that comes with kvacc: 2,153 tokens of SmolLM2's tokenizer."""


def calibration_text(source: str = PROSE) -> str:
    """The text named by ``source``: ``prose``, or the path of a UTF-8 text file.

    Raises:
        KvaccError: the file is missing, unreadable, not UTF-8, or empty.
    """
    if source == PROSE:
        return (files(__name__) / "prose.txt").read_text(encoding="utf-8")
    how = f"give the path of a UTF-8 text file, or {PROSE!r} for the text that comes with kvacc"
    path = Path(source).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise KvaccError(f"calibration text {str(source)!r} does not exist; {how}") from None
    except UnicodeDecodeError as error:
        raise KvaccError(
            f"calibration text {str(source)!r} is not UTF-8 (byte {error.start}); {how}"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = getattr(error, "strerror", None) or error
        raise KvaccError(f"calibration text {str(source)!r} cannot be read ({reason}); {how}") from None
    if not text.strip():
        raise KvaccError(f"calibration text {str(source)!r} is empty; {how}")
    return text


def calibration_digest(source: str = PROSE) -> str:
    """The first 16 hexadecimal digits of the text's SHA-256.

    Raises:
        KvaccError: as :func:`calibration_text`.
    """
    return hashlib.sha256(calibration_text(source).encode()).hexdigest()[:16]
