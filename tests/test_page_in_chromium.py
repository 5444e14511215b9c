"""The page in a browser: sort, filter, dialogs, keyboard, phone, both colour schemes; no complaint
in the console and no request. Skipped where no Chromium is found."""

from __future__ import annotations

import time

import chromium
import pytest
from test_page import board
from test_plots import contrast, with_depths

from kvacc.page import write_page

pytestmark = pytest.mark.skipif(chromium.executable() is None, reason="no Chromium; name it in CHROMIUM")

LINES = "[...document.querySelectorAll('#board tbody tr')].filter(r => r.offsetParent && !r.classList.contains('heading'))"
ROW_NAMES = f"{LINES}.map(r => [r.dataset.s, r.dataset.b, r.dataset.p].join(' '))"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    cells = board()
    cells = [with_depths(cell) if cell.spec.task == "piqa" else cell for cell in cells]
    return write_page(cells, tmp_path_factory.mktemp("page") / "leaderboard.html").as_uri()


@pytest.fixture(scope="module")
def running():
    with chromium.browser() as browser:
        yield browser


@pytest.fixture
def page(running, address):
    """The page, freshly loaded in a wide window; afterwards nothing may have been complained of or asked for."""
    running.events.clear()
    running.window(1280, 900)
    running.prefer(prefers_color_scheme="light")
    running.open(address)
    yield running
    assert running.complaints() == []
    assert {url.partition("#")[0] for url in running.requests()} - {"data:,"} == {address}


def choose(page, name, value):
    page.run(
        f"(() => {{ const field = document.querySelector('#filters').elements['{name}']; field.value = '{value}';"
        "field.dispatchEvent(new Event('input', {bubbles: true})); field.dispatchEvent(new Event('change')); })()"
    )


def sort(page, title, table="#board"):
    page.run(
        f"[...document.querySelectorAll('{table} thead button')].find(b => b.textContent === \"{title}\").click()"
    )


def wait_for(page, expression):
    end = time.monotonic() + 10
    while not page.run(expression):
        assert time.monotonic() < end, expression
        time.sleep(0.02)


def test_loads_with_all_rows_and_pictures(page):
    assert page.run(f"{LINES}.length") == 9
    assert page.run("document.querySelector('#count').textContent") == "9 of 9 rows shown."
    assert page.run("document.querySelectorAll('figure svg').length") >= 5
    assert page.run("document.querySelector('#heatmap figure svg') !== null")


def test_sorting_keeps_full_on_top_and_protocols_apart(page):
    choose(page, "task", "piqa")
    sort(page, "score")  # numbers: high to low first
    assert page.run("document.querySelector('#board [aria-sort]').getAttribute('aria-sort')") == "descending"
    down = page.run(ROW_NAMES)
    sort(page, "score")
    up = page.run(ROW_NAMES)
    # Scores: h2o 0.5 and 0.9 80, h2o 0.2 70, recent 40; then the only row of serve, whatever its score.
    assert down == [
        "full  any",
        "h2o 0.9 stream",
        "h2o 0.5 stream",
        "h2o 0.2 stream",
        "recent 0.2 stream",
        "h2o 0.2 serve",
    ]
    assert up == [
        "full  any",
        "recent 0.2 stream",
        "h2o 0.2 stream",
        "h2o 0.9 stream",
        "h2o 0.5 stream",
        "h2o 0.2 serve",
    ]


def test_rows_without_a_value_are_sorted_last_both_ways(page):
    choose(page, "task", "piqa")
    choose(page, "protocol", "stream")
    for _ in range(2):
        sort(page, "difference")
        assert page.run(ROW_NAMES)[-1] == "h2o 0.9 stream"  # did not act


def test_budgets_sort_as_numbers(page):
    choose(page, "task", "piqa")
    choose(page, "strategy", "h2o")
    choose(page, "protocol", "stream")
    sort(page, "budget")
    assert page.run(ROW_NAMES) == ["full  any", "h2o 0.9 stream", "h2o 0.5 stream", "h2o 0.2 stream"]


def test_filters_keep_the_baseline_and_hide_pictures(page):
    choose(page, "protocol", "serve")
    assert page.run(ROW_NAMES) == ["full  any", "h2o 0.2 serve"]
    assert page.run("document.querySelector('#count').textContent") == "2 of 9 rows shown."
    assert (
        page.run("[...document.querySelectorAll('#budget figure')].filter(f => f.offsetParent).length") == 1
    )
    choose(page, "task", "copa")
    assert page.run(ROW_NAMES) == []
    assert page.run("document.querySelector('#budget .empty').offsetParent !== null")
    page.run("document.querySelector('#filters button[type=reset]').click()")
    wait_for(page, f"{LINES}.length === 9")


def test_finding_text(page):
    choose(page, "find", "did not act")
    assert page.run(ROW_NAMES) == ["full  any", "h2o 0.9 stream"]
    choose(page, "find", "COPA")
    assert page.run(f"{LINES}.length") == 3
    choose(page, "find", "no such words")
    assert page.run("document.querySelector('#count').textContent") == "0 of 9 rows shown."


def test_order_of_tables(page):
    tasks = "[...document.querySelector('#board').tBodies].map(b => b.dataset.task).join()"
    choose(page, "order", "task")
    assert page.run(tasks) == "copa,piqa"
    choose(page, "order", "model")
    assert page.run(tasks) == "copa,piqa"


def test_a_number_leads_to_its_configuration(page):
    page.run("document.querySelector('tr[data-s=h2o][data-b=\"0.5\"] td a').click()")
    wait_for(page, "document.querySelector('dialog').open")
    text = page.run("document.querySelector('dialog').textContent")
    assert "h2o 0.5, piqa, 0-shot, stream" in text and "h2o(0.5)" in text and "kept fraction" in text
    page.press("Escape", 27)
    wait_for(page, "!document.querySelector('dialog').open")
    wait_for(page, "location.hash === ''")
    assert page.run("document.activeElement.closest('tr').dataset.b") == "0.5"  # focus is back
    # The same link works again.
    page.run("document.activeElement.click()")
    wait_for(page, "document.querySelector('dialog').open")
    page.run("document.querySelector('#close').click()")
    wait_for(page, "!document.querySelector('dialog').open")


def test_every_number_has_a_link(page):
    without = page.run(
        f"{LINES}.flatMap(r => [...r.cells]).filter(c => /\\d/.test(c.textContent) && c.cellIndex > 2 && "
        "!c.classList.contains('notes') && !c.querySelector('a')).map(c => c.textContent)"
    )
    assert without == []


def test_a_point_leads_to_its_configuration(page):
    page.run(
        "document.querySelector('#budget figure svg a').dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    )
    wait_for(page, "document.querySelector('dialog').open")


def test_an_address_leads_to_a_configuration(page, address):
    cell = page.run("document.querySelector('tr[data-b=\"0.5\"]').id.slice(4)")
    page.open("about:blank")
    page.events.clear()
    page.open(f"{address}#{cell}")
    assert page.run("document.querySelector('dialog').open")
    assert "h2o 0.5" in page.run("document.querySelector('#configuration-h').textContent")


def test_flips(page):
    page.run(
        'document.querySelector(\'tr[data-s=h2o][data-p=stream][data-b="0.2"] a[href^="#flips-"]\').click()'
    )
    wait_for(page, "document.querySelector('#flip-table tbody').rows.length > 0")
    cell = "document.querySelector('#flip-row').value"
    chosen = page.run(f"document.getElementById('row-' + {cell}).dataset.b")
    assert chosen == "0.2"
    page.run("const row = document.querySelector('#flip-row'); const wanted = [...document.querySelectorAll("
             "'tbody[data-task=piqa] tr[data-s=h2o][data-p=stream][data-b=\"0.2\"]')][0].id.slice(4); row.value = wanted;"
             "row.dispatchEvent(new Event('change'))")  # fmt: skip
    rows = (
        "[...document.querySelector('#flip-table tbody').rows].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert page.run(rows) == [
        ["6 (document)", "lost", "option 0", "option 0", "option 1", "1.600", "-1.600", "3 of 4", "0 of 4"],
        ["7 (document)", "lost", "option 0", "option 0", "option 1", "1.700", "-1.700", "3 of 4", "0 of 4"],
        ["9 (document)", "gained", "option 0", "option 1", "option 0", "-1.900", "1.900", "0 of 4", "2 of 4"],
    ]  # fmt: skip
    sort(page, "full's margin", "#flip-table")
    assert [row[0][0] for row in page.run(rows)] == ["7", "6", "9"]
    page.run("document.querySelector('#flip-way').value = 'gained';"
             "document.querySelector('#flip-way').dispatchEvent(new Event('change'))")  # fmt: skip
    assert [row[0][0] for row in page.run(rows)] == ["9"]


def test_keyboard_alone(page):
    page.press("Tab", 9)
    assert page.run("document.activeElement.className") == "skip"
    seen = []
    for _ in range(60):
        page.press("Tab", 9)
        seen.append(page.run("(e => e.name || e.textContent.trim().slice(0, 20))(document.activeElement)"))
    assert {"model", "task", "protocol", "budget", "strategy", "find"} <= set(seen)
    page.run("document.querySelector('#board thead button').focus()")
    page.press("Enter", 13, "\r")
    assert page.run("document.querySelector('#board th').getAttribute('aria-sort')") == "ascending"
    page.press(" ", 32, " ")
    assert page.run("document.querySelector('#board th').getAttribute('aria-sort')") == "descending"
    # Two stops in a row, its configuration and its flips; none inside pictures.
    stops = "[...document.querySelectorAll('tr[data-s=h2o][data-b=\"0.2\"] a')].filter(a => a.tabIndex === 0).length"
    assert page.run(stops) == 2 * page.run(
        "document.querySelectorAll('tr[data-s=h2o][data-b=\"0.2\"]').length"
    )
    assert page.run(
        "[...document.querySelectorAll('figure svg a')].every(a => a.getAttribute('tabindex') === '-1')"
    )


def test_focus_can_be_seen(page):
    page.press("Tab", 9)
    page.press("Tab", 9)
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_screen_readers_get_names_and_states(page):
    sort(page, "kept")
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    named = [
        (n.get("role", {}).get("value"), n.get("name", {}).get("value", ""))
        for n in nodes
        if not n.get("ignored")
    ]
    roles = {role for role, _ in named}
    assert {
        "main",
        "banner",
        "navigation",
        "table",
        "columnheader",
        "rowheader",
        "status",
        "image",
    } <= roles | {"image" if "img" in roles else ""}
    unnamed = [
        role
        for role, name in named
        if role in ("button", "link", "combobox", "searchbox", "image", "img") and not name
    ]
    assert unnamed == []
    pictures = [
        n for n in nodes if n.get("role", {}).get("value") in ("image", "img") and not n.get("ignored")
    ]
    assert any("h2o" in n.get("description", {}).get("value", "") for n in pictures)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_schemes(page, scheme):
    page.prefer(prefers_color_scheme=scheme)
    as_hex = (
        "(c => '#' + c.match(/\\d+/g).slice(0, 3).map(n => Number(n).toString(16).padStart(2, '0')).join(''))"
    )
    back = page.run(f"{as_hex}(getComputedStyle(document.body).backgroundColor)")
    assert (back == "#14181d") == (scheme == "dark")
    for selector in (
        "body",
        "td.notes",
        "td a",
        "nav a",
        "label",
        ".caption",
        "tr.idle td",
        "tr.moved td:nth-child(5)",
        "summary",
    ):
        colour = page.run(f"{as_hex}(getComputedStyle(document.querySelector('{selector}')).color)")
        assert contrast(colour, back) >= 4.5, (selector, colour, back)
    head = page.run(f"{as_hex}(getComputedStyle(document.querySelector('thead th')).backgroundColor)")
    assert (
        contrast(page.run(f"{as_hex}(getComputedStyle(document.querySelector('thead th')).color)"), head)
        >= 4.5
    )
    # Pictures take the colour of the text around them.
    assert page.run(f"{as_hex}(getComputedStyle(document.querySelector('figure text')).fill)") == page.run(
        f"{as_hex}(getComputedStyle(document.body).color)"
    )


def test_the_button_changes_the_colours(page):
    before = page.run("getComputedStyle(document.body).backgroundColor")
    page.run("document.querySelector('#theme').click()")
    assert page.run("getComputedStyle(document.body).backgroundColor") != before
    assert page.run("document.querySelector('#theme').textContent") == "Light colours"


@pytest.mark.parametrize("width", [390, 320])
def test_nothing_overflows_on_a_phone(page, width):
    page.window(width, 844, mobile=True, scale=2)
    assert page.run("document.documentElement.scrollWidth") == width
    wide = page.run(
        "[...document.querySelectorAll('body *')].filter(e => e.offsetParent && !e.closest('.scroll, svg') && "
        f"e.getBoundingClientRect().right > {width} + 0.5).map(e => e.tagName + '.' + e.className)"
    )
    assert wide == []
    page.run("document.querySelector('td a').click()")
    wait_for(page, "document.querySelector('dialog').open")
    assert page.run("document.querySelector('dialog').getBoundingClientRect().right") <= width
    assert page.run("(d => d.scrollWidth <= d.clientWidth)(document.querySelector('dialog'))")


def test_reduced_motion(page):
    page.prefer(prefers_reduced_motion="reduce")
    assert page.run("getComputedStyle(document.documentElement).scrollBehavior") == "auto"


def test_without_scripts_the_table_is_there(page, address):
    page.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page.open(address)
        page.send("DOM.enable")
        root = page.send("DOM.getDocument")["root"]["nodeId"]
        rows = page.send("DOM.querySelectorAll", nodeId=root, selector="#board tbody tr:not(.heading)")[
            "nodeIds"
        ]
        assert len(rows) == 9
    finally:
        page.send("Emulation.setScriptExecutionDisabled", value=False)


@pytest.mark.slow
def test_five_hundred_rows_are_small_and_fast(tmp_path):
    import importlib.util
    from pathlib import Path

    from kvacc.results import read_cells

    root = Path(__file__).parent.parent
    specification = importlib.util.spec_from_file_location("page_benchmark", root / "benchmarks/page.py")
    benchmark = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(benchmark)
    cells = read_cells([root / "leaderboard/paper/runs", root / "leaderboard/paradigms/runs"])
    path = write_page(benchmark.repeated(cells, 500), tmp_path / "leaderboard.html")
    assert path.stat().st_size < 2_000_000
    assert min(benchmark.load(chromium.browser, path.as_uri())[0] for _ in range(3)) < 1.5
