"""The leaderboard page says what the rows say, runs nothing else, and is the same every time."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_leaderboard import FULL_CORRECT, make_cell

from kvacc.cli import cli
from kvacc.errors import KvaccError
from kvacc.leaderboard_rows import AT_CHANCE, DID_NOT_ACT, build
from kvacc.page import build_page, write_page
from kvacc.page.configurations import configurations
from kvacc.page.flips import flip_data
from kvacc.page.table import filters, sections
from kvacc.results import write_cell

ROOT = Path(__file__).parent.parent
# Of full's eight right items two are lost (6, 7) and one of the wrong ones is gained (9).
THREE_FLIPS = [1, 1, 1, 1, 1, 1, 0, 0, 0, 1]


def answered(cell):
    """Log-likelihoods that fit the scores: option 0 is the right one, by a margin of 1 + i / 10 nats."""
    for sample in cell.samples:
        i, right = sample["doc_id"], sample["metric_acc"] == 1
        margin = (1 + i / 10) * (1 if right else -1)
        sample["loglikelihood"] = -20.0 + (margin if sample["option"] == 0 else 0.0)
        sample["target"] = "0"
    return cell


def board():
    """Two tasks, two protocols, a row that did not act, one that cannot be compared."""
    return [
        answered(make_cell()),
        answered(make_cell("h2o", THREE_FLIPS, budget="0.2")),
        answered(make_cell("h2o", budget="0.5", kept=0.5)),
        answered(make_cell("recent", [1] * 4 + [0] * 6, budget="0.2")),
        answered(make_cell("h2o", THREE_FLIPS, budget="0.2", protocol="serve")),
        answered(make_cell("h2o", budget="0.9", acted=0, kept=1.0, shift=0.0)),
        answered(make_cell(task="copa", chance=0.8)),
        answered(make_cell("h2o", THREE_FLIPS, budget="0.2", task="copa", chance=0.8)),
        answered(make_cell("recent", budget="0.2", task="copa", chance=0.8, prompt="other")),
    ]


@pytest.fixture(scope="module")
def page():
    return build_page(board())


class Tags(HTMLParser):
    """Every start tag with its attributes, and what is open at the end."""

    VOID = {"meta", "link", "input", "br", "circle", "path", "line", "rect"}

    def __init__(self, text):
        super().__init__()
        self.tags, self.stack = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        while self.stack and self.stack.pop() != tag:
            pass


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


# ---- what it says ------------------------------------------------------------------------


def test_every_row_is_there_with_its_numbers(page):
    for row in build(board()):
        part = page[page.index(f'id="row-{row.cell_id}"') :]
        part = part[: part.index("</tr>")]
        text = re.sub(r"<[^>]+>", " ", part)
        assert f"{100 * row.score:.1f} \u00b1" in text
        if row.difference is not None:
            assert f"{row.difference:+.1f} [{row.difference_low:+.1f}, {row.difference_high:+.1f}]" in text
        for number in ("score", "kept"):
            assert part.count(f'href="#{row.cell_id}"') >= 3, number


def test_notes_stay_with_their_rows(page):
    for note in (DID_NOT_ACT, AT_CHANCE, "not compared: the prompts differ"):
        assert note in page
    idle = page[page.index('class="idle"') :]
    assert DID_NOT_ACT in idle[: idle.index("</tr>")]


def test_rows_of_protocols_are_told_apart(page):
    orders = {m[0]: m[1] for m in re.findall(r'data-p="(\w+)" data-o="(-?\d+)"', page)}
    assert orders == {"any": "-1", "stream": "0", "serve": "2"}


def test_sections_hold_rows_that_may_be_compared():
    rows = build(board())
    found = sections(rows, set())
    assert [(s.task, len(s.lines)) for s in found] == [("copa", 3), ("piqa", 6)]
    assert all(line.is_full == (i == 0) for s in found for i, line in enumerate(s.lines))
    assert [c.title for c in found[0].columns][:9] == [
        "strategy", "budget", "protocol", "score", "difference", "flips", "kept", "rank", "notes"
    ]  # fmt: skip


def test_sort_values_of_budgets_and_bytes():
    selection = {"moved_bytes_per_token": 1536.0, "attention_mass": 0.9, "recall": 0.8}
    cells = [make_cell(), *(make_cell("quest", budget=b, selection=selection) for b in ("64", "0.5", "0.08"))]
    (section,) = sections(build(cells), set())
    titles = [column.title for column in section.columns]
    budgets = {line.budget: line.cells[titles.index("budget")].sort for line in section.lines}
    assert budgets[""] is None and budgets["0.08"] < budgets["0.5"] < budgets["64"]
    moved = section.lines[1].cells[titles.index("moved/token")]
    assert (moved.text, moved.sort) == ("1.5 KiB", 1536.0)


def test_filters_offer_what_there_is():
    offered = {f["name"]: f["choices"] for f in filters(build(board()))}
    assert offered == {
        "model": ["tiny"],
        "task": ["copa", "piqa"],
        "shots": ["0-shot"],
        "protocol": ["stream", "serve"],
        "budget": ["0.9", "0.5", "0.2"],
        "strategy": ["h2o", "recent"],
    }


def test_pictures_are_named_and_described(page):
    tags = Tags(page).tags
    ids = {attributes["id"] for _, attributes in tags if "id" in attributes}
    pictures = [attributes for _, attributes in tags if attributes.get("role") == "img"]
    assert len(pictures) >= 4
    for attributes in pictures:
        assert {attributes["aria-labelledby"], attributes["aria-describedby"]} <= ids


def test_ids_are_unique_and_tags_closed(page):
    parsed = Tags(page)
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert parsed.stack == []


def test_every_control_has_a_label(page):
    for control in re.findall(r"<(?:select|input)[^>]*>", page):
        before = page[: page.index(control)]
        assert before.rfind("<label") > before.rfind("</label"), control


# ---- safety ------------------------------------------------------------------------------


def test_only_its_own_style_and_script_may_run(page):
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1]
    policy = policy.replace("&#39;", "'").replace("&#43;", "+")
    assert policy.startswith("default-src 'none'")
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"<[a-z][^>]* (?:style|on\w+)=", page)  # the policy would block them


def test_it_asks_for_nothing(page):
    addresses = set(re.findall(r"""(?:https?:)?//[\w.-]+\.\w+[^\s"'<>)]*""", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    for tag, attributes in Tags(page).tags:
        assert "src" not in attributes, tag
        assert attributes.get("href", "#").startswith(("#", "data:")), (tag, attributes)


def test_names_and_answers_cannot_break_out():
    evil = "</script><script>alert(1)</script><!--"
    cells = [
        make_cell(metric="exact_match"),
        make_cell("h2o", THREE_FLIPS, budget="0.2", metric="exact_match"),
    ]
    for cell in cells:
        cell.task.source = evil
        for sample in cell.samples:
            sample["response"], sample["target"], sample["loglikelihood"] = evil, evil, None
    page = build_page(cells)
    assert "alert(1)</script>" not in page and "<!--" not in page.replace("<!doctype", "")
    assert page.count("<script") == 2
    (documents,) = data_of(page)["flips"]["documents"]
    assert documents[0][2] == evil  # it is there, as text


def test_paths_of_the_machine_are_left_out():
    model = {"pretrained": "/home/someone/models/tiny", "dtype": "float32"}
    cells = [make_cell(model=model)]
    cells[0].model["path"] = "/home/someone/models/tiny"
    page_data = configurations({c.cell_id: c for c in cells}, build(cells))
    assert "someone" not in json.dumps(page_data["parts"])
    assert page_data["parts"][0]["model"]["pretrained"] == "tiny"


# ---- configurations and flips ------------------------------------------------------------


def test_configurations_are_those_of_the_cells(page):
    data = data_of(page)["cells"]
    for cell in board():
        entry = data["of"][cell.cell_id]
        spec = data["parts"][entry["spec"]]
        assert (spec["strategy"], spec["task"]) == (cell.spec.strategy, cell.spec.task)
        assert spec.get("budget") == cell.spec.budget
        assert data["parts"][entry["strategy"]]["repr"] == cell.strategy.repr
        assert data["parts"][entry["measured"]]["kept_fraction"] == pytest.approx(cell.measured.kept_fraction)
    assert "seconds" not in json.dumps(data)  # masked scoring is no latency
    # All cells share their environment: it is there once.
    assert sum("lm_eval" in part for part in data["parts"]) == 1


def test_flips_by_hand():
    cells = board()[:4]
    rows = build(cells)
    data = flip_data({c.cell_id: c for c in cells}, rows)
    ids = {(row.strategy, row.budget): row.cell_id for row in rows}
    (documents,) = data["documents"]
    entry = data["rows"][ids["h2o", "0.2"]]

    def lines(way):
        return [[*documents[place], answer, margin] for place, answer, margin in entry[way]]

    # Item 6: margin +1.6 under full, -1.6 under h2o, where option 1 wins; recent lost it too.
    assert lines("lost") == [
        [6, "document", 0, 0, 1.6, 2, 0, 1, -1.6],
        [7, "document", 0, 0, 1.7, 2, 0, 1, -1.7],
    ]
    assert lines("gained") == [[9, "document", 0, 1, -1.9, 0, 1, 0, 1.9]]
    assert entry["compared"] == 3 and entry["hidden"] == 0
    assert data["rows"][ids["h2o", "0.5"]]["lost"] == []
    assert len(data["rows"][ids["recent", "0.2"]]["lost"]) == 4


def test_flips_count_as_the_rows_do(page):
    data = data_of(page)["flips"]["rows"]
    for row in build(board()):
        if row.flips_lost is None:
            assert row.cell_id not in data
        else:
            entry = data[row.cell_id]
            assert (len(entry["lost"]), len(entry["gained"])) == (row.flips_lost, row.flips_gained)


def test_answers_of_other_metrics_are_not_guessed():
    """acc_norm picks by length, which is not stored: the option with the highest sum may be another."""
    cells = [make_cell(metric="acc_norm"), make_cell("h2o", THREE_FLIPS, budget="0.2", metric="acc_norm")]
    data = flip_data({c.cell_id: c for c in cells}, build(cells))
    assert all(document[3] is None and document[4] is None for document in data["documents"][0])


def test_infinite_margins_are_no_numbers():
    cells = board()[:2]
    for cell in cells:
        for sample in cell.samples:
            if sample["option"] == 1 and sample["metric_acc"] == 1:
                sample["loglikelihood"] = float("-inf")
    data = flip_data({c.cell_id: c for c in cells}, build(cells))
    json.dumps(data, allow_nan=False)
    assert {document[4] for document in data["documents"][0] if document[5]} == {None}


def test_too_many_flips_are_cut_evenly_and_counted():
    size = 400
    correct = [i % 10 != 0 for i in range(size)]
    cells = [
        answered(make_cell(correct=correct)),
        answered(make_cell("h2o", [not c for c in correct], budget="0.2")),
    ]
    by_id, rows = {c.cell_id: c for c in cells}, build(cells)
    whole = flip_data(by_id, rows)
    cut = flip_data(by_id, rows, most_bytes=3000)
    (name,) = cut["rows"]
    assert len(json.dumps(cut, separators=(",", ":"))) <= 3000
    entry = cut["rows"][name]
    assert entry["hidden"] == size - len(entry["lost"]) - len(entry["gained"]) > 0
    # Margins grow with the number of the item: the last ones moved farthest.
    numbers = [cut["documents"][0][place][0] for place, *_ in entry["lost"]]
    assert numbers == [i for i in range(size) if correct[i]][-len(numbers) :]
    assert whole["rows"][name]["hidden"] == 0


# ---- bytes and files ---------------------------------------------------------------------


@pytest.mark.slow
def test_fresh_processes_build_the_same_bytes(tmp_path):
    for cell in board():
        write_cell(tmp_path / "runs", cell)
    built = []
    for seed in ("1", "2"):
        command = [sys.executable, "-m", "kvacc", "leaderboard", str(tmp_path / "runs"), "--quiet"]
        environment = {"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"}
        subprocess.run(
            [*command, "--html", f"{tmp_path}/{seed}.html"], check=True, env=environment, capture_output=True
        )
        built.append((tmp_path / f"{seed}.html").read_bytes())
    assert built[0] == built[1]
    assert str(tmp_path).encode() not in built[0]


def test_order_of_cells_does_not_matter(page):
    assert build_page(reversed(board())) == page


def test_write_adds_the_page_beside_the_tables(tmp_path):
    for cell in board()[:2]:
        write_cell(tmp_path / "runs", cell)
    result = CliRunner().invoke(
        cli, ["leaderboard", str(tmp_path / "runs"), "--quiet", "--write", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["leaderboard.csv", "leaderboard.html", "leaderboard.json", "leaderboard.md"]


def test_html_must_be_html(tmp_path):
    result = CliRunner().invoke(cli, ["leaderboard", str(tmp_path), "--html", "page.pdf"])
    assert result.exit_code == 2 and "page.pdf" in result.stderr and ".html" in result.stderr


def test_a_folder_in_the_way(tmp_path):
    with pytest.raises(KvaccError, match="cannot write .*; choose another file"):
        write_page(board()[:2], tmp_path)


def test_one_row_is_a_page():
    page = build_page([make_cell("h2o", FULL_CORRECT, budget="0.2")])
    assert "full was not run on this task" in page and "1 row; 1 model; 1 task" in page


def test_assets_are_in_the_package():
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "kvacc.page" in settings["packages"] and "kvacc.plots" in settings["packages"]
    suffixes = {path.suffix for path in (ROOT / "kvacc/page").iterdir() if path.suffix not in (".py", "")}
    assert {f"*{suffix}" for suffix in suffixes} == set(settings["package-data"]["kvacc.page"])
