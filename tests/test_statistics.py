"""Statistics against scipy and statsmodels, published values, brute force and simulated coverage."""

from __future__ import annotations

import math

import numpy
import pytest

from kvacc.errors import KvaccError
from kvacc.statistics import (
    Flips,
    clustered_stderr,
    design_effect,
    flips,
    holm,
    holm_of_discrete,
    is_at_chance,
    items_needed,
    items_stderr,
    mcnemar_exact,
    mcnemar_mid_p,
    mean_stderr,
    minimum_detectable_drop,
    paired_difference,
    proportion_stderr,
    tango_interval,
    tango_statistic,
)

RANDOM_SEED = 7
SIMULATIONS = 300


def binary_arrays(lost, gained, items):
    """Items of which ``lost`` are right under full only, ``gained`` under the strategy only."""
    full = [1] * lost + [0] * gained + [1] * (items - lost - gained)
    strategy = [0] * lost + [1] * gained + [1] * (items - lost - gained)
    return full, strategy


# --- standard errors ---------------------------------------------------------------------


def test_mean_stderr_equals_scipy():
    from scipy.stats import sem

    values = numpy.random.default_rng(RANDOM_SEED).normal(size=37)
    assert mean_stderr(values) == pytest.approx(sem(values), rel=1e-12)


def test_stderr_by_hand():
    """1, 2, 3, 4: sample variance 5/3, so sqrt(5/3/4)."""
    assert mean_stderr([1, 2, 3, 4]) == pytest.approx(math.sqrt(5 / 12))


@pytest.mark.parametrize("successes", [0, 1, 43, 99, 100])
def test_proportion_is_the_mean_of_zeros_and_ones(successes):
    values = [1] * successes + [0] * (100 - successes)
    assert proportion_stderr(successes, 100) == pytest.approx(mean_stderr(values), abs=1e-15)


def test_copa_sized_stderr():
    """85 of 100: the 3.6 points that TRAPS T18 names."""
    assert proportion_stderr(85, 100) == pytest.approx(0.0359, abs=5e-5)


def test_stderr_is_zero_only_when_all_values_are_equal():
    """REPORTS 55."""
    assert mean_stderr([0.1] * 9) == 0.0
    assert mean_stderr([1] * 999 + [0]) > 0
    assert clustered_stderr([0.1] * 9, list("aaabbbccc")) == 0.0


@pytest.mark.parametrize("values", [[], [1.0]])
def test_too_few_values_have_no_stderr(values):
    assert mean_stderr(values) is None
    assert clustered_stderr(values, list("a" * len(values))) is None
    assert proportion_stderr(len(values), len(values)) is None


def test_one_cluster_has_no_stderr():
    assert clustered_stderr([0, 1, 0, 1], ["a"] * 4) is None


def test_clustered_stderr_by_hand():
    """Clusters (1, 1) and (0, 0): sums of deviations +1 and -1; sqrt(2/1 * 2) / 4 = 0.5."""
    assert clustered_stderr([1, 1, 0, 0], ["a", "a", "b", "b"]) == pytest.approx(0.5)


def test_clustered_stderr_equals_statsmodels():
    import statsmodels.api

    random = numpy.random.default_rng(RANDOM_SEED)
    clusters = random.integers(0, 12, size=80)
    values = random.normal(size=80) + clusters
    fit = statsmodels.api.OLS(values, numpy.ones(80)).fit(
        cov_type="cluster", cov_kwds={"groups": clusters, "use_correction": False}
    )
    number = len(set(clusters))
    expected = float(fit.bse[0]) * math.sqrt(number / (number - 1))
    assert clustered_stderr(values, clusters) == pytest.approx(expected, rel=1e-10)


def test_clusters_of_one_change_nothing():
    values = numpy.random.default_rng(RANDOM_SEED).normal(size=20)
    assert clustered_stderr(values, range(20)) == pytest.approx(mean_stderr(values), rel=1e-12)


def test_design_effect_of_copies_is_about_the_cluster_size():
    values = numpy.repeat([0, 1] * 50, 5)
    assert design_effect(values, numpy.repeat(numpy.arange(100), 5)) == pytest.approx(5, rel=0.02)


# --- Tango's interval --------------------------------------------------------------------


def test_tango_equals_a_published_value():
    """Complete response before and after consolidation therapy (16 and 6 discordant of
    161): -0.1240 to -0.0054, as printed by the R package contingencytables for chapter 8
    of Fagerland, Lydersen and Laake, Statistical Analysis of Contingency Tables (2017)."""
    assert tango_interval(16, 6, 161) == pytest.approx((-0.1240, -0.0054), abs=5e-5)


def test_tango_closed_forms():
    """No flips: +-z^2 / (n + z^2). All gained: from (n - z^2) / (n + z^2) to 1."""
    z2 = 1.959964**2
    assert tango_interval(0, 0, 20) == pytest.approx((-z2 / (20 + z2), z2 / (20 + z2)), abs=1e-6)
    assert tango_interval(0, 10, 10) == pytest.approx(((10 - z2) / (10 + z2), 1.0), abs=1e-6)


@pytest.mark.parametrize(
    ("lost", "gained", "items"), [(3, 1, 10), (7, 1, 21), (0, 4, 30), (12, 9, 100), (1, 0, 2), (5, 0, 5)]
)
def test_tango_inverts_the_score_test(lost, gained, items):
    """The interval is the set of differences that a score test with a brute-force
    constrained likelihood does not reject."""
    accepted = []
    for difference in numpy.linspace(-0.999, 0.999, 1999):
        # Share of lost items given the difference, by grid search over the likelihood.
        low, high = max(0.0, -difference), (1 - difference) / 2
        share = numpy.linspace(low, high, 40_001)[1:-1]
        loglikelihood = (
            lost * numpy.log(share)
            + gained * numpy.log(share + difference)
            + (items - lost - gained) * numpy.log(numpy.maximum(1 - 2 * share - difference, 1e-300))
        )
        best = share[loglikelihood.argmax()]
        variance = items * (2 * best + difference - difference**2)
        statistic = (gained - lost - items * difference) / math.sqrt(variance)
        if abs(statistic) <= 1.959964:
            accepted.append(difference)
    assert tango_interval(lost, gained, items) == pytest.approx((accepted[0], accepted[-1]), abs=2.5e-3)


def test_tango_ends_reach_the_critical_value():
    low, high = tango_interval(78, 50, 1000)
    assert tango_statistic(78, 50, 1000, low) == pytest.approx(1.959964, abs=1e-5)
    assert tango_statistic(78, 50, 1000, high) == pytest.approx(-1.959964, abs=1e-5)
    assert (100 * low, 100 * high) == (pytest.approx(-5.1, abs=0.05), pytest.approx(-0.6, abs=0.05))


def test_tango_at_zero_is_mcnemars_statistic():
    assert tango_statistic(12, 5, 60, 0.0) == pytest.approx((5 - 12) / math.sqrt(17))


def test_tango_mirrors():
    low, high = tango_interval(9, 3, 50)
    assert tango_interval(3, 9, 50) == pytest.approx((-high, -low))


@pytest.mark.parametrize(("lost", "gained", "items"), [(-1, 0, 5), (3, 3, 5), (0, 0, 0)])
def test_impossible_flips_are_refused(lost, gained, items):
    with pytest.raises(KvaccError, match="impossible"):
        tango_interval(lost, gained, items)


# --- McNemar and flips -------------------------------------------------------------------


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (5, 5), (12, 3), (78, 50)])
def test_mcnemar_equals_statsmodels(lost, gained):
    from statsmodels.stats.contingency_tables import mcnemar

    expected = mcnemar([[10, lost], [gained, 10]], exact=True).pvalue if lost + gained else 1.0
    assert mcnemar_exact(lost, gained) == pytest.approx(expected, rel=1e-9)


def test_mcnemar_by_hand():
    """Five lost, none gained: 2 / 2^5."""
    assert mcnemar_exact(5, 0) == pytest.approx(0.0625)


def test_flips_have_a_direction():
    assert flips([1, 1, 1, 0, 0], [0, 0, 1, 1, 0]) == Flips(lost=2, gained=1)


def test_flips_of_other_values_are_refused():
    with pytest.raises(KvaccError, match="0 or 1"):
        flips([0.5, 1], [1, 1])


# --- paired difference -------------------------------------------------------------------


def test_binary_items_get_tango():
    result = paired_difference(*binary_arrays(78, 50, 1000))
    assert result.value == pytest.approx(-0.028)
    assert (result.low, result.high) == tango_interval(78, 50, 1000)
    assert result.method == "tango" and not result.spans_zero


def test_continuous_items_get_scipys_paired_t():
    from scipy.stats import ttest_rel

    random = numpy.random.default_rng(RANDOM_SEED)
    full, strategy = random.normal(size=25), random.normal(size=25)
    expected = ttest_rel(strategy, full).confidence_interval(0.95)
    result = paired_difference(full, strategy)
    assert (result.low, result.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert result.method == "paired t"


def test_clustered_interval_by_hand():
    """Differences -1, -1, 0, 0 in two clusters: mean -0.5, stderr 0.5, t(1) = 12.706."""
    result = paired_difference([2.5, 2.5, 1, 1], [1.5, 1.5, 1, 1], clusters=["a", "a", "b", "b"])
    assert result.value == pytest.approx(-0.5)
    assert result.high == pytest.approx(-0.5 + 12.7062 * 0.5, abs=1e-3)
    assert result.method == "clustered t"


def test_no_flips_in_clusters_is_not_certainty():
    """Twenty clusters without a flip: Tango's interval of twenty items, not width 0."""
    ones = [1] * 100
    result = paired_difference(ones, ones, clusters=[i // 5 for i in range(100)])
    assert (result.low, result.high) == pytest.approx(tango_interval(0, 0, 20))


def test_too_few_items():
    assert paired_difference([], []) is None
    assert paired_difference([0.5], [0.7]) is None
    assert paired_difference([1, 0], [0, 0], clusters=["a", "a"]) is None
    one = paired_difference([1], [0])
    assert one.low == -1.0 and one.high > 0


def test_unpaired_arrays_are_refused():
    with pytest.raises(KvaccError, match="cannot pair 2 items of full with 3"):
        paired_difference([1, 0], [1, 0, 1])
    with pytest.raises(KvaccError, match="finite"):
        paired_difference([1, float("nan")], [1, 0])
    with pytest.raises(KvaccError, match="one per item"):
        paired_difference([1, 0], [1, 0], clusters=["a"])


def test_coverage_of_tango():
    """100 items, 8 % lost and 4 % gained: the interval holds -0.04 in about 95 % of runs."""
    random = numpy.random.default_rng(RANDOM_SEED)
    counts = random.multinomial(100, [0.08, 0.04, 0.88], size=SIMULATIONS)
    covered = [
        low <= -0.04 <= high for low, high in (tango_interval(b, c, 100) for b, c, _ in counts.tolist())
    ]
    assert 0.91 <= numpy.mean(covered) <= 0.985


def test_coverage_with_shared_contexts():
    """60 haystacks with 5 questions that flip together: the clustered interval keeps its
    level where the unclustered one does not (TRAPS T26)."""
    random = numpy.random.default_rng(RANDOM_SEED)
    clusters = numpy.repeat(numpy.arange(60), 5)
    clustered, plain = [], []
    for _ in range(SIMULATIONS):
        draw = random.random(60)
        change = numpy.repeat(numpy.where(draw < 0.15, -1, numpy.where(draw < 0.30, 1, 0)), 5)
        full = numpy.where(change == 0, 1, change < 0).astype(float)
        strategy = full + change
        inside = paired_difference(full, strategy, clusters)
        clustered.append(inside.low <= 0 <= inside.high)
        outside = paired_difference(full, strategy)
        plain.append(outside.low <= 0 <= outside.high)
    assert 0.91 <= numpy.mean(clustered) <= 0.985
    assert numpy.mean(plain) < 0.75


# --- power and chance --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "discordance", "points"),
    [
        (100, 0.1, 8.8),
        (100, 0.2, 12.4),
        (200, 0.05, 4.4),
        (500, 0.1, 4.0),
        (1000, 0.05, 2.0),
        (5000, 0.2, 1.8),
    ],
)
def test_minimum_detectable_drop(items, discordance, points):
    assert 100 * minimum_detectable_drop(items, discordance) == pytest.approx(points, abs=0.06)


def test_too_few_discordant_items_detect_nothing():
    assert minimum_detectable_drop(100, 0.05) is None


def test_detectable_drop_is_detected_at_the_stated_power():
    """At the drop that 500 items with 10 % discordance should show, McNemar's score test does in 80 %."""
    drop = minimum_detectable_drop(500, 0.1)
    random = numpy.random.default_rng(RANDOM_SEED)
    lost, gained, _ = random.multinomial(500, [(0.1 + drop) / 2, (0.1 - drop) / 2, 0.9], size=4000).T
    power = numpy.mean(numpy.abs(gained - lost) / numpy.sqrt(lost + gained) > 1.959964)
    assert power == pytest.approx(0.8, abs=0.025)


def test_clusters_cost_power():
    assert minimum_detectable_drop(1000, 0.1, design_effect=2) == pytest.approx(
        minimum_detectable_drop(500, 0.1)
    )


@pytest.mark.parametrize(
    ("margin", "discordance", "expected"),
    [(0.01, 0.05, 3092), (0.01, 0.1, 6183), (0.01, 0.2, 12366), (0.02, 0.1, 1546), (0.05, 0.2, 495)],
)
def test_items_needed_to_show_non_inferiority(margin, discordance, expected):
    """Connor's formula, one-sided 5 %, power 80 %."""
    assert items_needed(margin, discordance) == pytest.approx(expected, abs=1)


def test_items_needed_show_it_at_the_stated_power():
    number = items_needed(0.02, 0.06)
    random = numpy.random.default_rng(RANDOM_SEED)
    lost, gained, _ = random.multinomial(number, [0.03, 0.03, 0.94], size=SIMULATIONS).T
    shown = [tango_interval(b, c, number, 0.9)[0] > -0.02 for b, c in zip(lost, gained, strict=True)]
    assert numpy.mean(shown) == pytest.approx(0.8, abs=0.05)


def test_items_needed_without_any_flip():
    """z^2 / (n + z^2) < 0.01 from 268 items on."""
    assert items_needed(0.01, 0.0) == 268
    assert tango_interval(0, 0, 268, 0.9)[1] < 0.01 < tango_interval(0, 0, 267, 0.9)[1]


def test_items_needed_grow_with_clusters_and_with_the_drop():
    assert items_needed(0.02, 0.1, design_effect=3) == pytest.approx(3 * items_needed(0.02, 0.1), abs=3)
    assert items_needed(0.02, 0.1, drop=0.01) > 3 * items_needed(0.02, 0.1)
    assert items_needed(0.02, 0.1, drop=0.02) is None


def test_mid_p_by_hand():
    """Five lost, none gained: exact 2 / 32, of which half is the outcome itself."""
    assert mcnemar_mid_p(5, 0) == pytest.approx(1 / 32)
    assert mcnemar_mid_p(0, 0) == 1.0
    assert mcnemar_mid_p(78, 50) == pytest.approx(0.0134, abs=5e-5)  # measured with another program


@pytest.mark.parametrize("p_values", [[0.01, 0.04, 0.03, 0.5], [0.2], [], [1, 1, 0], [0.02, 0.02, 0.02]])
def test_holm_equals_statsmodels(p_values):
    from statsmodels.stats.multitest import multipletests

    expected = multipletests(p_values, method="holm")[1].tolist() if p_values else []
    assert holm(p_values) == pytest.approx(expected)


def test_holm_of_discrete_counts_only_what_could_reject():
    """Smallest 1/16 and 1: neither can be at most 0.05, so the other two are all there are."""
    adjusted = holm_of_discrete([0.02, 0.0625, 1.0, 0.01], [0.01, 0.0625, 1.0, 0.0])
    assert adjusted == pytest.approx([0.02, 1.0, 1.0, 0.02])
    assert holm_of_discrete([0.02, 0.3], [0, 0]) == holm([0.02, 0.3])
    with pytest.raises(KvaccError, match="give one for each"):
        holm_of_discrete([0.1], [])


def test_holm_refuses_what_is_no_p_value():
    with pytest.raises(KvaccError, match="between 0 and 1"):
        holm([0.5, 1.2])


@pytest.mark.parametrize(
    ("score", "stderr", "chance", "expected"),
    [
        (0.26, 0.02, 0.25, True),
        (0.2901, 0.02, 0.25, False),
        (0.20, 0.01, 0.25, True),
        (0.26, None, 0.25, False),
        (0.25, None, 0.25, True),
        (0.01, 0.01, None, False),
    ],
)
def test_is_at_chance(score, stderr, chance, expected):
    assert is_at_chance(score, stderr, chance) is expected


def test_flips_that_cancel_within_every_cluster_still_have_an_interval():
    """Twins of which one was lost and one gained: no variance between clusters, yet flips."""
    full = [1, 0, 1, 0, 1, 0]
    strategy = [0, 1, 0, 1, 0, 1]
    found = paired_difference(full, strategy, clusters=["a", "a", "b", "b", "c", "c"])
    low, high = tango_interval(3, 3, 6)
    assert found.value == 0
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.low < 0 < found.high


def test_a_standard_error_is_zero_only_when_all_values_are_equal():
    """Twins of which exactly one is right: no spread between clusters, yet half are wrong."""
    values, twins = [1, 0, 0, 1, 1, 0], ["a", "a", "b", "b", "c", "c"]
    assert items_stderr(values, twins) == pytest.approx(mean_stderr(values))
    assert items_stderr(values, ["one"] * 6) == pytest.approx(mean_stderr(values))
    assert items_stderr([1] * 6, twins) == 0
    uneven = [1, 1, 0, 0, 1, 0]
    assert items_stderr(uneven, twins) == pytest.approx(clustered_stderr(uneven, twins))


# --- on the leaderboard ------------------------------------------------------------------


def test_rows_say_what_their_items_can_show_and_correct_for_their_number():
    from gate.cells import make_cell

    from kvacc.leaderboard import build, to_markdown

    right = [1] * 40
    cells = [
        make_cell(right, strategy="full"),
        make_cell([0] * 9 + [1] * 31, shift=-0.5),
        make_cell([0] * 7 + [1] * 33, budget="0.5", shift=-0.5),
    ]
    rows = {row.budget: row for row in build(cells)}
    assert rows["0.2"].p_value == pytest.approx(mcnemar_exact(9, 0), abs=1e-6)
    assert rows["0.2"].p_holm == pytest.approx(2 * mcnemar_exact(9, 0), abs=1e-6)
    assert rows["0.5"].p_holm == pytest.approx(mcnemar_exact(7, 0), abs=1e-6)
    assert rows["0.2"].p_method == "exact McNemar"
    assert rows["0.2"].detectable_drop == pytest.approx(100 * minimum_detectable_drop(40, 9 / 40), abs=1e-4)
    assert rows[None].p_value is rows[None].p_holm is rows[None].detectable_drop is None
    assert "| can show | p (Holm) |" in to_markdown(list(rows.values()))
