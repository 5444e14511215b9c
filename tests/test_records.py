"""Averages of what the backend recorded, worked by hand."""

from __future__ import annotations

import dataclasses

import pytest

from kvacc.records import (
    SELECTION,
    SELECTION_BY_LAYER,
    RequestRecord,
    as_bytes,
    as_ranges,
    mean_selection,
    selection_of,
    selection_words,
    weighted_mean,
)

RECORD = RequestRecord(
    task="task", doc_id=0, option=0, kind="loglikelihood", prompt_tokens=9, scored_tokens=1,
    truncated_tokens=0, budget_entries=4, kept_fraction=0.5, acted=True, unreachable_tokens=0,
)  # fmt: skip
NOTHING = dict.fromkeys((*SELECTION, *SELECTION_BY_LAYER))


def selecting(moved, mass, recall, mass_by_layer, recall_by_layer):
    return dataclasses.replace(
        RECORD,
        moved_bytes=moved,
        attention_mass=mass,
        recall=recall,
        mass_by_layer=mass_by_layer,
        recall_by_layer=recall_by_layer,
    )


def test_means_are_weighted_and_leave_out_what_is_unknown():
    assert weighted_mean([1.0, 5.0], [3, 1]) == 2.0
    assert weighted_mean([1.0, None, 5.0], [1, 7, 1]) == 3.0
    assert weighted_mean([None, None], [1, 1]) is None
    assert weighted_mean([1.0], [0]) is None and weighted_mean([], []) is None


def test_selections_are_averaged_by_scored_tokens_and_layer_by_layer():
    parts = [
        selecting(1000.0, 0.9, 0.8, (None, 0.8, 1.0), (None, 0.7, 0.9)),
        selecting(200.0, 0.5, 0.4, (None, 0.4, 0.6), (None, 0.3, 0.5)),
    ]
    means = mean_selection(parts, [1, 3])
    # (1000 + 3 * 200) / 4, (0.9 + 3 * 0.5) / 4 and so on.
    assert {name: means[name] for name in SELECTION} == pytest.approx(
        {"moved_bytes": 400.0, "attention_mass": 0.6, "recall": 0.5}
    )
    assert means["mass_by_layer"] == (None, pytest.approx(0.5), pytest.approx(0.7))
    assert means["recall_by_layer"] == (None, pytest.approx(0.4), pytest.approx(0.6))
    # A request of which nothing is known, such as an empty text, changes nothing.
    assert mean_selection([*parts, RECORD], [1, 3, 9]) == means
    assert mean_selection(parts[:1], [5]) == selection_of(parts[0])


def test_strategies_that_do_not_select_have_no_selection():
    assert mean_selection([RECORD, RECORD], [1, 2]) == mean_selection([], []) == NOTHING
    assert selection_of(RECORD) == selection_of(object()) == NOTHING
    assert selection_words(None, None, None) == []


def test_a_selection_in_words_holds_what_is_known():
    words = ["moved 1.5 KiB/token", "attention mass 97.0%", "recall 93.4%"]
    assert selection_words(1536, 0.97, 0.934) == words
    assert selection_words(1536, None, None) == words[:1]
    assert selection_words(0, None, 0.0) == ["moved 0 B/token", "recall 0.0%"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"), (512.4, "512 B"), (1023.4, "1023 B"), (1023.6, "1.0 KiB"), (1024, "1.0 KiB"),
        (1536, "1.5 KiB"), (1023.96 * 1024, "1.0 MiB"), (23.44 * 2**20, "23.4 MiB"), (3 * 2**40, "3072.0 GiB"),
    ],
)  # fmt: skip
def test_bytes_are_shown_in_binary_units(number, text):
    assert as_bytes(number) == text


@pytest.mark.parametrize(
    "places, shown",
    [([], []), ([4], ["4"]), ([0, 3, 7, 8, 9], ["0", "3", "7-9"]), ([1, 2, 4, 5], ["1-2", "4-5"])],
)
def test_neighbouring_places_are_shown_as_ranges(places, shown):
    assert as_ranges(places) == shown
