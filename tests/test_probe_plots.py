"""Pictures of probes show what the records say: numbers read back from the charts, failures marked."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from probe_records import make_latency, make_memory, make_probe
from test_leaderboard import make_cell
from test_plots import data_of

from kvacc.advice import Wanted
from kvacc.cli import cli
from kvacc.errors import KvaccError
from kvacc.leaderboard_rows import build
from kvacc.plots.drawing import save
from kvacc.plots.latency_accuracy import latency_accuracy_figures
from kvacc.plots.memory_bars import memory_figures
from kvacc.plots.probe_series import labels_of
from kvacc.plots.time_to_first_token import time_to_first_token_figures
from kvacc.probes.store import write_probe
from kvacc.results import write_cell

TWO_LOST = [1, 1, 1, 1, 1, 1, 0, 0, 0, 0]


def timed(*what, prompt=1024, first=0.5, **changes):
    return make_probe(*what, prompt_tokens=prompt, latency=make_latency(0.02, first), **changes)


def failed(*what, prompt, **changes):
    return make_probe(*what, prompt_tokens=prompt, failure="out of memory: more than 4 GiB", **changes)


def encoding_of(figure, name):
    """The first encoding of that name in a chart."""
    layers = figure.chart.to_dict()["layer"]
    return next(layer["encoding"][name] for layer in layers if name in layer.get("encoding", {}))


# ---- time to first token -----------------------------------------------------------------


def test_times_to_first_token_are_the_records():
    records = [timed(prompt=512, first=0.2), timed(prompt=1024, first=0.4), timed("h2o", "0.2", first=0.5)]
    (figure,) = time_to_first_token_figures(records)
    points = {
        (p["label"], p["prompt"]): (p["time"], p["low"], p["high"]) for p in data_of(figure, "time", "low")
    }
    assert points == {
        ("full", 512): (200, 180, 220), ("full", 1024): (400, 360, 440), ("h2o 0.2", 1024): (500, 450, 550),
    }  # fmt: skip
    assert "time to first token, ms" in str(figure.chart.to_dict())
    assert "full: 512: 200 (180 to 220), 1,024: 400" in figure.description
    assert figure.title == "tiny (float32), serve, cpu (x86), batch 1"


def test_the_shortest_prompt_that_failed_is_marked_above_everything():
    records = [
        timed(prompt=512, first=0.2), timed(prompt=1024, first=0.4), failed(prompt=4096), failed(prompt=2048),
        timed("h2o", "0.2", prompt=4096, first=0.9), failed("quest", "0.2", prompt=2048),
    ]  # fmt: skip
    (figure,) = time_to_first_token_figures(records)
    marks = {mark["label"]: mark for mark in data_of(figure, "reason")}
    assert {label: mark["prompt"] for label, mark in marks.items()} == {"full": 2048, "quest 0.2": 2048}
    assert all(mark["time"] > 990 for mark in marks.values())  # the highest bar ends at 990 ms
    assert marks["full"]["time"] != marks["quest 0.2"]["time"]
    assert "2,048: could not run (out of memory: more than 4 GiB)" in figure.description
    assert figure.remark.count("out of memory") == 2
    tails = [
        (p["label"], p["prompt"]) for p in data_of(figure, "time") if "low" not in p and "reason" not in p
    ]
    assert tails == [("full", 1024), ("full", 2048)]  # from the last that ran to the cross


def test_wide_axes_are_logarithmic():
    near = [timed(prompt=512, first=0.2), timed(prompt=1024, first=0.4)]
    far = [timed(prompt=512, first=0.2), timed(prompt=16384, first=40.0)]
    kinds = [
        [encoding_of(figure, axis)["scale"].get("type") for axis in ("x", "y")]
        for records in (near, far)
        for figure in time_to_first_token_figures(records)
    ]
    assert kinds == [[None, None], ["log", "log"]]
    (figure,) = time_to_first_token_figures(far)
    assert encoding_of(figure, "y")["title"] == "time to first token, s"
    low, high = encoding_of(figure, "y")["scale"]["domain"]
    assert low < 0.18 and high > 44


def test_lines_differ_by_kernel_chunk_and_options():
    records = [
        timed(), timed(kernel="sdpa"), timed("h2o", "0.2", prefill_chunk=256, options={"recent_fraction": 0.5}),
        timed("h2o", "0.2", options={"recent_fraction": 0.1}), timed("h2o", "0.2", budget_of="seen", options={}),
    ]  # fmt: skip
    assert sorted(labels_of(records).values()) == [
        "full", "full, sdpa", "h2o 0.2 of seen", "h2o recent_fraction=0.1 0.2",
        "h2o recent_fraction=0.5 0.2, chunks of 256",
    ]  # fmt: skip


def test_batches_protocols_and_machines_have_pictures_of_their_own():
    records = [
        timed(), timed("h2o", "0.2"), timed("h2o", "0.2", protocol="stream"), timed(batch=4),
        timed("h2o", "0.2", environment={"device": "cuda:0"}),
    ]  # fmt: skip
    titles = [figure.title for figure in time_to_first_token_figures(records)]
    assert titles == [
        "tiny (float32), serve, cpu (x86), batch 1", "tiny (float32), stream, cpu (x86), batch 1",
        "tiny (float32), cpu (x86), batch 4", "tiny (float32), serve, cuda:0 (x86), batch 1",
    ]  # fmt: skip
    # full, which no protocol changes, stands beside both.
    for figure in time_to_first_token_figures(records)[:2]:
        assert {point["label"] for point in data_of(figure, "low")} == {"full", "h2o 0.2"}


def test_a_picture_needs_one_case_that_ran():
    assert time_to_first_token_figures([failed(prompt=2048)]) == []
    assert (
        time_to_first_token_figures([timed(memory=None, prompt=5).model_copy(update={"latency": None})]) == []
    )


# ---- memory ------------------------------------------------------------------------------


def test_bars_stack_to_the_peak_of_prefill_with_host_memory_behind():
    mib = 2**20
    records = [
        make_probe(memory=make_memory(kv=100 * mib, weights=500 * mib, activations=300 * mib, decode=20 * mib)),
        make_probe(
            "quest", "0.2",
            memory=make_memory(kv=10 * mib, host=90 * mib, summaries=5 * mib, weights=500 * mib, activations=300 * mib),
        ),
    ]  # fmt: skip
    (figure,) = memory_figures(records)
    sizes = {(p["label"], p["part"]): p["size"] for p in data_of(figure, "part")}
    assert sizes["full", "weights"] == 500 and sizes["full", "KV entries on the device"] == 100
    assert ("full", "KV entries in host memory") not in sizes
    assert sizes["quest 0.2", "KV entries in host memory"] == 90
    assert sizes["quest 0.2", "what entries are selected by"] == 5
    places = {p["part"]: p["place"] for p in data_of(figure, "part")}
    assert max(places, key=places.get) == "KV entries in host memory"
    peaks = {(p["label"], p["peak"]): p["size"] for p in data_of(figure, "peak")}
    on_device = sum(v for (label, part), v in sizes.items() if label == "quest 0.2" and "host" not in part)
    assert peaks["quest 0.2", "peak of prefill"] == on_device == 815
    assert peaks["full", "peak of decode"] == 620
    assert "live bytes, MiB" in str(figure.chart.to_dict())
    assert "full: weights 500.0 MiB, KV entries on the device 100.0 MiB" in figure.description


@pytest.mark.parametrize(
    "predicted, words",
    [
        ({"predicted_device": 1000, "predicted_host": 0}, "entries as the formula says"),
        ({"predicted_device": 900, "predicted_host": 0}, "entries by the formula 900 B"),
        ({}, ""),
    ],
)
def test_the_formula_is_said_beside_what_was_measured(predicted, words):
    (figure,) = memory_figures([make_probe(memory=make_memory(kv=1000, **predicted))])
    assert words in figure.description
    assert words or "formula" not in figure.description


def test_what_could_not_run_is_named_beside_the_bars():
    records = [make_probe("h2o", "0.2"), make_probe(failure="out of memory: more than 4 GiB")]
    (figure,) = memory_figures(records)
    assert figure.remark == "Could not run: full: out of memory: more than 4 GiB."
    assert {p["label"] for p in data_of(figure, "part")} == {"h2o 0.2"}
    assert memory_figures(records[1:]) == []


def test_prompts_are_not_mixed_and_go_from_short_to_long():
    records = [make_probe(prompt_tokens=n) for n in (16384, 512, 4096)]
    titles = [figure.title for figure in memory_figures(records)]
    assert [title.split("prompt of ")[1] for title in titles] == [
        "512 tokens, batch 1", "4,096 tokens, batch 1", "16,384 tokens, batch 1",
    ]  # fmt: skip


# ---- latency and accuracy ----------------------------------------------------------------

CELLS = [
    make_cell(),
    make_cell("h2o", TWO_LOST, budget="0.2", kept=0.2),
    make_cell("h2o", budget="0.5", kept=0.5),
    make_cell("recent", TWO_LOST, budget="0.5", kept=0.5),
]
PROBES = [
    make_probe(latency=make_latency(0.050)),
    make_probe("h2o", "0.2", latency=make_latency(0.020)),
    make_probe("h2o", "0.5", latency=make_latency(0.030)),
    make_probe("recent", "0.5", latency=make_latency(0.040)),
]


def test_points_have_the_difference_of_results_and_the_time_of_probes():
    rows = build(CELLS)
    (figure,) = latency_accuracy_figures(CELLS, rows, PROBES)
    points = {p["name"]: p for p in data_of(figure, "time", "difference")}
    assert {name: (p["time"], p["difference"], p["front"]) for name, p in points.items()} == {
        "full": (50, 0, "no"), "h2o 0.2": (20, -20, "yes"), "h2o 0.5": (30, 0, "yes"),
        "recent 0.5": (40, -20, "no"),
    }  # fmt: skip
    row = next(row for row in rows if row.budget == "0.2")
    assert points["h2o 0.2"]["low"] == pytest.approx(row.difference_low, abs=1e-4)
    assert points["h2o 0.2"]["high"] == pytest.approx(row.difference_high, abs=1e-4)
    assert (points["h2o 0.2"]["time_low"], points["h2o 0.2"]["time_high"]) == (18, 22)
    assert "On the front: h2o 0.2: -20.0" in figure.description
    assert figure.remark.startswith(
        "Time: prompt of 1,024 tokens, batch 1, 32 tokens generated, protocol serve"
    )


def test_what_was_not_probed_or_did_not_act_is_named():
    cells = [*CELLS[:3], make_cell("recent", budget="0.5", acted=0, kept=1.0)]
    (figure,) = latency_accuracy_figures(cells, build(cells), [PROBES[0], PROBES[1], PROBES[3]])
    assert {p["name"] for p in data_of(figure, "time", "difference")} == {"full", "h2o 0.2"}
    assert "Not drawn, without a difference or a probe: h2o 0.5, recent 0.5." in figure.remark


def test_the_average_is_over_the_tasks_that_can_show_a_loss():
    chance = {"piqa": 0.1, "copa": 0.1, "boolq": 0.8}
    cells = [
        make_cell(*what, task=task, chance=level, **({"budget": "0.2"} if what else {}))
        for task, level in chance.items()
        for what in ((), ("h2o", TWO_LOST))
    ]
    figures = latency_accuracy_figures(cells, build(cells), PROBES)
    average = figures[0]
    assert average.title == "tiny, average of 2 tasks (copa, piqa), 0-shot, stream" and len(figures) == 4
    points = {p["name"]: p["difference"] for p in data_of(average, "time", "difference")}
    assert points == {"full": 0, "h2o 0.2": -20}
    assert "Left out, because full is at chance there: boolq." in average.remark


def test_probes_of_another_model_are_an_error():
    other = [make_probe("h2o", "0.2", model={"pretrained": "large", "dtype": "float32"})]
    with pytest.raises(KvaccError, match="the probes are of other models than the results, tiny"):
        latency_accuracy_figures(CELLS, build(CELLS), other)


def test_the_setting_may_be_chosen():
    long = [p.model_copy(update={"case": p.case.model_copy(update={"prompt_tokens": 4096})}) for p in PROBES]
    for wanted, said in ((Wanted(), "4,096"), (Wanted(prompt_tokens=1000), "1,024")):
        (figure,) = latency_accuracy_figures(CELLS, build(CELLS), [*PROBES, *long], wanted)
        assert f"prompt of {said} tokens" in figure.remark


# ---- the command line --------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path):
    for cell in CELLS:
        write_cell(tmp_path / "runs", cell)
    for probe in [*PROBES, failed(prompt=4096), failed("h2o", "0.2", prompt=4096)]:
        write_probe(tmp_path / "probes", probe)
    return tmp_path


@pytest.mark.parametrize("kind", ["ttft", "memory", "latency"])
def test_pictures_are_written_twice_alike(folders, kind):
    where = [folders / "runs", "--probes", folders / "probes"] if kind == "latency" else [folders / "probes"]
    written = []
    for name in ("one.svg", "two.svg"):
        words = ["plot", kind, *where, "--output", folders / name]
        found = CliRunner().invoke(cli, [str(word) for word in words])
        assert found.exit_code == 0, found.output
        written.append((folders / name).read_bytes())
    assert written[0] == written[1]
    assert b"<desc" in written[0] and b"full" in written[0] and str(folders).encode() not in written[0]


def test_unknown_filters_and_empty_folders_are_one_line(folders):
    for words, message in (
        (["ttft", folders / "probes", "--strategy", "h20"], "did you mean 'h2o'?"),
        (["ttft", folders / "probes", "--prompt", "4096"], "hold no measured time to first token"),
        (["memory", folders / "runs"], "no probe.json in"),
        (["memory", folders / "probes", "--output", "x.gif"], "unknown picture format"),
    ):
        found = CliRunner().invoke(cli, ["plot", *map(str, words)])
        assert found.exit_code == 2 and message in found.output and found.output.count("\n") == 1


def test_every_picture_is_valid_and_drawn(tmp_path):
    records = [*PROBES, failed(prompt=4096)]
    for name, figures in (
        ("ttft", time_to_first_token_figures(records)),
        ("memory", memory_figures(records)),
        ("latency", latency_accuracy_figures(CELLS, build(CELLS), records)),
    ):
        for figure in figures:
            figure.chart.to_dict()  # validated by Altair
            assert figure.caption and figure.description and figure.about["model"]
        assert save(figures, tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
