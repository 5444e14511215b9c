"""Pictures show what the rows say: numbers worked by hand, read back from the charts."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from test_leaderboard import make_cell

from kvacc.cli import cli
from kvacc.errors import KvaccError
from kvacc.leaderboard_rows import Row, build
from kvacc.plots.budget import budget_figures
from kvacc.plots.drawing import save, svg
from kvacc.plots.fidelity import fidelity_figures
from kvacc.plots.figure import y_domain
from kvacc.plots.heatmap import heatmap_figures
from kvacc.plots.kept import kept_figure
from kvacc.plots.kept_entries import KeptEntries, kept_entries
from kvacc.plots.pareto import front, pareto_figures
from kvacc.plots.perplexity import perplexity_figures
from kvacc.plots.style import BACKGROUNDS, COLOURS, NOTHING
from kvacc.results import write_cell
from kvacc.strategy import make_strategy

SIX_OF_TEN = [1, 1, 1, 1, 1, 1, 0, 0, 0, 0]  # two of full's eight lost


def data_of(figure, *names):
    """Every inline data row of a chart that has all the fields ``names``."""
    found = []

    def look(part):
        if isinstance(part, dict):
            values = part.get("data", {}).get("values") if isinstance(part.get("data"), dict) else None
            found.extend(v for v in values or [] if set(names) <= v.keys() and v not in found)
            for value in part.values():
                look(value)
        elif isinstance(part, list):
            for value in part:
                look(value)

    specification = figure.chart.to_dict()  # validated by Altair
    for values in specification.get("datasets", {}).values():
        found.extend(v for v in values if set(names) <= v.keys() and v not in found)
    look(specification)
    return found


def sweep(**changes):
    return [
        make_cell(),
        make_cell("h2o", SIX_OF_TEN, budget="0.2", kept=0.2, **changes),
        make_cell("h2o", budget="0.5", kept=0.5, **changes),
        make_cell("recent", SIX_OF_TEN, budget="0.5", kept=0.5, **changes),
    ]


def contrast(one: str, other: str) -> float:
    """WCAG 2.2's contrast ratio of two colours."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_contrast_is_that_of_the_standard():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # a known pair


@pytest.mark.parametrize("colour", [*COLOURS, NOTHING])
def test_colours_can_be_seen_on_both_backgrounds(colour):
    assert min(contrast(colour, background) for background in BACKGROUNDS.values()) >= 3


# ---- budget ------------------------------------------------------------------------------


def test_budget_points_are_the_rows():
    rows = build(sweep())
    (figure,) = budget_figures(rows)
    points = {(p["label"], p["budget"]): p for p in data_of(figure, "label", "score")}
    assert {key: p["score"] for key, p in points.items()} == {
        ("h2o", "0.2"): 60, ("h2o", "0.5"): 80, ("recent", "0.5"): 60
    }  # fmt: skip
    row = next(row for row in rows if row.budget == "0.2")
    # Around full's 80, not around the score: crossing full's line is what the interval tests.
    assert points["h2o", "0.2"]["low"] == pytest.approx(80 + row.difference_low, abs=1e-3)
    assert points["h2o", "0.2"]["high"] == pytest.approx(80 + row.difference_high, abs=1e-3)
    assert points["h2o", "0.2"]["cell"] == f"#{row.cell_id}"
    assert {(m["name"], m["level"]) for m in data_of(figure, "level")} == {("full", 80), ("chance", 10)}
    assert "h2o: 0.5 80.0" in figure.description and "0.2 60.0" in figure.description


def test_budgets_go_from_small_to_large():
    cells = [
        make_cell(),
        *(make_cell("h2o", budget=b, kept=0.3) for b in ("64", "0.5", "256", "0.08", "0.2")),
    ]
    (figure,) = budget_figures(build(cells))
    text = json.dumps(figure.chart.to_dict())
    assert '"sort": ["64", "256", "0.08", "0.2", "0.5"]' in text  # counts, then shares, never mixed
    assert {p["budget"]: p["kind"] for p in data_of(figure, "kind")}["64"] == "count"


def test_protocols_never_share_a_picture():
    cells = [
        make_cell(),
        make_cell("h2o", budget="0.2"),
        make_cell("h2o", SIX_OF_TEN, budget="0.2", protocol="serve"),
    ]
    figures = budget_figures(build(cells))
    assert {figure.about["protocol"] for figure in figures} == {"stream", "serve"}
    assert [len(data_of(figure, "label", "score")) for figure in figures] == [1, 1]


def test_what_did_not_act_is_no_point_and_is_named():
    cells = [
        make_cell(),
        make_cell("h2o", budget="0.8", acted=0, kept=1.0, shift=0.0),
        make_cell("h2o", budget="0.2"),
    ]
    (figure,) = budget_figures(build(cells))
    assert [p["budget"] for p in data_of(figure, "label", "score")] == ["0.2"]
    assert "did not act: h2o 0.8" in figure.remark


def test_rows_without_a_comparison_are_hollow_and_have_no_bar():
    cells = [
        make_cell(),
        make_cell("h2o", budget="0.2", causal=False),
        make_cell("recent", budget="0.2", prompt="other"),
    ]
    (figure,) = budget_figures(build(cells))
    points = {p["label"]: p for p in data_of(figure, "label", "score")}
    assert points["recent"]["compared"] == "no" and points["recent"]["low"] is None
    assert points["h2o (non-causal)"]["compared"] == "no"


def test_full_at_chance_is_said_beside_the_picture():
    (figure,) = budget_figures(
        build([make_cell(chance=0.8), make_cell("h2o", SIX_OF_TEN, budget="0.2", chance=0.8)])
    )
    assert "at chance" in figure.remark and "at chance" in figure.description


@pytest.mark.parametrize(
    ("numbers", "limits", "domain"),
    [
        ([40, 60], None, (38.8, 61.2)),
        ([1, 99], (0, 100), (0, 100)),  # no accuracy below 0
        ([-3, 50], (0, 100), (-3, 53.18)),  # but no interval is cut
        ([5, None, 5], None, (4.75, 5.25)),
        ([], None, (-0.06, 1.06)),
    ],
)
def test_y_domain(numbers, limits, domain):
    assert y_domain(numbers, limits) == pytest.approx(domain)


# ---- pareto ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1, 5), (2, 4), (3, 4), (2, 6)], [0, 1]),
        ([(1, 1), (1, 1)], [0, 1]),  # equals do not beat each other
        ([(1, 9, 9), (9, 1, 9), (9, 9, 1), (9, 9, 9)], [0, 1, 2]),
        ([], []),
    ],
)
def test_front(points, expected):
    assert front(points) == expected


def test_pareto_front_of_the_rows():
    (figure,) = pareto_figures(build(sweep()))
    on_front = {(p["label"], p["budget"]) for p in data_of(figure, "front") if p["front"] == "yes"}
    assert on_front == {("h2o", "0.2"), ("h2o", "0.5")}  # recent is beaten by h2o at an equal cost
    assert {p["cost"] for p in data_of(figure, "front")} == {20, 50}
    assert "Latency: not measured." in figure.caption
    assert "h2o 0.2: 60.0 at 20.0 %" in figure.description.split("Not on it")[0]


def test_pareto_front_holds_no_row_that_was_not_compared():
    cells = [
        make_cell(),
        make_cell("h2o", budget="0.1", causal=False, kept=0.1),
        make_cell("recent", budget="0.5", kept=0.5),
    ]
    (figure,) = pareto_figures(build(cells))
    assert {p["label"] for p in data_of(figure, "front") if p["front"] == "yes"} == {"recent"}


def test_bytes_moved_get_a_picture_of_their_own():
    moved = {"moved_bytes_per_token": 2048.0, "attention_mass": 0.9, "recall": 0.8}
    cells = [make_cell(), *(make_cell("quest", budget=b, kept=0.2, selection=moved) for b in ("0.2", "0.1"))]
    kept, bytes_moved = pareto_figures(build(cells))
    assert {p["cost"] for p in data_of(bytes_moved, "front")} == {2.0}  # KiB
    assert "host memory" in kept.remark


def test_latency_appears_once_rows_have_it():
    class Timed(Row):
        latency: float | None = None

    rows = [Timed(**row.model_dump(), latency=0.004) for row in build(sweep())]
    *_, figure = pareto_figures(rows)
    assert {p["cost"] for p in data_of(figure, "front")} == {4.0}  # milliseconds
    assert "not measured" not in figure.caption


# ---- retention ---------------------------------------------------------------------------


def with_depths(cell, graded=None):
    """Ten items: the first five at depth 0.1, the others at 0.9; even ones of 512 tokens."""
    for sample in cell.samples:
        i = sample["doc_id"]
        sample["depth"], sample["length"] = (0.1 if i < 5 else 0.9), (512 if i % 2 == 0 else 1024)
        if graded is not None:
            sample["metric_graded"] = graded[i]
    return cell


def test_heat_map_squares():
    correct = [1, 0, 1, 0, 0, 1, 1, 1, 1, 1]
    cells = [with_depths(make_cell()), with_depths(make_cell("h2o", correct, budget="0.2"))]
    (figure,) = heatmap_figures(cells, build(cells))
    squares = {(s["panel"], s["depth"], s["length"]): s for s in data_of(figure, "panel")}
    # h2o: items 0, 2, 4 at depth 10 % in 512 tokens are 1, 1, 0; items 1, 3 in 1024 tokens 0, 0.
    assert squares["h2o 0.2", "10", "512"]["value"] == pytest.approx(66.6667)
    assert squares["h2o 0.2", "10", "512"]["items"] == 3
    assert squares["h2o 0.2", "10", "1024"]["value"] == 0
    assert squares["h2o 0.2", "90", "512"]["value"] == 100
    assert squares["full", "10", "512"]["value"] == 100
    assert squares["h2o 0.2", "10", "1024"]["text"] == "0\u2020"  # at chance
    assert squares["full", "10", "512"]["text"] == "100"
    assert "Chance: 10.0" in figure.remark and "2 to 3 items" in figure.remark


def test_heat_map_of_another_metric():
    cells = [with_depths(make_cell(), graded=[0.5] * 10)]
    (figure,) = heatmap_figures(cells, build(cells), "graded")
    assert {s["value"] for s in data_of(figure, "panel")} == {50}
    with pytest.raises(KvaccError, match="'sharpness'; they have acc, graded"):
        heatmap_figures(cells, build(cells), "sharpness")


def test_heat_map_needs_depths():
    cells = sweep()
    assert heatmap_figures(cells, build(cells)) == []


# ---- by position -------------------------------------------------------------------------


class Measured:
    """A cell with what a newer version measured."""

    def __init__(self, cell, by_position=(), curve=()):
        self.cell_id, self.curve = cell.cell_id, list(curve)
        self.fidelity = type("Fidelity", (), {"by_position": list(by_position)})()


def test_fidelity_by_position():
    cells = [make_cell(), make_cell("h2o", budget="0.2")]
    buckets = [
        {"start": 0, "end": 64, "kl": 0.01, "agreement": 0.99},
        {"start": 64, "end": 128, "kl": 0.2, "agreement": 0.8},
    ]
    (figure,) = fidelity_figures([Measured(cells[0]), Measured(cells[1], buckets)], build(cells))
    points = data_of(figure, "middle", "kl")
    assert [(p["middle"], p["kl"], p["agreement"]) for p in points] == [(32, 0.01, 99), (96, 0.2, 80)]
    assert "64-128 0.2000" in figure.description and "mass" not in figure.description.lower()


def test_perplexity_by_position():
    cells = [make_cell(), make_cell("h2o", budget="0.2")]
    curves = [
        [{"start": s, "end": s + 10, "tokens": 10, "loglikelihood": -t} for s in (0, 10)]
        for t in (0.0, 23.0258509)
    ]
    (figure,) = perplexity_figures(
        [Measured(c, curve=k) for c, k in zip(cells, curves, strict=True)], build(cells)
    )
    found = {p["name"]: p["perplexity"] for p in data_of(figure, "middle", "perplexity")}
    assert found == pytest.approx({"full": 1.0, "h2o 0.2": 10.0})  # exp(23.0258509 / 10)


def test_perplexities_of_the_first_tokens_do_not_hide_the_rest():
    cells = [make_cell(), make_cell("h2o", budget="0.2")]
    curves = [
        [
            {"start": s, "end": 2 * s or 1, "tokens": 1, "loglikelihood": -math.log(p)}
            for s, p in zip((0, 1, 2, 4, 8), (9000, 700, 50, middle, last), strict=True)
        ]
        for middle, last in ((41, 40), (41, 46))
    ]
    measured = [Measured(c, curve=k) for c, k in zip(cells, curves, strict=True)]
    (figure,) = perplexity_figures(measured, build(cells))
    # From the last range in which both agree.
    assert sorted({p["middle"] for p in data_of(figure, "middle", "perplexity")}) == [6, 12]
    assert "before 4" in figure.remark


def test_an_axis_of_one_value_keeps_it():
    """Left to Vega, the only tick of 1.26 would be called 1."""
    cells = [make_cell(), make_cell("h2o", budget="0.2")]
    buckets = [{"start": s, "end": s + 64, "kl": 1.26, "agreement": 1.0} for s in (0, 64)]
    (figure,) = fidelity_figures([Measured(cells[0]), Measured(cells[1], buckets)], build(cells))
    kl, agreement = (panel["layer"][0]["encoding"]["y"] for panel in figure.chart.to_dict()["vconcat"])
    assert kl["scale"]["domain"] == pytest.approx([1.197, 1.323])
    assert agreement["scale"]["domain"] == pytest.approx([95, 100])  # no more than all tokens
    assert ">1.26<" in svg(figure)


def test_one_bucket_is_no_curve():
    cells = [make_cell(), make_cell("h2o", budget="0.2")]
    measured = Measured(cells[1], [{"start": 0, "end": 64, "kl": 0.01, "agreement": 0.99}])
    assert fidelity_figures([Measured(cells[0]), measured], build(cells)) == []


def test_older_cells_have_no_pictures_by_position():
    cells = sweep()
    assert fidelity_figures(cells, build(cells)) == [] == perplexity_figures(cells, build(cells))


# ---- kept entries ------------------------------------------------------------------------

TOKENS = [3 + (7 * i + i * i) % 120 for i in range(24)]


@pytest.fixture(scope="module")
def wrapped():
    from tiny import tiny_llama

    from kvacc.engine.wrapped import WrappedModel

    return WrappedModel(tiny_llama())


def test_kept_entries_by_hand(wrapped):
    strategy = make_strategy("streaming_llm", budget=8, sinks=4)
    kept = kept_entries(wrapped, strategy, TOKENS, "stream")
    # Four sinks, and recent tokens; the last token reads its own entry while it is added.
    expected = [1.0] * 4 + [0.0] * 15 + [1.0] * 5
    assert kept.shares == [expected, expected]
    assert kept.kept_fraction == pytest.approx(9 / 24)


@pytest.mark.parametrize("protocol", ["stream", "context", "serve"])
def test_kept_entries_are_those_of_a_real_cache(wrapped, protocol):
    """Against the step path, whose cache holds only what is kept."""
    from kvacc.verify.runs import Text, step_runs
    from kvacc.verify.subjects import Subject

    strategy = make_strategy("h2o", budget=0.3)
    kept = kept_entries(wrapped, strategy, TOKENS, protocol, tail_tokens=6)
    dense = {"stream": 0, "context": 18, "serve": 23}[protocol]
    text = Text(tuple(TOKENS), dense, dense or 24)
    (run,) = step_runs(Subject("tiny", wrapped, True), strategy, [text])
    for layer, shares in enumerate(kept.shares):
        assert shares == run.reads[layer][:, -1].double().mean(0).tolist()
    assert 0 < kept.kept_fraction < 1


def test_kept_entries_refuses_what_it_cannot_show(wrapped, monkeypatch):
    with pytest.raises(KvaccError, match="keeps everything"):
        kept_entries(wrapped, make_strategy("full"), TOKENS, "stream")
    with pytest.raises(KvaccError, match="at least 2"):
        kept_entries(wrapped, make_strategy("h2o", budget=4), TOKENS[:1], "stream")
    monkeypatch.setattr("kvacc.plots.kept_entries._MOST_BYTES", 1000)
    with pytest.raises(KvaccError, match="give --tokens 15 or fewer"):  # 2 layers x 2 heads x 15^2 = 900
        kept_entries(wrapped, make_strategy("h2o", budget=4), TOKENS, "stream")


def test_kept_figure_merges_neighbours_and_marks_other_layers():
    kept = KeptEntries("h2o", "stream", [[1.0, 1.0, 0.5, 0.0], None], heads=2)
    figure = kept_figure(kept, "a prompt")
    runs = [(r["layer"], r["start"], r["end"], r["share"]) for r in data_of(figure, "layer")]
    assert runs == [(0, 0, 2, 100), (0, 2, 3, 50), (0, 3, 4, 0), (1, 0, 4, None)]
    assert "layer 0: 0-2; layer 1: everything" in figure.description and "62.5 % kept" in figure.description


def test_long_prompts_are_shown_in_ranges():
    kept = KeptEntries("h2o", "stream", [[1.0] * 300 + [0.0] * 1], heads=1)
    figure = kept_figure(kept, "a prompt")
    runs = [(r["start"], r["end"], r["share"]) for r in data_of(figure, "layer")]
    assert runs == [(0, 300, 100), (300, 301, 0)] and "mean of 2 positions" in figure.remark


# ---- files -------------------------------------------------------------------------------


def test_svg_for_the_page_is_local_and_small():
    (figure,) = budget_figures(build(sweep()))
    drawn = svg(figure)
    root = ElementTree.fromstring(drawn)
    assert (root.get("role"), root.get("aria-hidden")) == (None, "true")  # named by the page around it
    addresses = set(re.findall(r"https?://[^\"<> ]+", drawn))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert " style=" not in drawn and "<style" not in drawn  # the page's policy blocks both
    links = [element.get("href") for element in root.iter("{http://www.w3.org/2000/svg}a")]
    assert sorted(links) == sorted(f"#{row.cell_id}" for row in build(sweep()) if not row.is_full)
    assert len(drawn) < 9000
    assert "currentColor" in drawn and svg(figure) == drawn


@pytest.mark.parametrize("suffix", [".svg", ".png", ".html", ".json"])
def test_files(tmp_path, suffix):
    figures = budget_figures(
        build([*sweep(), make_cell(task="copa"), make_cell("h2o", budget="0.2", task="copa")])
    )
    path = save(figures, tmp_path / f"new/picture{suffix}")
    content = path.read_bytes()
    if suffix == ".png":
        assert content.startswith(b"\x89PNG")
    elif suffix == ".json":
        import altair

        altair.Chart.from_dict(json.loads(content))  # validates
    else:
        text = content.decode()
        assert "<title" in text and "h2o: 0.5 80.0" in text and "<script" not in text
    assert save(figures, path).read_bytes() == content
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_other_formats_are_refused(tmp_path):
    (figure,) = budget_figures(build(sweep()))
    with pytest.raises(
        KvaccError, match=r"unknown picture format of .*'\.pdf'.*known: \.html, \.json, \.png, \.svg"
    ):
        save([figure], tmp_path / "picture.pdf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_fresh_processes_draw_the_same_bytes(tmp_path):
    for cell in sweep():
        write_cell(tmp_path / "runs", cell)
    drawn = []
    for seed in ("1", "2"):
        command = [
            sys.executable,
            "-m",
            "kvacc",
            "plot",
            "pareto",
            str(tmp_path / "runs"),
            "-o",
            f"{tmp_path}/{seed}.svg",
        ]
        subprocess.run(
            command, check=True, env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"}, capture_output=True
        )
        drawn.append((tmp_path / f"{seed}.svg").read_bytes())
    assert drawn[0] == drawn[1] and len(drawn[0]) > 1000


# ---- command line ------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path):
    for cell in [*sweep(), make_cell("h2o", SIX_OF_TEN, budget="0.2", protocol="serve")]:
        write_cell(tmp_path / "runs", cell)
    return str(tmp_path / "runs")


def plot(*words):
    return CliRunner().invoke(cli, ["plot", *words])


def test_command_filters(runs, tmp_path):
    output = str(tmp_path / "p.json")
    assert "2 pictures" in plot("budget", runs, "-o", output).output
    result = plot("budget", runs, "-o", output, "--protocol", "serve", "--strategy", "h2o")
    assert result.exit_code == 0 and "(1 picture)" in result.output


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["budget", "-o", "p.gif"], ["unknown picture format", ".gif"]),
        (["budget", "--strategy", "h20"], ["unknown strategy 'h20' (did you mean 'h2o'?)"]),
        (["budget", "--shots", "7"], ["unknown shots '7'"]),
        (["heatmap"], ["nothing to draw", "retention"]),
        (["fidelity"], ["nothing to draw", "fidelity by position"]),
        (["perplexity"], ["nothing to draw", "by position"]),
    ],
)
def test_mistakes_are_one_line(runs, words, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = plot(words[0], runs, *words[1:])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert all(part in result.stderr for part in parts), result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "either --text FILE or --task NAME"),
        (["--text", "no.txt"], "cannot read --text no.txt"),
        (["--text", "-", "--strategy", "full"], "keeps everything"),
        (["--text", "-", "--budget", "2.5"], "2.5"),
        (["--text", "-", "--protocol", "later"], "unknown protocol 'later'"),
        (["--text", "-", "--option", "sinks"], "write NAME=VALUE"),
        (["--task", "kvacc_passkey", "--task-option", "lenght=512"], "did you mean 'length'?"),
        (["--task", "copa", "--task-option", "length=512"], "length"),
        (["--text", "-", "-o", "kept.txt"], "unknown picture format"),
    ],
)
def test_mistakes_of_kept_are_said_before_a_model_loads(words, part):
    result = plot("kept", "--model", "no-such-model", "--strategy", "h2o", *words)
    assert result.exit_code == 2 and part in result.stderr, result.stderr


def test_kept_of_a_text(tiny_folder, tmp_path):
    (tmp_path / "prompt.txt").write_text("The passkey is 48213. Remember it. What is it?")
    output = tmp_path / "kept.svg"
    words = ["--model", str(tiny_folder), "--strategy", "h2o", "--budget", "12", "--tokens", "40"]
    result = plot("kept", *words, "--text", str(tmp_path / "prompt.txt"), "-o", str(output))
    assert result.exit_code == 0, result.output
    text = output.read_text()
    assert f"{tiny_folder.name}, h2o 12, stream: prompt.txt, 40 tokens" in text
    assert str(tiny_folder) not in text  # a path of this machine


def test_kept_of_a_task(tiny_folder, tmp_path):
    output = tmp_path / "kept.json"
    words = ["--model", str(tiny_folder), "--strategy", "recent", "--budget", "0.5", "-o", str(output)]
    result = plot("kept", *words, "--task", "kvacc_mini_copa", "--item", "3")
    assert result.exit_code == 0, result.output
    assert "kvacc_mini_copa 3, 0-shot" in output.read_text()
    result = plot("kept", *words, "--task", "kvacc_mini_copa", "--item", "48")
    assert result.exit_code == 2 and "give 0 to 47" in result.stderr
