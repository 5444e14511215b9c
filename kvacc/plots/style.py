"""Colours, shapes and fonts of every picture.

Colours have a contrast of at least 3:1 (WCAG 2.2, 1.4.11) with the white and the dark
background of the page, so that one drawing serves both; a series differs from the others
by shape and dashes too, for those who do not see colours apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import altair

COLOURS = ("#2878d0", "#c8600a", "#14875c", "#9a5fd0", "#d63c6c", "#0d8a9c", "#957030", "#7d7d85")
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right")
DASHES = ((1, 0), (6, 2), (2, 2), (8, 3, 2, 3), (4, 1))
BACKGROUNDS = {"light": "#ffffff", "dark": "#14181d"}
"""Of the page."""
FONT = "Liberation Sans"
"""vl-convert carries it, so text has the same width on every machine."""
FONT_FAMILY = f"{FONT}, Arial, Helvetica, sans-serif"
"""Fonts of the same width, for viewers that lack it."""
NOTHING = "#8a8f98"
"""Marks that are not a series: reference lines, cells without a value."""

WIDTH, HEIGHT = 300, 190
"""Plotting area in pixels; with axes and legend it fits a phone."""


class Series:
    """Colour, shape and dashes of each name, the same in all pictures that share it.

    Args:
        names: of the series, in the order of the legend.
    """

    def __init__(self, names: Sequence[str]):
        self.names = list(dict.fromkeys(names))

    def colour(self, field: str, among: Sequence[str], title: str | None = None) -> altair.Color:
        """The encoding that gives each series one of our colours, the same in every picture."""
        import altair

        return altair.Color(f"{field}:N", scale=self._scale(COLOURS, among), legend=self._legend(title))

    def fill(self, field: str, among: Sequence[str]) -> altair.Fill:
        """As :meth:`colour`, for marks whose outline has that; the legend stands there."""
        import altair

        return altair.Fill(f"{field}:N", scale=self._scale(COLOURS, among), legend=None)

    def offset(self, field: str, among: Sequence[str]) -> altair.XOffset:
        """Side by side, so that intervals do not cover each other."""
        import altair

        shown = [name for name in self.names if name in set(among)]
        return altair.XOffset(f"{field}:N", scale=altair.Scale(domain=shown, paddingOuter=0.4), sort=None)

    def shape(self, field: str, among: Sequence[str], title: str | None = None) -> altair.Shape:
        """The encoding that gives each series one of our marks, the same in every picture."""
        import altair

        return altair.Shape(f"{field}:N", scale=self._scale(SHAPES, among), legend=self._legend(title))

    def dash(self, field: str, among: Sequence[str]) -> altair.StrokeDash:
        """The encoding that gives each series one of our line dashes, the same in every picture."""
        import altair

        return altair.StrokeDash(f"{field}:N", scale=self._scale(DASHES, among), legend=None)

    def _scale(self, values: Sequence[Any], among: Sequence[str]) -> altair.Scale:
        """Only the names that a picture has stand in its legend."""
        import altair

        shown = [name for name in self.names if name in set(among)]
        places = [self.names.index(name) for name in shown]
        return altair.Scale(domain=shown, range=[_plain(values[p % len(values)]) for p in places])

    @staticmethod
    def _legend(title: str | None) -> altair.Legend:
        import altair

        # One column for each would make the picture wider than a phone.
        return altair.Legend(
            title=title, orient="bottom", columns=2, labelLimit=260, symbolLimit=0, columnPadding=22
        )


def configuration(on_page: bool) -> dict[str, Any]:
    """Vega-Lite's ``config``.

    Args:
        on_page: text and axes take the colour of the text around them, light or dark;
            otherwise they are dark on white.
    """
    ink = "currentColor" if on_page else "#1c2024"
    axis = {
        "labelColor": ink, "titleColor": ink, "tickColor": NOTHING, "domainColor": NOTHING,
        "gridColor": NOTHING, "gridOpacity": 0.25, "labelFontSize": 11, "titleFontSize": 11,
        "titleFontWeight": "normal", "labelAngle": 0, "labelLimit": 260,
    }  # fmt: skip
    legend = {
        "labelColor": ink, "titleColor": ink, "labelFontSize": 11, "titleFontSize": 11,
        "titleFontWeight": "normal",
    }  # fmt: skip
    title = {"color": ink, "fontSize": 12, "anchor": "start", "subtitleColor": ink}
    return {
        "background": None if on_page else "#ffffff",
        "font": FONT,
        "axis": axis,
        "legend": legend,
        "title": title,
        "header": {"labelColor": ink, "titleColor": ink, "labelFontSize": 11},
        "view": {"stroke": None},
        "text": {"fontSize": 10, "color": ink},
        "rule": {"color": NOTHING},
        "aria": False,
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
