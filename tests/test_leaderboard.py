"""The leaderboard claims only what the cells show. Synthetic cells, numbers worked by hand."""

from __future__ import annotations

import csv
import io
import json

import pytest

from kvacc.errors import KvaccError
from kvacc.leaderboard import averages, build, render_table, to_csv, to_json, to_markdown, write
from kvacc.leaderboard_rows import (
    ACTED_PARTLY,
    AT_CHANCE,
    CONTROL,
    DID_NOT_ACT,
    IDENTICAL,
    NON_CAUSAL,
    NOT_RANKED,
    NOT_SIGNIFICANT,
    OFFLOADED,
    SIMULATED,
    SMOKE_TEST,
)
from kvacc.results import CellResult

# Ten items, eight right: full is well above a chance of 0.1.
FULL_CORRECT = [1, 1, 1, 1, 1, 1, 1, 1, 0, 0]


def make_cell(
    strategy="full",
    correct=FULL_CORRECT,
    *,
    budget=None,
    options=None,
    protocol="stream",
    task="piqa",
    kind="benchmark",
    shots=0,
    limit=10,
    chance=0.1,
    metric="acc",
    version="1.0",
    data="data",
    prompt="prompt",
    document="document",
    clusters=None,
    kept=None,
    acted=None,
    unreachable=0.0,
    causal=True,
    physical=True,
    control=False,
    shift=None,
    model=None,
    fingerprint="weights",
    torch="2.13",
    truncated=0,
    warnings=(),
    stderr=0.0,
    selection=None,
):
    """A cell of two options per item whose item i is right when ``correct[i]``."""
    items = len(correct)
    full = strategy == "full"
    # A strategy that acts moves log-likelihoods even where the answer stays.
    shift = (0.0 if full else -0.5) if shift is None else shift
    acted = (0 if full else items) if acted is None else acted
    kept = (1.0 if full else 0.3) if kept is None else kept
    samples = [
        {
            "doc_id": i,
            "doc_hash": f"{document}{i}",
            "prompt_hash": f"{prompt}{i}",
            "target_hash": f"target{i}",
            "cluster": f"cluster{i}" if clusters is None else clusters[i],
            "option": option,
            "kind": "loglikelihood",
            "loglikelihood": -float(i) - option + shift,
            "greedy": False,
            "response": None,
            "target": "0",
            "kept_fraction": kept,
            "acted": i < acted,
            "prompt_tokens": 100,
            "scored_tokens": 4,
            "unreachable_tokens": 0,
            "truncated_tokens": 0,
            "budget_entries": None if full else 20,
            "bos_tokens": 0,
            f"metric_{metric}": float(value),
        }
        for i, value in enumerate(correct)
        for option in range(2)
    ]
    name = "_".join(
        map(str, (strategy, budget, protocol, task, shots, limit, options, model, prompt, version))
    )
    return CellResult(
        cell_id="".join(c if c.isalnum() else "-" for c in name),
        spec={
            "model": model or {"pretrained": "tiny", "dtype": "float32"},
            "strategy": strategy,
            "options": options or {},
            "budget": budget,
            "protocol": protocol,
            "task": task,
            "shots": shots,
            "limit": limit,
        },
        task={
            "name": task,
            "version": version,
            "kind": kind,
            "source": "embedded",
            "data_fingerprint": data,
            "num_items": items,
            "metrics": [metric],
            "primary_metric": metric,
            "chance": chance,
        },
        model={"name": "tiny", "content": fingerprint, "dtype": "float32"},
        scores={metric: {"value": sum(correct) / items, "stderr": stderr}},
        measured={
            "kept_fraction": kept,
            "acted_share": acted / items,
            "acted_items": acted,
            "unreachable_share": unreachable,
            "truncated_requests": truncated,
            **(selection or {}),
        },
        strategy={
            "causal": causal,
            "physical_eviction": physical,
            "is_control": control,
            "offloads": selection is not None,
            "repr": f"{strategy}({budget})",
        },
        environment={
            "kvacc": "0.1",
            "torch": torch,
            "transformers": "5.24",
            "lm_eval": "0.4.13",
            "python": "3.11",
            "platform": "Linux",
            "processor": "x86",
            "device": "cpu",
        },
        timing={"seconds": 1.0, "started": "2026-01-01T00:00:00+00:00"},
        warnings=list(warnings),
        samples=samples,
    )


def row_of(rows, strategy, **fields):
    """The one row of a strategy with these fields."""
    found = [
        row
        for row in rows
        if row.strategy == strategy and all(getattr(row, name) == value for name, value in fields.items())
    ]
    assert len(found) == 1, f"{len(found)} rows of {strategy} {fields}"
    return found[0]


def text_of(rows, width):
    """What a terminal of this width shows."""
    from rich.console import Console

    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(render_table(rows, width=width))
    return console.file.getvalue()


LOST_THREE_GAINED_ONE = [0, 0, 0, 1, 1, 1, 1, 1, 1, 0]


# --- differences -------------------------------------------------------------------------


def test_difference_is_paired_and_in_points():
    rows = build([make_cell(), make_cell("h2o", LOST_THREE_GAINED_ONE, budget="0.2")])
    row = row_of(rows, "h2o")
    assert (row.flips_lost, row.flips_gained) == (3, 1)
    assert row.score == pytest.approx(0.6)
    assert row.difference == pytest.approx(-20.0)
    assert row.difference_low < -20 < row.difference_high
    assert (row.unit, row.interval_method) == ("points", "tango")
    assert NOT_SIGNIFICANT in row.notes
    assert row.sparsity == pytest.approx(0.7)


def test_standard_error_comes_from_the_items_not_from_a_printed_zero():
    """REPORTS 55: 8 of 10 has sqrt(0.8 * 0.2 / 9) = 0.1333, although lm-eval said 0.0."""
    row = build([make_cell(stderr=0.0)])[0]
    assert row.stderr == pytest.approx(0.133333, abs=1e-6)


def test_significant_loss_is_not_marked_ns():
    rows = build([make_cell(correct=[1] * 40), make_cell("h2o", [0] * 20 + [1] * 20, budget="0.2")])
    row = row_of(rows, "h2o")
    assert row.difference == pytest.approx(-50.0)
    assert row.difference_high < 0
    assert NOT_SIGNIFICANT not in row.notes


def test_clustered_items_get_the_clustered_interval():
    clusters = [f"haystack{i // 5}" for i in range(40)]
    full, lossy = [1] * 40, [0] * 10 + [1] * 30
    alone = row_of(build([make_cell(correct=full), make_cell("h2o", lossy, budget="0.2")]), "h2o")
    shared = row_of(
        build(
            [
                make_cell(correct=full, clusters=clusters),
                make_cell("h2o", lossy, budget="0.2", clusters=clusters),
            ]
        ),
        "h2o",
    )
    assert shared.interval_method == "clustered t"
    assert shared.difference == alone.difference == pytest.approx(-25.0)
    assert shared.difference_high - shared.difference_low > alone.difference_high - alone.difference_low


def test_one_full_cell_is_the_baseline_of_every_protocol():
    rows = build(
        [make_cell()]
        + [
            make_cell("h2o", LOST_THREE_GAINED_ONE, budget="0.2", protocol=p)
            for p in ("stream", "context", "serve")
        ]
    )
    assert [row.difference for row in rows if not row.is_full] == [pytest.approx(-20.0)] * 3
    assert {row.protocol for row in rows} == {"any", "stream", "context", "serve"}


def test_continuous_metric_has_no_flips_and_its_own_unit():
    full = make_cell(correct=[0.5, 1.5, 2.5], metric="rouge", chance=None)
    row = row_of(
        build([full, make_cell("h2o", [0.25, 1.0, 2.5], budget="0.2", metric="rouge", chance=None)]), "h2o"
    )
    assert row.unit == "rouge"
    assert row.flips_lost is None
    assert row.difference == pytest.approx(-0.25)
    assert row.interval_method == "paired t"


# --- refusing to compare -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"version": "2.0"}, "task version 2.0 differs from full's 1.0"),
        ({"data": "other"}, "the task's data differ from full's"),
        ({"prompt": "other"}, "the prompts differ from full's (first at document 0)"),
        ({"document": "other"}, "the documents differ from full's"),
        ({"fingerprint": "other"}, "the model differs from full's"),
        ({"limit": 20}, "full ran with limit 10, this with 20"),
        ({"shots": 5}, "full ran with shots 0, this with 5"),
        ({"task": "copa"}, "full was not run on this task"),
        ({"model": {"pretrained": "other"}}, "full was not run on this task"),
    ],
)
def test_unequal_questions_are_not_compared(changed, reason):
    rows = build([make_cell(), make_cell("h2o", LOST_THREE_GAINED_ONE, budget="0.2", **changed)])
    row = row_of(rows, "h2o")
    assert row.difference is None and row.difference_low is None and row.flips_lost is None
    assert row.why_no_difference == reason
    assert f"not compared: {reason}" in row.notes
    assert reason in to_markdown(rows)


def test_device_does_not_stop_a_comparison_but_another_torch_is_said():
    where = {"pretrained": "tiny", "dtype": "float32", "device": "cuda"}
    rows = build(
        [make_cell(), make_cell("h2o", LOST_THREE_GAINED_ONE, budget="0.2", model=where, torch="2.12")]
    )
    row = row_of(rows, "h2o")
    assert row.difference == pytest.approx(-20.0)
    assert "full ran with another torch" in row.notes


@pytest.mark.parametrize(("device", "said"), [("cpu, 1 threads", False), ("cuda:0 (H200)", True)])
def test_another_device_is_said_but_not_another_number_of_threads(device, said):
    other = make_cell("h2o", LOST_THREE_GAINED_ONE, budget="0.2")
    full = make_cell()
    full = full.model_copy(
        update={"environment": full.environment.model_copy(update={"device": "cpu, 2 threads"})}
    )
    other = other.model_copy(update={"environment": other.environment.model_copy(update={"device": device})})
    row = row_of(build([full, other]), "h2o")
    assert row.difference == pytest.approx(-20.0)
    assert ("full ran with another device" in row.notes) is said


# --- honest rows -------------------------------------------------------------------------


def test_a_strategy_that_never_acted_has_no_difference():
    """Invariant 10: never "no loss", although every answer equals full's."""
    rows = build([make_cell(), make_cell("h2o", budget="256", acted=0, kept=1.0, shift=0.0)])
    row = row_of(rows, "h2o")
    assert row.difference is None
    assert row.why_no_difference == DID_NOT_ACT
    assert DID_NOT_ACT in row.notes
    assert IDENTICAL not in row.notes
    assert row.rank is None
    line = next(line for line in to_markdown(rows).splitlines() if "| h2o" in line)
    assert "0.0" not in line.split("|")[5] and line.split("|")[5].strip() == "-"
    for text in (to_markdown(rows), text_of(rows, 120)):
        assert DID_NOT_ACT in text
        assert "no loss" not in text


def test_identical_loglikelihoods_raise_suspicion():
    """REPORTS 7: it claims to have hidden entries, yet nothing moved."""
    rows = build([make_cell(), make_cell("h2o", budget="0.2", shift=0.0), make_cell("recent", budget="0.2")])
    assert IDENTICAL in row_of(rows, "h2o").notes
    assert IDENTICAL not in row_of(rows, "recent").notes


def test_full_at_chance_cannot_show_a_loss():
    """REPORTS 11: 6 of 10 is within two standard errors (0.163) of 0.5."""
    full = make_cell(correct=[1] * 6 + [0] * 4, chance=0.5)
    rows = build([full, make_cell("h2o", LOST_THREE_GAINED_ONE, budget="0.2", chance=0.5)])
    assert all(AT_CHANCE in row.notes for row in rows)
    assert AT_CHANCE not in build([make_cell(chance=0.5, correct=[1] * 10)])[0].notes


def test_kinds_of_rows_are_marked():
    rows = build(
        [
            make_cell(kind="smoke"),
            make_cell("h2o", LOST_THREE_GAINED_ONE, budget="0.2", causal=False, physical=False, kind="smoke"),
            make_cell("random", LOST_THREE_GAINED_ONE, budget="0.2", control=True, kind="smoke", truncated=3),
        ]
    )
    assert {NON_CAUSAL, SIMULATED, SMOKE_TEST} <= set(row_of(rows, "h2o").notes)
    random = row_of(rows, "random")
    assert {CONTROL, SMOKE_TEST, "3 prompts were cut from the left to fit the model's context"} <= set(
        random.notes
    )
    assert NON_CAUSAL not in random.notes and SIMULATED not in random.notes
    assert SIMULATED not in row_of(rows, "full").notes


def test_warnings_of_the_cell_become_notes_once():
    cell = make_cell(
        "h2o", budget="0.2", causal=False, warnings=["non-causal: scores depend on later tokens", "odd"]
    )
    notes = row_of(build([make_cell(), cell]), "h2o").notes
    assert "odd" in notes
    assert sum("non-causal" in note for note in notes) == 1


def test_a_score_that_its_items_do_not_average_to_is_said():
    cell = make_cell()
    cell.scores["acc"].value = 0.9
    assert any(note.startswith("the items average 0.8") for note in build([cell])[0].notes)


def test_a_strategy_that_acted_on_some_items_says_so():
    rows = build([make_cell(), make_cell("h2o", LOST_THREE_GAINED_ONE, budget="0.2", acted=3)])
    row = row_of(rows, "h2o")
    assert row.acted_share == pytest.approx(0.3)
    assert ACTED_PARTLY in row.notes
    assert row.difference == pytest.approx(-20.0)


def selecting(moved=1536.0, mass=0.97, recall=0.934):
    return {
        "moved_bytes_per_token": moved, "attention_mass": mass, "recall": recall,
        "mass_by_layer": [None, mass], "recall_by_layer": [None, recall],
    }  # fmt: skip


def quest(correct=LOST_THREE_GAINED_ONE, **changes):
    values = {"budget": "0.2", "physical": False, "options": {"dense_layers": 2}, "selection": selecting()}
    return make_cell("quest", correct, **{**values, **changes})


def test_what_a_selection_moved_and_found_is_in_its_row():
    rows = build([make_cell(), quest(), make_cell("h2o", budget="0.2")])
    row = row_of(rows, "quest")
    assert (row.moved_bytes_per_token, row.attention_mass, row.recall) == (1536.0, 0.97, 0.934)
    assert OFFLOADED in row.notes and SIMULATED not in row.notes
    h2o = row_of(rows, "h2o")
    assert h2o.moved_bytes_per_token is h2o.attention_mass is h2o.recall is None
    assert OFFLOADED not in h2o.notes
    lines = {line["strategy"]: line for line in csv.DictReader(io.StringIO(to_csv(rows)))}
    names = ("moved_bytes_per_token", "attention_mass", "recall")
    assert [lines["quest"][name] for name in names] == ["1536.0", "0.97", "0.934"]
    assert [lines["h2o"][name] for name in names] == ["", "", ""]
    in_json = {row["strategy"]: row for row in json.loads(to_json(rows))["rows"]}
    assert [in_json["quest"][name] for name in names] == [1536.0, 0.97, 0.934]
    assert [in_json["full"][name] for name in names] == [None] * 3


def cells_by_title(markdown):
    """The cells of each line of the first table, by their column's title."""
    lines = [line for line in markdown.splitlines() if line.startswith("| ")]
    titles, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {line[0]: dict(zip(titles, line, strict=True)) for line in lines}


def test_tables_show_what_was_moved_only_where_something_was():
    without = build([make_cell(), make_cell("h2o", budget="0.2")])
    for text in (to_markdown(without), text_of(without, 200)):
        assert "moved/token" not in text and "recall" not in text and "mass" not in text
    rows = build([make_cell(), quest(), make_cell("h2o", budget="0.2")])
    shown = cells_by_title(to_markdown(rows))
    titles = ("moved/token", "mass", "recall")
    assert [shown["quest"][title] for title in titles] == ["1.5 KiB", "97.0%", "93.4%"]
    assert [shown["h2o"][title] for title in titles] == ["-", "-", "-"]
    assert "`moved/token` is what was brought" in to_markdown(rows)
    line = next(line for line in text_of(rows, 200).splitlines() if line.startswith("quest"))
    assert "1.5 KiB" in line and "97.0%" in line and "93.4%" in line


def test_a_narrow_terminal_keeps_bytes_longer_than_recall():
    rows = build([make_cell(), quest()])
    for width, there, gone in [
        (100, ("moved/token",), ("mass", "recall")),
        (72, (), ("moved/token", "mass")),
    ]:
        text = text_of(rows, width)
        assert max(map(len, text.splitlines())) <= width
        header = next(line for line in text.splitlines() if line.startswith("strategy"))
        assert all(title in header for title in ("kept", "note", *there))
        assert not any(title in header for title in gone)


def test_a_row_says_which_layers_read_everything():
    def notes(**options):
        return row_of(build([make_cell(), quest(options=options)]), "quest").notes

    assert "layers 0-1 read everything" in notes(dense_layers=2)
    assert "layer 0 reads everything" in notes(dense_layers=1)
    for options in ({"dense_layers": 0}, {}, {"dense_layers": "first"}):
        assert not any("everything" in note for note in notes(**options))
    rows = build([make_cell(), quest()])
    assert "layers 0-1 read everything" in to_markdown(rows)
    assert "layers 0-1 read everything" in text_of(rows, 80)


# --- order and rank ----------------------------------------------------------------------


def test_order_is_full_then_budget_then_score():
    worse, better = [1] * 2 + [0] * 8, [1] * 7 + [0] * 3
    cells = [
        make_cell("h2o", better, budget="0.2"),
        make_cell("recent", worse, budget="0.2"),
        make_cell("recent", better, budget="256"),
        make_cell("recent", worse, budget="0.8"),
        make_cell("recent", better, budget="0.05"),
        make_cell(),
    ]
    order = [(row.strategy, row.budget, row.rank) for row in build(cells)]
    assert order == [
        ("full", None, None),
        ("recent", "0.8", None),
        ("h2o", "0.2", 1),
        ("recent", "0.2", 2),
        ("recent", "0.05", None),
        ("recent", "256", None),
    ]


def test_unequal_kept_fractions_are_not_ranked():
    """REPORTS 19: the same budget on the label, more entries in the cache."""
    cells = [
        make_cell(),
        make_cell("h2o", [1] * 7 + [0] * 3, budget="0.2", kept=0.35),
        make_cell("recent", [1] * 5 + [0] * 5, budget="0.2", kept=0.30),
    ]
    rows = [row for row in build(cells) if not row.is_full]
    assert [row.rank for row in rows] == [None, None]
    assert all(NOT_RANKED in row.notes for row in rows)


def test_protocols_are_ranked_apart_and_non_causal_rows_not_at_all():
    cells = [make_cell()]
    for protocol in ("stream", "context"):
        cells += [make_cell(name, [1] * n + [0] * (10 - n), budget="0.2", protocol=protocol)
                  for name, n in (("h2o", 7), ("recent", 5))]  # fmt: skip
    cells.append(make_cell("h2o", [1] * 10, budget="0.2", causal=False, options={"scores": "global"}))
    ranks = {(row.label, row.protocol): row.rank for row in build(cells) if not row.is_full}
    assert ranks == {
        ("h2o", "stream"): 1,
        ("recent", "stream"): 2,
        ("h2o", "context"): 1,
        ("recent", "context"): 2,
        ("h2o scores=global (non-causal)", "stream"): None,
    }


def test_perplexity_ranks_lower_first():
    cells = [
        make_cell(correct=[10.0, 12.0], metric="word_perplexity", chance=None),
        make_cell("h2o", [11.0, 13.0], budget="0.2", metric="word_perplexity", chance=None),
        make_cell("recent", [30.0, 40.0], budget="0.2", metric="word_perplexity", chance=None),
    ]
    assert [(row.strategy, row.rank) for row in build(cells)] == [("full", None), ("h2o", 1), ("recent", 2)]


def test_order_of_the_cells_does_not_matter():
    cells = [make_cell(), make_cell("h2o", LOST_THREE_GAINED_ONE, budget="0.2"), make_cell(task="copa")]
    assert build(cells) == build(cells[::-1])


# --- averages ----------------------------------------------------------------------------


def two_tasks(**second):
    """Full and h2o on piqa (-20 points) and copa (-40 points)."""
    return [
        make_cell(),
        make_cell(task="copa"),
        make_cell("h2o", LOST_THREE_GAINED_ONE, budget="0.2"),
        make_cell("h2o", [1] * 4 + [0] * 6, budget="0.2", **{"task": "copa", **second}),
    ]


def test_average_counts_each_task_once():
    rows = build(two_tasks())
    full, h2o = averages(rows)
    assert (full.label, full.score, full.difference) == ("full", 80.0, None)
    assert h2o.score == pytest.approx(50.0)
    assert h2o.difference == pytest.approx(-30.0)
    below = [row.difference - row.difference_low for row in rows if not row.is_full]
    assert h2o.difference_low == pytest.approx(-30.0 - (below[0] ** 2 + below[1] ** 2) ** 0.5 / 2, abs=1e-5)


def test_without_full_an_average_has_a_score_and_no_difference():
    rows = build([cell for cell in two_tasks() if cell.spec.strategy != "full"])
    (h2o,) = averages(rows)
    assert h2o.score == pytest.approx(50.0) and len(h2o.tasks) == 2
    assert h2o.difference is None and h2o.why_none is None
    assert "baseline" not in text_of(rows, 120).partition("average of")[2]


def test_averages_say_what_was_moved_on_average():
    cells = [make_cell(), make_cell(task="copa"), quest()]
    cells.append(quest(task="copa", selection=selecting(3072.0, 0.91, 0.834)))
    rows = build(cells)
    full, average = averages(rows)
    assert full.moved_bytes_per_token is full.attention_mass is full.recall is None
    assert average.moved_bytes_per_token == 2304.0
    assert (average.attention_mass, average.recall) == (pytest.approx(0.94), pytest.approx(0.884))
    end = to_markdown(rows).partition("## Averages")[2]
    assert "| moved/token |" in end and "| 2.2 KiB |" in end
    shown = text_of(rows, 120).partition("average of")[2]
    assert "moved/token" in shown and "2.2 KiB" in shown
    assert "moved/token" not in text_of(build(two_tasks()), 120)
    # Known of one task only: no average over both.
    part = build([*cells[:3], quest(task="copa", selection={})])
    assert averages(part)[1].moved_bytes_per_token is None and averages(part)[1].kept_fraction == 0.3


def test_no_average_unless_every_task_is_there_and_compared():
    missing = averages(build(two_tasks()[:3]))
    assert [(a.score, a.why_none) for a in missing if a.label == "h2o"] == [(None, "not run on copa")]
    unequal = averages(build(two_tasks(prompt="other")))
    h2o = next(a for a in unequal if a.label == "h2o")
    assert h2o.score is None and "prompts differ" in h2o.why_none
    idle = averages(build(two_tasks(acted=0)))
    h2o = next(a for a in idle if a.label == "h2o")
    assert (h2o.difference, h2o.why_none) == (None, "did not act on copa")
    assert "did not act on copa" in text_of(build(two_tasks(acted=0)), 120)


def test_averages_of_a_non_causal_strategy_say_so_too():
    cells = two_tasks()
    for cell in cells[2:]:
        cell.strategy.causal = False
    assert "h2o (non-causal)" in {entry.label for entry in averages(build(cells))}


def test_kinds_of_tasks_are_not_averaged_together():
    cells = two_tasks()
    cells += [
        make_cell(task="mini", kind="smoke"),
        make_cell("h2o", [0] * 10, budget="0.2", task="mini", kind="smoke"),
    ]
    assert {a.kind for a in averages(build(cells))} == {"benchmark"}


# --- what people see ---------------------------------------------------------------------


def many_rows():
    cells = []
    for task in ("kvacc_mini_hellaswag", "kvacc_mini_piqa"):
        cells.append(make_cell(task=task, kind="smoke"))
        for name in ("h2o", "streaming_llm"):
            for budget in ("0.5", "0.2"):
                for protocol in ("stream", "serve"):
                    cells.append(
                        make_cell(name, LOST_THREE_GAINED_ONE, budget=budget, protocol=protocol, task=task,
                                  kind="smoke", unreachable=0.25 if protocol == "serve" else 0.0)
                    )  # fmt: skip
    return build(cells)


@pytest.mark.parametrize("width", [80, 120])
def test_table_fits_and_says_what_must_be_said(width):
    text = text_of(many_rows(), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "10 items, acc, chance 10.0" in " ".join(text.split())
    assert "a: smoke test" in text
    # Everything that a row must say stands on one line, unbroken: 4 rows of it in each of 2 blocks.
    lines = [line for line in text.splitlines() if line.startswith("streaming_llm") and "60.0 ± 16.3" in line]
    assert len(lines) == 8
    for line in lines:
        assert "-20.0 [-55.1, +21.7] ns" in line and "30.0%" in line and line.rstrip().endswith(" a")
        assert (" stream " in line) != (" serve " in line)
        assert (" 0.5 " in line) != (" 0.2 " in line)


def test_narrow_table_drops_columns_and_wide_keeps_them():
    rows = build(two_tasks())
    assert all(title in text_of(rows, 120) for title in ("sparsity", "flips", "acted", "rank"))
    assert not any(title in text_of(rows, 72) for title in ("sparsity", "flips"))
    assert all(title in text_of(rows, 72) for title in ("kept", "protocol", "difference", "note"))


def test_long_labels_fold_rather_than_push_numbers_out():
    options = {"scores": "a_very_long_value_that_nobody_can_fit_beside_the_numbers"}
    rows = build(
        [make_cell(), make_cell("h2o", budget="0.2"), make_cell("h2o", budget="0.2", options=options)]
    )
    text = text_of(rows, 80)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.count("80.0 ± 13.3") == 3


def test_square_brackets_in_names_are_shown_as_they_are():
    rows = build([make_cell(model={"pretrained": "x"}, task="[bold]task")])
    assert "[bold]task" in text_of(rows, 120)


def test_files_are_byte_identical_and_agree(tmp_path):
    cells = two_tasks()
    first = [path.read_bytes() for path in write(build(cells), tmp_path / "one")]
    second = [path.read_bytes() for path in write(build(cells[::-1]), tmp_path / "two")]
    assert first == second
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == [
        "leaderboard.csv",
        "leaderboard.json",
        "leaderboard.md",
    ]
    content = json.loads(first[2])
    lines = list(csv.DictReader(io.StringIO(first[1].decode())))
    assert [row["cell_id"] for row in content["rows"]] == [line["cell_id"] for line in lines]
    assert [float(line["score"]) for line in lines] == [row["score"] for row in content["rows"]]
    assert len(content["averages"]) == 2


def test_every_hyper_parameter_is_in_csv_and_json():
    """REPORTS 19: an unfair baseline can be seen in the row."""
    rows = build(
        [make_cell(), make_cell("h2o", budget="0.2", options={"recent_fraction": 0.5, "scores": "kept"})]
    )
    line = next(line for line in csv.DictReader(io.StringIO(to_csv(rows))) if line["strategy"] == "h2o")
    assert json.loads(line["options"]) == {"recent_fraction": 0.5, "scores": "kept"}
    row = next(row for row in json.loads(to_json(rows))["rows"] if row["strategy"] == "h2o")
    assert row["options"] == {"recent_fraction": 0.5, "scores": "kept"}
    assert "`h2o(0.2)`" in to_markdown(rows)


def test_options_that_differ_are_in_the_label():
    rows = build(
        [
            make_cell(),
            make_cell("h2o", budget="0.2", options={"recent_fraction": 0.5, "scores": "kept"}),
            make_cell("h2o", budget="0.2", options={"recent_fraction": 0.5, "scores": "full_row"}),
        ]
    )
    assert {row.label for row in rows} == {"full", "h2o scores=kept", "h2o scores=full_row"}


def test_pipes_do_not_break_markdown():
    rows = build([make_cell(), make_cell("h2o", budget="0.2", warnings=["a|b"])])
    assert "a\\|b" in to_markdown(rows)


def test_unwritable_folder_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KvaccError, match="cannot write .*choose another folder"):
        write(build([make_cell()]), tmp_path / "file")


def test_no_rows_give_an_empty_table():
    assert build([]) == []
    assert text_of([], 80).strip() == ""
