"""The kept-entries map: layer by position, the share of KV heads that hold an entry."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from kvacc.plots.figure import Figure, inline
from kvacc.plots.kept_entries import KeptEntries
from kvacc.plots.style import NOTHING
from kvacc.records import as_ranges

CAPTION = (
    "Share of KV heads for which the prompt's last token reads an entry, in %. Grey layers read everything."
)
MOST_COLUMNS = 256
"""Longer prompts are shown in ranges of positions, each with its mean share."""
_WIDTH, _ROW = 480, 9


def kept_figure(kept: KeptEntries, title: str) -> Figure:
    """The map of one prompt under one strategy."""
    import altair

    each = -(-kept.tokens // MOST_COLUMNS)
    values = [
        run for layer, shares in enumerate(kept.shares) for run in _runs(layer, shares, each, kept.tokens)
    ]
    layers = list(range(len(kept.shares)))
    base = altair.Chart(inline(values)).encode(
        x=altair.X(
            "start:Q",
            title="position in tokens",
            scale=altair.Scale(domain=[0, kept.tokens], nice=False, zero=True),
        ),
        x2=altair.X2("end:Q"),
        y=altair.Y("layer:O", title="layer", sort=layers, axis=altair.Axis(values=layers[::5], ticks=False)),
    )
    colour = altair.Color(
        "share:Q",
        scale=altair.Scale(scheme="viridis", domain=[0, 100]),
        legend=altair.Legend(title="KV heads, %", orient="bottom", gradientLength=160),
    )
    chart = altair.layer(
        base.mark_rect().encode(color=colour).transform_filter("isValid(datum.share)"),
        base.mark_rect(color=NOTHING, opacity=0.4).transform_filter("!isValid(datum.share)"),
    ).properties(width=_WIDTH, height=_ROW * len(layers))
    ranges = f"Each column is the mean of {each} positions." if each > 1 else ""
    return Figure("kept", title, chart, _in_words(kept), CAPTION, ranges)


def _runs(layer: int, shares: list[float] | None, each: int, tokens: int) -> list[dict[str, Any]]:
    """Neighbours of equal colour as one rectangle: a small picture, whatever the prompt's length."""
    if shares is None:
        return [{"layer": layer, "start": 0, "end": tokens, "share": None}]
    columns = [shares[first : first + each] for first in range(0, tokens, each)]
    percents = [round(100 * sum(column) / len(column), 1) for column in columns]
    runs, place = [], 0
    for percent, members in itertools.groupby(percents):
        end = place + each * len(list(members))
        runs.append({"layer": layer, "start": place, "end": min(end, tokens), "share": percent})
        place = end
    return runs


def _in_words(kept: KeptEntries) -> str:
    parts = []
    for layer, shares in enumerate(kept.shares):
        parts.append(f"layer {layer}: {_spans(shares) if shares else 'everything'}")
    return (
        f"{kept.tokens} tokens, {kept.heads} KV heads, {100 * kept.kept_fraction:.1f} % kept in the layers "
        f"that act. Positions that most heads hold: {'; '.join(parts)}."
    )


def _spans(shares: Sequence[float], most: int = 12) -> str:
    """``0-3, 17, 480-511``: positions that at least half of the heads hold."""
    words = as_ranges([place for place, share in enumerate(shares) if share >= 0.5])
    rest = f" and {len(words) - most} more ranges" if len(words) > most else ""
    return (", ".join(words[:most]) or "none") + rest
