"""Scores of retention tasks: worked out by hand."""

from __future__ import annotations

import math

import pytest
from kvacc.tasks.retention import scoring


def test_multiple_choice_reports_its_own_depth():
    document = {"label": 2, "depth": 0.9}
    results = [(math.log(p), False) for p in (0.1, 0.2, 0.4, 0.1)]
    scores = scoring.multiple_choice(document, results)
    assert scores == pytest.approx({"acc": 1, "graded": 0.5, "acc_depth_90": 1, "graded_depth_90": 0.5})
    assert scoring.multiple_choice({"label": 1, "depth": None}, results) == pytest.approx(
        {"acc": 0.0, "graded": 0.25}
    )


def test_ties_and_impossible_options():
    document = {"label": 2, "depth": None}
    # A tie counts for the first option only, as in lm-eval.
    assert scoring.multiple_choice(document, [(-1.0, False)] * 4) == {"acc": 0.0, "graded": 0.25}
    assert scoring.multiple_choice(document, [(-math.inf, False)] * 4)["graded"] == 0.25
    far = [(-2000.0, False), (-3000.0, False), (-1000.0, True), (-math.inf, False)]
    assert scoring.multiple_choice(document, far) == {"acc": 1.0, "graded": 1.0}


@pytest.mark.parametrize(
    ("response", "exact", "graded"),
    [
        (" 48213.", 1, 1),
        ("48,213", 1, 1),
        (" 48213 and 11111", 1, 1),
        (" 4821", 0, 0.8),
        (" 48273", 0, 0.8),
        (" 148213", 0, 0),  # no digit at its place: 14821 against 48213
        (" 482131", 0, 5 / 6),  # a sixth digit is a wrong place
        ("", 0, 0),
        ("none", 0, 0),
    ],
)
def test_generated_number(response, exact, graded):
    scores = scoring.generated_number({"answer": "48213", "depth": 0.5}, [response])
    assert scores == pytest.approx(
        {"exact_match": exact, "graded": graded, "exact_match_depth_50": exact, "graded_depth_50": graded}
    )


@pytest.mark.parametrize(
    ("response", "exact", "graded"),
    [
        (" 1111, of the Oslo office 2222, of the Lima office 3333.", 1, 1),
        (" 1,111, 2222 3333 9999", 1, 1),
        (" 2222, 1111, 3333", 0, 1),  # all found, not in order
        (" 1111, 5555, 6666, 3333", 0, 1 / 3),  # only as many numbers count as were asked for
        (" 1111 1111 1111", 0, 1 / 3),
        (" none", 0, 0),
    ],
)
def test_generated_numbers(response, exact, graded):
    scores = scoring.generated_numbers({"answers": ["1111", "2222", "3333"], "depth": None}, [response])
    assert scores == pytest.approx({"exact_match": exact, "graded": graded})


@pytest.mark.parametrize(
    ("response", "exact", "graded"),
    [
        (" mango.", 1, 1),
        ("Mango and more", 1, 1),
        (" melon", 0, 0.2),
        (" man", 0, 0.6),
        (" mangos", 0, 5 / 6),
        (" a mango", 0, 0),
        ("", 0, 0),
    ],
)
def test_generated_word(response, exact, graded):
    scores = scoring.generated_word({"answer": "mango", "depth": None}, [response])
    assert scores == pytest.approx({"exact_match": exact, "graded": graded})


@pytest.mark.parametrize(
    ("response", "exact", "graded"),
    [
        (" copper. Rule 2: I say 482. Rule 3: I say maple.", 1, 1),
        (" Copper, 482, maple", 1, 1),
        (" copper, maple, 482", 0, 2 / 3),
        (" 482, maple", 0, 2 / 3),
        (" maple, 482, copper", 0, 1 / 3),
        # The right answer has 11 words; here the third word of it is the twelfth.
        (" copper 482 1 2 3 4 5 6 7 8 9 maple", 0, 2 / 3),
        ("", 0, 0),
    ],
)
def test_generated_sequence(response, exact, graded):
    doc = {
        "answer": "copper. Rule 2: I say 482. Rule 3: I say maple.",
        "answers": ["copper", "482", "maple"],
        "depth": None,
    }
    assert scoring.generated_sequence(doc, [response]) == pytest.approx(
        {"exact_match": exact, "graded": graded}
    )


@pytest.mark.parametrize(
    ("response", "exact", "graded"),
    [
        (" The baker swept the steps. It rained.", 1, 1),
        ("the baker swept the steps", 1, 1),
        (" The tailor swept the steps.", 0, 0.8),
        (" baker the steps", 0, 0.6),
        (" Other things happened. The baker swept the steps.", 0, 0.6),  # the, baker, swept in 6 words
        ("", 0, 0),
    ],
)
def test_generated_text(response, exact, graded):
    scores = scoring.generated_text({"answer": "The baker swept the steps.", "depth": None}, [response])
    assert scores == pytest.approx({"exact_match": exact, "graded": graded})


def test_normalised():
    assert scoring.normalised("  The  48,213 Foxes, red-haired! ") == "the 48213 foxes red haired"
    assert scoring.numbers_of("1,234 and 12,34 and 5,678,901") == ["1234", "12", "34", "5678901"]


def test_names_of_metrics():
    assert scoring.metric_names("acc", (0.0, 0.29, 1.0)) == [
        "acc", "graded", "acc_depth_0", "graded_depth_0", "acc_depth_29", "graded_depth_29",
        "acc_depth_100", "graded_depth_100",
    ]  # fmt: skip
