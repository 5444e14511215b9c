"""One-sided tests of a drop against a margin: by hand, by brute force, and against SciPy and statsmodels."""

from __future__ import annotations

import itertools
import math

import numpy
import pytest

from kvacc.errors import KvaccError
from kvacc.exact_tests import exact_tail, sign_flip_p
from kvacc.non_inferiority import (
    combine,
    detectable_drop,
    drop_test,
    mean_drop_test,
    mean_test,
    non_inferiority,
    two_sided_p,
    unchanged_test,
)
from kvacc.statistics import (
    EXACT_ITEMS,
    items_needed,
    mcnemar_exact,
    minimum_detectable_drop,
    tango_interval,
)

SEED = 20261130


def arrays(lost, gained, items):
    """Items right before and wrong now, the other way round, and the rest right in both."""
    before, now = numpy.ones(items), numpy.ones(items)
    now[:lost] = 0
    before[lost : lost + gained] = 0
    return before, now


# --- zeros and ones ----------------------------------------------------------------------


def test_exact_tail_by_hand():
    """One item, lost. With a true drop of 0.2 it is lost with q + 0.2, and q is 0.4 at most."""
    assert exact_tail(1, 0, 1, 0.2, larger=True) == pytest.approx(0.6)
    assert exact_tail(0, 1, 1, 0.2, larger=False) == pytest.approx(0.4)
    assert exact_tail(0, 0, 1, 0.2, larger=True) == pytest.approx(1.0)


def test_exact_tail_with_all_lost():
    """Three of three lost: the most likely truth under a drop of 0.5 loses 3 in 4."""
    assert exact_tail(3, 0, 3, 0.5, larger=True) == pytest.approx(0.75**3)


@pytest.mark.parametrize("margin", [0.0, 0.01, 0.05, 0.2])
@pytest.mark.parametrize("larger", [True, False])
def test_exact_test_keeps_its_level(margin, larger):
    """Whatever the discordance, a true drop of the margin is rejected in at most 5 % of runs."""
    items = 15
    rejected = [
        (lost, gained)
        for lost in range(items + 1)
        for gained in range(items + 1 - lost)
        if exact_tail(lost, gained, items, margin, larger=larger) <= 0.05
    ]
    assert rejected
    for gains in numpy.linspace(0, (1 - margin) / 2, 25):
        losses = gains + margin
        chance = sum(
            math.factorial(items)
            / (math.factorial(b) * math.factorial(c) * math.factorial(items - b - c))
            * losses**b
            * gains**c
            * max(1 - losses - gains, 0.0) ** (items - b - c)
            for b, c in rejected
        )
        assert chance <= 0.05 + 1e-3  # the grid of the unknown share is finite


def test_many_items_get_tangos_interval():
    found = drop_test(*arrays(78, 50, 1000), margin=0.01)
    low, high = tango_interval(78, 50, 1000, confidence=0.9)  # two bounds of 95 % each
    assert (found.low, found.high) == pytest.approx((-high, -low), abs=1e-6)
    assert found.method == "tango" and found.drop == pytest.approx(0.028)


def test_few_items_get_the_exact_test():
    few, more = drop_test(*arrays(5, 1, EXACT_ITEMS)), drop_test(*arrays(5, 1, EXACT_ITEMS + 1))
    assert (few.method, more.method) == ("exact", "tango")
    low, high = tango_interval(5, 1, EXACT_ITEMS, confidence=0.9)
    assert (few.low, few.high) == pytest.approx((-high, -low), abs=0.01)


def test_bounds_are_where_the_p_values_cross():
    """The exact test's p-values jump where outcomes change their order, so they cross only nearly."""
    before, now = arrays(9, 2, 60)
    found = drop_test(before, now)
    assert drop_test(before, now, margin=found.high + 1e-3).p_within < 0.05
    assert drop_test(before, now, margin=found.high - 1e-3).p_within > 0.05
    assert exact_tail(9, 2, 60, found.low - 1e-3, larger=True) < 0.05
    assert exact_tail(9, 2, 60, found.low + 1e-3, larger=True) > 0.05


def test_nothing_lost_in_few_items_is_not_shown_to_be_within():
    """No flip in n items: the largest drop with 0.95^n >= 0.05, so 59 items for 5 points."""
    found = drop_test(*arrays(0, 0, 50), margin=0.05)
    assert found.high == pytest.approx(1 - 0.05 ** (1 / 50), abs=1e-5)
    assert found.needed == items_needed(0.05, 0.0) == 59
    assert drop_test(*arrays(0, 0, 58), margin=0.05).p_within > 0.05
    assert drop_test(*arrays(0, 0, 59), margin=0.05).p_within < 0.05
    assert drop_test(*arrays(0, 0, 1000), margin=0.01).p_within < 0.05


def test_failing_is_never_easier_than_mcnemars_exact_test():
    """Three lost, none gained: Tango's one-sided p is 0.04, but 1 in 8 runs of no difference do it."""
    assert drop_test(*arrays(3, 0, 200), margin=1e-9).p_beyond == pytest.approx(0.125)


def test_both_ends():
    assert drop_test(*arrays(12, 0, 12), margin=0.01).high == pytest.approx(1.0)
    assert drop_test(*arrays(0, 12, 12), margin=0.01).p_beyond == pytest.approx(1.0)


def test_non_inferiority_is_the_upper_bound():
    before, now = arrays(6, 4, 500)
    high = drop_test(before, now).high
    assert non_inferiority(before, now, high + 0.001)
    assert not non_inferiority(before, now, high - 0.001)


# --- sign flips --------------------------------------------------------------------------


@pytest.mark.parametrize("sums", [[1, 1, -1, 1], [3, -1, 2, 5, 1], [2, 2, 2, -2], [5, -5], [4]])
@pytest.mark.parametrize("two_sided", [False, True])
def test_sign_flips_by_enumeration(sums, two_sided):
    totals = [
        sum(sign * size for sign, size in zip(signs, sums, strict=True))
        for signs in itertools.product((1, -1), repeat=len(sums))
    ]
    seen = sum(sums)
    extreme = [abs(t) >= abs(seen) if two_sided else t >= seen for t in totals]
    assert sign_flip_p(sums, two_sided) == pytest.approx(sum(extreme) / len(totals))


@pytest.mark.parametrize(("lost", "gained"), [(5, 0), (7, 3), (2, 6), (0, 0), (30, 11)])
def test_sign_flips_of_single_items_are_mcnemars_test(lost, gained):
    p = sign_flip_p([1] * lost + [-1] * gained + [0] * 10, two_sided=True)
    assert p == pytest.approx(mcnemar_exact(lost, gained))


def test_two_sided_p_names_its_test():
    before, now = arrays(7, 1, 40)
    assert two_sided_p(before, now) == (pytest.approx(mcnemar_exact(7, 1)), "exact McNemar")
    clusters = numpy.arange(40) // 4
    assert two_sided_p(before, now, clusters)[1] == "exact sign flips of clusters"
    from scipy.stats import ttest_rel

    one, two = numpy.random.default_rng(SEED).random((2, 20))
    assert two_sided_p(one, two) == (pytest.approx(ttest_rel(one, two).pvalue), "paired t")


# --- other values and clusters -----------------------------------------------------------


def test_continuous_items_get_scipys_one_sided_t():
    from scipy.stats import ttest_rel

    before, now = numpy.random.default_rng(SEED).random((2, 30))
    found = drop_test(before, now, margin=0.1)
    within = ttest_rel(before - 0.1, now, alternative="less").pvalue
    beyond = ttest_rel(before - 0.1, now, alternative="greater").pvalue
    assert (found.p_within, found.p_beyond) == pytest.approx((within, beyond))
    interval = ttest_rel(before, now).confidence_interval(0.9)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=1e-6)


def test_continuous_items_agree_with_statsmodels_tost():
    from statsmodels.stats.weightstats import ttost_paired

    before, now = numpy.random.default_rng(SEED + 1).random((2, 50))
    _, low, high = ttost_paired(before, now, -0.2, 0.2)
    assert drop_test(before, now, margin=0.2).p_within == pytest.approx(high[1])
    assert drop_test(now, before, margin=0.2).p_within == pytest.approx(low[1])


def test_clusters_by_hand():
    """Drops 1, 1, 0, 0 in pairs: mean 0.5, clustered error 0.5, t = (0.5 - 0.1) / 0.5 with 1 freedom."""
    found = drop_test([1, 1, 0.5, 0.5], [0, 0, 0.5, 0.5], ["a", "a", "b", "b"], margin=0.1)
    p = 0.5 - math.atan(0.8) / math.pi  # Student's t with 1 degree of freedom is Cauchy's
    assert found.p_beyond == pytest.approx(p)
    assert found.method == "clustered t"


def test_no_flip_in_clusters_is_not_certainty():
    before, now = arrays(0, 0, 100)
    found = drop_test(before, now, numpy.arange(100) // 5, margin=0.05)
    z2 = 1.644854**2
    assert found.high == pytest.approx(z2 / (20 + z2), abs=1e-4)


def test_one_cluster_tells_nothing():
    found = drop_test(*arrays(10, 0, 10), ["same"] * 10, margin=0.01)
    assert (found.p_beyond, found.p_within, found.low, found.high) == (1.0, 1.0, None, None)


def test_shares_without_any_change_have_a_bound_and_nats_have_none_to_give():
    """A score of 0.3 that stays for 20 items is as little proof as a right answer that stays."""
    same = numpy.full(20, 0.3)
    assert drop_test(same, same, margin=0.05).high > 0.1
    assert drop_test(same, same, margin=0.05, shares=False).high == 0.0


def test_mean_against_a_limit():
    from scipy.stats import ttest_1samp

    values = numpy.random.default_rng(SEED).random(25)
    found = mean_test(values, 0.4)
    assert found.p_beyond == pytest.approx(ttest_1samp(values, 0.4, alternative="greater").pvalue)
    assert found.drop == pytest.approx(values.mean())


# --- averages ----------------------------------------------------------------------------


def test_average_of_equal_tests_by_hand():
    """Two tasks with the same drop: the distances shrink by the square root of 2."""
    one = drop_test(*arrays(20, 5, 300), margin=0.02)
    both = combine([one, one], 0.02, 0.95)
    assert both.drop == pytest.approx(one.drop)
    assert both.drop - both.low == pytest.approx((one.drop - one.low) / math.sqrt(2))
    assert both.high - both.drop == pytest.approx((one.high - one.drop) / math.sqrt(2))


def test_average_crosses_its_level_at_its_bounds():
    parts = [(*arrays(20, 5, 300), None), (*arrays(3, 6, 200), None)]
    found = mean_drop_test(parts)
    assert mean_drop_test(parts, margin=found.high).p_within == pytest.approx(0.05, abs=1e-6)
    assert mean_drop_test(parts, margin=max(found.low, 0)).p_beyond == pytest.approx(0.05, abs=0.02)


def test_an_unchanged_task_adds_no_doubt():
    one = drop_test(*arrays(20, 5, 300), margin=0.02)
    both = combine([one, unchanged_test(100)], 0.02, 0.95)
    assert both.drop == pytest.approx(one.drop / 2)
    assert both.high - both.drop == pytest.approx((one.high - one.drop) / 2)


# --- what could be seen ------------------------------------------------------------------


def test_detectable_drop_is_connors_with_the_discordance_seen():
    assert detectable_drop(*arrays(5, 5, 100)) == pytest.approx(minimum_detectable_drop(100, 0.1))
    twins = numpy.arange(100) // 2
    assert detectable_drop(*arrays(10, 10, 100), twins) > detectable_drop(*arrays(10, 10, 100))


def test_detectable_drop_without_a_flip():
    """The smallest share p of 100 items, all lost, with 10 p = 1.96 sqrt(p) + 0.84 sqrt(p - p^2)."""
    p = detectable_drop(*arrays(0, 0, 100))
    assert 10 * p == pytest.approx(1.959964 * math.sqrt(p) + 0.841621 * math.sqrt(p - p * p), abs=1e-4)
    assert p == pytest.approx(0.0767, abs=1e-4)
    assert detectable_drop([1, 1, 1], [1, 1, 1]) is None


def test_detectable_drop_of_other_values():
    one, two = numpy.random.default_rng(SEED).random((2, 30))
    error = (one - two).std(ddof=1) / math.sqrt(30)
    assert detectable_drop(one, two) == pytest.approx((1.959964 + 0.841621) * error, rel=1e-5)
    assert detectable_drop([0.5, 0.7], [0.5, 0.7]) is None


# --- bad input ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: drop_test([], []), "at least one item"),
        (lambda: drop_test([1.0], [1.0, 0.0]), "cannot pair 1 items"),
        (lambda: drop_test([1.0, 0.0], [1.0, float("nan")]), "finite"),
        (lambda: drop_test([1, 0], [1, 0], margin=-0.1), "give a margin of 0 or more"),
        (lambda: drop_test([1, 0], [1, 0], confidence=5), "between 0.5 and 1"),
        (lambda: drop_test([1, 0], [1, 0], ["a"]), "one per item"),
        (lambda: mean_drop_test([]), "at least one task"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(KvaccError, match=message):
        call()
