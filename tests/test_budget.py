"""Budgets: what a person may write, and exact rounding."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvacc.budget import EVERYTHING, Budget
from kvacc.errors import KvaccError
from kvacc.strategy import make_strategy


@pytest.mark.parametrize(
    ("written", "prompt", "entries"),
    [
        (0.9, 1000, 900),  # 0.9 * 1000 is exact; many products of floats are not
        (0.1, 30, 3),  # 0.1 * 30 is 3.0000000000000004 in some orders of multiplication
        (0.07, 100, 7),  # 0.07 * 100 == 7.000000000000001
        (0.29, 100, 29),  # 0.29 * 100 == 28.999999999999996
        (0.55, 100, 55),  # 0.55 * 100 == 55.00000000000001
        (0.2, 7, 2),  # 1.4 rounded up
        (0.2, 1, 1),
        (0.001, 10, 1),  # never less than one entry
        (0.5, 0, 1),
        ("20%", 1000, 200),
        (" 20 % ", 1000, 200),
        ("0.2", 1000, 200),
        ("12.5%", 1000, 125),
        ("1/3", 1000, 334),
        ("1/3", 999, 333),
        (Fraction(1, 3), 999, 333),
        ("1e-2", 1000, 10),
        (1, 1000, 1),
        ("1", 1000, 1),
        (1.0, 1000, EVERYTHING),
        ("1.0", 1000, EVERYTHING),
        ("100%", 1000, EVERYTHING),
        (256, 1000, 256),
        ("256", 1000, 256),
        ("1_024", 4096, 1024),
        (256, 10, 256),  # a count does not shrink with the prompt
    ],
)
def test_entries(written, prompt, entries):
    assert Budget.parse(written).entries(prompt) == entries


@pytest.mark.parametrize("percent", range(1, 100))
def test_every_percentage_is_exact(percent):
    assert Budget.parse(percent / 100).entries(1000) == 10 * percent
    assert Budget.parse(f"{percent}%").entries(1000) == 10 * percent


def test_a_count_is_a_count_and_a_fraction_a_fraction():
    assert not Budget.parse(1).is_fraction and Budget.parse(1.0).is_fraction
    assert not Budget.parse("1").is_fraction and Budget.parse("1.0").is_fraction


def test_a_fraction_of_the_prompt_ignores_what_was_seen():
    budget = Budget.parse(0.2)
    assert {budget.entries(100, seen) for seen in (1, 50, 100, 500)} == {20}


def test_a_fraction_of_what_was_seen_grows():
    budget = Budget.parse(0.2, of="seen")
    assert [budget.entries(100, seen) for seen in (1, 5, 6, 100, 500)] == [1, 1, 2, 20, 100]
    assert budget.entries(100) == 20  # before anything was seen: the prompt
    assert Budget.parse(7, of="seen").entries(100, 3) == 7


@pytest.mark.parametrize(
    ("written", "text"),
    [(256, "256"), (1, "1"), (1.0, "1.0"), (0.2, "0.2"), ("20%", "0.2"), ("1/3", "1/3"), ("1/5", "0.2"), ("12.5%", "0.125")],
)
def test_canonical_text_reads_back_as_the_same_budget(written, text):
    budget = Budget.parse(written)
    assert str(budget) == text
    assert Budget.parse(text) == budget


def test_equal_budgets_are_equal_however_written():
    assert Budget.parse(0.2) == Budget.parse("20%") == Budget.parse("1/5")
    assert Budget.parse(1) != Budget.parse(1.0)
    assert Budget.parse(0.2) != Budget.parse(0.2, of="seen")
    assert repr(Budget.parse(0.2)) == "Budget('0.2')"
    assert repr(Budget.parse(0.2, "seen")) == "Budget('0.2', of='seen')"


HOW = r"give a count of entries \(256\) or a fraction in \(0, 1\] \(0.2, '20%'\)"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (0, "budget 0 keeps nothing"),
        ("0", "budget 0 keeps nothing"),
        (0.0, "budget 0 keeps nothing"),
        ("0%", "budget 0% keeps nothing"),
        (-1, "budget -1 keeps nothing"),
        ("-3", "budget -3 keeps nothing"),
        (-0.5, "budget -0.5 keeps nothing"),
        ("-20%", "budget -20% keeps nothing"),
        (1.5, "budget 1.5 as a fraction is above 1"),
        ("1.5", "budget 1.5 as a fraction is above 1"),
        ("150%", "budget 150% as a fraction is above 1"),
        ("3/2", "budget 3/2 as a fraction is above 1"),
        (2.0, "budget 2 as a fraction is above 1"),
        ("abc", "budget 'abc' is not a number"),
        ("", "budget '' is not a number"),
        ("%", "budget '%' is not a number"),
        ("1/0", "budget '1/0' is not a number"),
        ("20 percent", "budget '20 percent' is not a number"),
        (True, "budget True is not a number"),
        (False, "budget False is not a number"),
        (None, "budget None is not a number"),
        ([256], r"budget \[256\] is not a number"),
        (float("nan"), "budget nan is not a finite number"),
        (float("inf"), "budget inf is not a finite number"),
        (float("-inf"), "budget -inf is not a finite number"),
        ("nan", "budget nan is not a finite number"),
        ("inf", "budget inf is not a finite number"),
    ],
)
def test_bad_values_are_refused_in_one_line_that_says_what_to_write(written, message):
    with pytest.raises(KvaccError, match=f"^{message}; {HOW}") as error:
        Budget.parse(written)
    assert "\n" not in str(error.value)


def test_a_count_written_as_a_float_is_told_how_to_write_it():
    with pytest.raises(KvaccError, match="for 256 entries write 256$"):
        Budget.parse(256.0)
    with pytest.raises(KvaccError) as error:
        Budget.parse(1.5)
    assert "entries write" not in str(error.value)


def test_an_unknown_reference_is_refused_with_the_known_ones():
    with pytest.raises(KvaccError, match=r"unknown budget_of 'promt' \(did you mean 'prompt'\?\); known: prompt, seen"):
        Budget.parse(0.2, of="promt")


def test_strategies_read_budgets_alike():
    assert make_strategy("h2o", "20%") == make_strategy("h2o", 0.2)
    assert make_strategy("recent", 8, "seen").budget.of == "seen"
    with pytest.raises(KvaccError, match="keeps nothing"):
        make_strategy("recent", 0)
    with pytest.raises(KvaccError, match="'full' keeps every entry"):
        make_strategy("full", 0.5)
    assert make_strategy("full", 1.0) == make_strategy("full")


def test_numbers_of_other_libraries_are_numbers():
    import numpy

    assert Budget.parse(numpy.float64(0.2)) == Budget.parse(0.2)
    assert Budget.parse(numpy.int64(5)) == Budget.parse(5)


@pytest.mark.parametrize("amount", [0, -3, 0.2, True])
def test_a_budget_made_by_hand_is_checked_too(amount):
    with pytest.raises(KvaccError, match="budget"):
        Budget(amount)


def test_budget_of_is_never_ignored():
    assert make_strategy("h2o", Budget.parse(0.2), "seen").budget.of == "seen"
    with pytest.raises(KvaccError, match="did you mean 'seen'"):
        make_strategy("full", 1.0, "sen")


def test_one_entry_and_everything_are_different_budgets():
    assert Budget.parse(1) != Budget.parse(1.0)
    assert len({Budget.parse(1), Budget.parse(1.0), Budget.parse("100%")}) == 2
    with pytest.raises(KvaccError, match="keeps every entry"):
        make_strategy("full", 1)
