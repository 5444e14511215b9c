"""Sizes as people write them, read strictly, and written for people."""

from __future__ import annotations

import re

from kvacc.errors import KvaccError

BYTES = {
    "B": 1,
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
TOKENS = {"": 1, "k": 2**10, "M": 2**20}
"""As in the names of models: 128k is 131,072 tokens."""
OPERATIONS = {"G": 10**9, "T": 10**12, "P": 10**15}
_NUMBER = r"(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?"


def parse_bytes(text: str, name: str) -> int:
    """``24GB`` (10**9 bytes each), ``24GiB`` (2**30 each), ``500MB`` as bytes.

    Raises:
        KvaccError: no number, no unit, an unknown unit, or nothing at all.
    """
    value, unit = _split(text, name, "a number and a unit such as 24GB (10**9 bytes each) or 24GiB (2**30)")
    for known, factor in BYTES.items():
        if unit.lower() == known.lower():
            return _positive(round(value * factor), text, name)
    raise KvaccError(f"{name} {text!r}: the unit {unit!r} is unknown; give one of {', '.join(BYTES)}")


def parse_rate(text: str, name: str) -> int:
    """``1TB/s`` or ``900GB/s`` as bytes per second."""
    stem, slash, per = str(text).strip().partition("/")
    if not slash or per.strip() != "s":
        raise KvaccError(f"{name} {text!r}: give bytes per second, such as 900GB/s or 1TB/s")
    return parse_bytes(stem, name)


def parse_operations(text: str, name: str) -> int:
    """``100T``, ``100TFLOPS`` or ``1P`` as operations per second."""
    value, unit = _split(text, name, "a number and G, T or P, such as 100T for 100 TFLOP/s")
    short = re.sub(r"(?i)flop(s|/s)?$", "", unit)
    if short not in OPERATIONS:
        raise KvaccError(f"{name} {text!r}: give G, T or P operations per second, such as 100T")
    return _positive(round(value * OPERATIONS[short]), text, name)


def parse_tokens(text: str | int, name: str) -> int:
    """``4096``, ``4k`` (4,096) or ``1M`` (1,048,576) as tokens."""
    value, unit = _split(text, name, "a count of tokens such as 4096, 128k (131,072) or 1M")
    if unit not in TOKENS:
        raise KvaccError(f"{name} {text!r}: give a count of tokens such as 4096, 128k (131,072) or 1M")
    tokens = value * TOKENS[unit]
    if tokens != int(tokens):
        raise KvaccError(f"{name} {text!r} is not a whole number of tokens")
    return _positive(int(tokens), text, name)


def _split(text: str | int, name: str, allowed: str) -> tuple[float | int, str]:
    match = re.fullmatch(_NUMBER + r"\s*([A-Za-z/]*)", str(text).strip())
    if not match:
        raise KvaccError(f"{name} {text!r} cannot be read; give {allowed}")
    whole, fraction, unit = match.groups()
    number = whole.replace(",", "")
    return (float(number + fraction) if fraction else int(number)), unit


def _positive(value: int, text: str | int, name: str) -> int:
    if value < 1:
        raise KvaccError(f"{name} {text!r} is nothing; give more than 0")
    return value


def gib(size: float) -> str:
    """``79.1 GiB``; smaller sizes in MiB or KiB. Powers of 2, as GPUs' memory is counted."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= factor / 10:
            return f"{size / factor:,.1f} {unit}"
    return f"{size:,.0f} B"


def duration(seconds: float) -> str:
    """``12.3 ms`` or ``4.5 s``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:,.0f} µs"
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"
