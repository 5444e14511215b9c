"""Charts as files: SVG, PNG, a page with the SVG in it, or the Vega-Lite specification.

Drawing needs neither network nor browser (vl-convert carries Vega and its fonts), and
equal charts give equal bytes.
"""

from __future__ import annotations

import contextlib
import html
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvacc.errors import KvaccError, unknown
from kvacc.files import write_whole
from kvacc.plots.figure import Figure
from kvacc.plots.style import configuration
from kvacc.plots.svg import accessible, small

if TYPE_CHECKING:
    import altair

SUFFIXES = (".svg", ".png", ".html", ".json")
_PNG_SCALE = 2


def save(figures: Sequence[Figure], path: str | Path, columns: int = 3) -> Path:
    """Write the figures as one picture, in one step.

    Args:
        figures: at least one, all of one kind.
        path: its suffix, one of :data:`SUFFIXES`, says the format.
        columns: figures beside each other.

    Raises:
        KvaccError: another suffix, no figure, or a folder that cannot be written.
    """
    path = Path(path)
    require_suffix(path)
    if not figures:
        raise KvaccError(f"nothing to draw into {path}; give results that have what the picture shows")
    content = _content(figures, path.suffix.lower(), columns)
    return write_whole(path, content, mend="choose another --output")


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Within it Altair does not compare every part of a chart with its schema while charts are
    made, which would take longer than drawing them."""
    from altair.utils.schemapi import debug_mode

    with debug_mode(False):
        yield


def require_suffix(path: str | Path) -> None:
    """Raise the error for a file whose suffix names no format."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise unknown(f"picture format of {str(path)!r}", suffix or "(no suffix)", SUFFIXES)


def svg(figure: Figure) -> str:
    """A figure as SVG for the page, in the page's text colour; hidden from screen readers, which
    get its title and description from the element around it."""
    return small(_drawn(_specification(figure.chart, True)))


def sheet(figures: Sequence[Figure], columns: int) -> altair.TopLevelMixin:
    """The figures beside each other, each with its title."""
    import altair

    titled = [figure.chart.properties(title=_lines(figure)) for figure in figures]
    if len(titled) == 1:
        return titled[0]
    return altair.concat(*titled, columns=min(columns, len(titled)), spacing=30).resolve_scale(
        color="independent",
        fill="independent",
        shape="independent",
        strokeDash="independent",
        xOffset="independent",
    )


def _content(figures: Sequence[Figure], suffix: str, columns: int) -> bytes:
    specification = _specification(sheet(figures, columns), False)
    if suffix == ".json":
        return (json.dumps(specification, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
    if suffix == ".png":
        import vl_convert

        return vl_convert.vegalite_to_png(json.dumps(specification), scale=_PNG_SCALE)
    title = figures[0].title if len(figures) == 1 else f"{len(figures)} pictures: {figures[0].kind}"
    description = "\n".join(f"{figure.title}. {figure.description}" for figure in figures)
    drawn = accessible(_drawn(specification), title, description)
    if suffix == ".svg":
        return (drawn + "\n").encode()
    captions = "".join(
        f"<p>{html.escape(text)}</p>\n"
        for text in dict.fromkeys(text for figure in figures for text in (figure.caption, figure.remark))
        if text
    )
    return _PAGE.format(title=html.escape(title), drawn=drawn, captions=captions).encode()


def _specification(chart: altair.TopLevelMixin, on_page: bool) -> dict[str, Any]:
    # Its validation takes most of the time, and what is drawn is checked by the tests.
    specification = chart.to_dict(validate=False)
    specification["config"] = configuration(on_page)
    return specification


def _drawn(specification: dict[str, Any]) -> str:
    import vl_convert

    return vl_convert.vegalite_to_svg(json.dumps(specification, sort_keys=True))


def _lines(figure: Figure) -> list[str]:
    """Its title in lines that are no wider than the picture."""
    width = 74 if figure.kind == "kept" else 46
    lines = [""]
    for word in figure.title.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
{drawn}
{captions}</html>
"""
