"""Puts the page together: template, style, script, table, pictures and data."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from kvacc.files import write_whole
from kvacc.leaderboard_rows import Row, averages, build
from kvacc.page.configurations import configurations
from kvacc.page.flips import flip_data
from kvacc.page.table import average_sections, explanation, filters, sections
from kvacc.plots.figure import Figure
from kvacc.results import Cell

PICTURES = (
    ("budget", "Score by budget"),
    ("pareto", "Score against cost"),
    ("heatmap", "Retention by depth and length"),
    ("fidelity", "Fidelity by position"),
    ("perplexity", "Perplexity by position"),
)


def write_page(cells: Iterable[Cell], path: str | Path, rows: Sequence[Row] | None = None) -> Path:
    """Write the page, in one step.

    Raises:
        KvaccError: the file cannot be written, or a cell's samples are damaged.
    """
    return write_whole(path, build_page(cells, rows))


def build_page(cells: Iterable[Cell], rows: Sequence[Row] | None = None) -> str:
    """The page as text.

    Args:
        cells: those of the leaderboard.
        rows: what :func:`kvacc.leaderboard_rows.build` makes of them, if known already.
    """
    cells = list({cell.cell_id: cell for cell in cells}.values())
    rows = list(build(cells) if rows is None else rows)
    by_id = {cell.cell_id: cell for cell in cells}
    style, script = _asset("page.css"), _asset("page.js")
    data = {"cells": configurations(by_id, rows), "flips": flip_data(by_id, rows)}
    entries = averages(rows)
    return _template().render(
        title=_title(rows),
        summary=_summary(rows),
        policy=_policy(style, script),
        style=style,
        script=script,
        data=_as_json(data),
        filters=filters(rows),
        sections=sections(rows, set(data["flips"]["rows"])),
        explanation=explanation(rows),
        averages=average_sections(entries),
        pictures=_pictures(cells, rows),
        strategies=sorted({row.strategy_repr for row in rows}),
    )


def figures(cells: Sequence[Cell], rows: Sequence[Row]) -> list[Figure]:
    """Every picture that the results have what it takes for."""
    from kvacc.plots.budget import budget_figures, series_of
    from kvacc.plots.fidelity import fidelity_figures
    from kvacc.plots.heatmap import heatmap_figures
    from kvacc.plots.pareto import pareto_figures
    from kvacc.plots.perplexity import perplexity_figures

    series = series_of(rows)
    return [
        *budget_figures(rows, series),
        *pareto_figures(rows, series),
        *heatmap_figures(cells, rows),
        *fidelity_figures(cells, rows),
        *perplexity_figures(cells, rows),
    ]


def _pictures(cells: Sequence[Cell], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Drawn figures by kind, with what the page's filters ask for."""
    from kvacc.plots.drawing import svg, unchecked

    drawn: dict[str, list[dict[str, Any]]] = {}
    with unchecked():
        for place, figure in enumerate(figures(cells, rows)):
            entry = {"figure": figure, "id": f"p{place}", "svg": svg(figure)}
            drawn.setdefault(figure.kind, []).append(entry)
    found = []
    for kind, title in PICTURES:
        members = drawn.get(kind, [])
        # What all pictures of a kind have in common is said once.
        captions = list(dict.fromkeys(entry["figure"].caption for entry in members))
        if members:
            found.append({"kind": kind, "title": title, "members": members, "captions": captions})
    return found


def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_asset("page.html"))


def _asset(name: str) -> str:
    return resources.files("kvacc.page").joinpath(name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Only the style and script of this page may be used, known by their hashes; nothing is fetched."""
    return (
        f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _source(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _as_json(data: Any) -> str:
    """JSON that cannot end the element it stands in, whatever names and answers it holds."""
    text = json.dumps(data, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _title(rows: Sequence[Row]) -> str:
    models = sorted({row.model for row in rows})
    named = ", ".join(models) if len(models) <= 3 else f"{len(models)} models"
    return f"KV-cache leaderboard: {named}" if rows else "KV-cache leaderboard"


def _summary(rows: Sequence[Row]) -> str:
    def count(number: int, noun: str, plural: str) -> str:
        return f"{number} {noun if number == 1 else plural}"

    parts = [
        count(len(rows), "row", "rows"),
        count(len({row.model_id for row in rows}), "model", "models"),
        count(len({row.task for row in rows}), "task", "tasks"),
        count(len({row.label for row in rows if not row.is_full}), "strategy", "strategies") + " beside full",
        "protocols: " + (", ".join(sorted({row.protocol for row in rows if not row.is_full})) or "none"),
    ]
    return "; ".join(parts)
