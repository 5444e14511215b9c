"""Vega's SVG made small and readable by machines: a title, a description, and no dead weight.

Vega writes roles, classes and default attributes on every element, absolute addresses for
links, and sixteen digits for every coordinate. All of it is dropped here: a page with a
hundred pictures is several times smaller, and equal on machines whose last digits differ.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

from kvacc.plots.style import FONT, FONT_FAMILY

_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_DROPPED = {"aria-hidden", "aria-roledescription", "aria-label", "role", "pointer-events", "class", "style"}
_DEFAULTS = {
    "opacity": "1", "stroke-width": "1", "stroke-opacity": "1", "fill-opacity": "1", "x2": "0", "y2": "0",
    "font-weight": "normal", "font-family": FONT, "font-style": "normal", "text-anchor": "start",
    "transform": "translate(0,0)",
}  # fmt: skip
_INHERITED = (
    "fill", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "fill-opacity", "font-size",
    "text-anchor",
)  # fmt: skip
_GEOMETRY = ("d", "transform", "x", "y", "x1", "y1", "x2", "y2", "width", "height", "points")
_NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?|-?\d+e-?\d+")


def accessible(drawn: str, title: str, description: str) -> str:
    """Vega's SVG as a file of its own, with the title and description that a screen reader says."""
    root = _cleaned(drawn)
    # The same links stand elsewhere, so the pictures add no stops for people who go by keyboard.
    for link in root.iter(_SVG + "a"):
        link.set("tabindex", "-1")
    root.set("aria-labelledby", "title description")
    for place, (tag, name, text) in enumerate(
        (("title", "title", title), ("desc", "description", description))
    ):
        element = ElementTree.Element(_SVG + tag, {"id": name})
        element.text = text
        root.insert(place, element)
    return ElementTree.tostring(root, encoding="unicode")


def small(drawn: str) -> str:
    """Vega's SVG for a page where the element around it has its name and description.

    Args:
        drawn: from vl-convert.
    """
    root = _cleaned(drawn)
    # The words say it all; links without a text would be read out one by one.
    root.set("aria-hidden", "true")
    del root.attrib["role"]
    return ElementTree.tostring(root, encoding="unicode").replace(" />", "/>")


def _cleaned(drawn: str) -> ElementTree.Element:
    ElementTree.register_namespace("", _SVG[1:-1])
    root = ElementTree.fromstring(drawn)
    _clean(root)
    root.attrib.pop("version", None)
    root.set("role", "img")
    root.set("font-family", FONT_FAMILY)
    return root


def _clean(element: ElementTree.Element) -> None:
    for child in list(element):
        invisible = _is_invisible(child)
        _clean(child)
        if invisible or (child.tag == _SVG + "g" and len(child) == 0):
            element.remove(child)
    for place, child in enumerate(list(element)):
        only = _only_child_of_plain_group(child)
        if only is not None:
            element[place] = only
    for name, value in list(element.attrib.items()):
        if name in _DROPPED or (_DEFAULTS.get(name) == value and element.tag != _SVG + "svg"):
            del element.attrib[name]
        elif name in _GEOMETRY:
            element.set(name, _short(value))
    link = element.attrib.pop(_LINK, None)
    if link is not None:
        # Vega makes an address of every link; ours lead to a place on the page.
        element.set("href", "#" + link.partition("#")[2])
        element.attrib.pop("target", None)
    _lift(element)


def _lift(element: ElementTree.Element) -> None:
    """What all children say alike, their parent says once."""
    if element.tag not in (_SVG + "g", _SVG + "a") or not len(element):
        return
    for name in _INHERITED:
        said = {child.get(name) for child in element}
        if len(said) == 1 and None not in said:
            element.set(name, said.pop())
            for child in element:
                del child.attrib[name]


def _is_invisible(element: ElementTree.Element) -> bool:
    if element.get("display") == "none":
        return True
    nothing = element.get("fill") in (None, "none", "transparent") and element.get("stroke") in (None, "none")
    return element.tag == _SVG + "path" and "background" in (element.get("class") or "") and nothing


def _only_child_of_plain_group(element: ElementTree.Element) -> ElementTree.Element | None:
    """A group that says nothing about its only child can be left out."""
    said = {n for n, v in element.attrib.items() if n not in _DROPPED and _DEFAULTS.get(n) != v}
    return element[0] if element.tag == _SVG + "g" and len(element) == 1 and not said else None


def _short(text: str) -> str:
    return _NUMBER.sub(lambda found: _one_decimal(float(found.group())), text)


def _one_decimal(number: float) -> str:
    """A tenth of a pixel is finer than anything that can be seen."""
    return f"{round(number, 1) + 0.0:.1f}".removesuffix(".0")
