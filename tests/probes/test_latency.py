"""Times: what is timed, in which order, and the intervals made of it."""

import gc
import itertools

import numpy
import pytest
import torch

from kvacc.engine.plan import make_plan
from kvacc.errors import KvaccError
from kvacc.probes import latency
from kvacc.probes.intervals import distribution, paired_ratio
from kvacc.probes.latency import TimedCase, Timings, order_of_repeat, time_in_turns, time_request
from kvacc.strategy import make_strategy

PREFILL, STEP = 100.0, 3.0


class FakeClock:
    """A clock that moves only when a fake decoder works."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class FakeDecoder:
    """Takes a known time; always finds the token after the one it is given most likely."""

    def __init__(self, clock, name="fake", log=None, fails_at=None):
        self.clock, self.name, self.log, self.fails_at = clock, name, log, fails_at
        self.read, self.collected = [], []

    def prefill(self, tokens, chunk=None):
        if self.log is not None:
            self.log.append(self.name)
        if self.fails_at is not None and len(self.log) >= self.fails_at:
            raise torch.OutOfMemoryError("no room")
        self.clock.now += PREFILL
        return self._next(tokens[:, -1])

    def step(self, tokens):
        self.clock.now += STEP + len(self.read)  # each token takes a second longer
        self.collected.append(gc.isenabled())
        self.read.append(tokens.tolist())
        return self._next(tokens)

    def _next(self, tokens):
        return torch.nn.functional.one_hot(tokens + 1, 50).float()


@pytest.fixture
def clock(monkeypatch):
    fake = FakeClock()
    monkeypatch.setattr(latency, "time", fake)
    return fake


PROMPTS = torch.tensor([[5, 6, 7], [1, 2, 3]])


def test_each_token_is_timed_and_fed_back(clock):
    decoder = FakeDecoder(clock)
    first, later = time_request(TimedCase(lambda: decoder, PROMPTS, 4))
    assert (first, later) == (PREFILL, [STEP, STEP + 1, STEP + 2])
    assert decoder.read == [[8, 4], [9, 5], [10, 6]]  # one token fewer than were made
    assert decoder.collected == [False] * 3 and gc.isenabled()


def test_one_token_has_no_time_between_tokens(clock):
    timings = time_in_turns([TimedCase(lambda: FakeDecoder(clock), PROMPTS, 1)], 2, 0, 0, lambda *_: None)[0]
    record = timings.record(batch=2, warmup=0, clock="fake", seed=0)
    assert record.time_per_output_token is None
    assert record.tokens_per_second.values == [2 / PREFILL] * 2


def test_cases_take_turns_and_warm_up_does_not_count(clock):
    log = []
    cases = [
        TimedCase(lambda name=name: FakeDecoder(clock, name, log), PROMPTS, 2) for name in ("a", "b", "c")
    ]
    found = time_in_turns(cases, repeats=4, warmup=2, seed=7, failed=lambda *_: None)
    rounds = [log[start : start + 3] for start in range(0, len(log), 3)]
    assert len(log) == 3 * 6 and all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1
    assert [len(timings.first) for timings in found] == [4, 4, 4]
    again = [order_of_repeat(3, repeat, 7) for repeat in range(4)]
    assert again == [order_of_repeat(3, repeat, 7) for repeat in range(4)]


def test_a_case_that_fails_is_left_out_and_the_others_go_on(clock):
    log, said = [], {}
    cases = [
        TimedCase(lambda: FakeDecoder(clock, "good", []), PROMPTS, 2),
        TimedCase(lambda: FakeDecoder(clock, "bad", log, fails_at=2), PROMPTS, 2),
    ]
    found = time_in_turns(cases, 3, 1, 0, lambda place, error: said.update({place: str(error)}))
    assert found[1] is None and said == {1: "no room"}
    assert len(log) == 2  # it is not tried again
    assert found[0].first == [PREFILL] * 3


def test_times_never_come_from_the_parallel_path(tiny_model):
    from kvacc.engine.plan import Request, build_rows
    from kvacc.engine.wrapped import WrappedModel

    wrapped, full = WrappedModel(tiny_model), make_strategy("full")
    plan = make_plan(build_rows([(0, Request((3, 4, 5), (5,), dense=0, compressed=2))]), full)

    class Cheat:
        def prefill(self, tokens, chunk=None):
            return wrapped.parallel(plan, full)[0]

    with pytest.raises(KvaccError, match="parallel path"):
        time_request(TimedCase(Cheat, PROMPTS, 2))
    wrapped.parallel(plan, full)  # and is free again afterwards


def test_record_of_known_times():
    timings = Timings(first=[1.0, 3.0, 2.0], later=[[0.1, 0.3], [0.2, 0.4], [0.5, 0.6]])
    record = timings.record(batch=4, warmup=1, clock="fake", seed=0)
    assert record.time_to_first_token.median == 2.0
    assert record.time_per_output_token.median == pytest.approx(0.35)
    assert record.time_per_output_token.count == 6
    assert record.time_per_output_token.values == [0.1, 0.3, 0.2, 0.4, 0.5, 0.6]
    assert record.time_per_output_token.p95 == pytest.approx(0.575)  # by hand: 0.5 + 0.75 * 0.1
    assert record.tokens_per_second.values == pytest.approx([12 / 1.4, 12 / 3.6, 12 / 3.1])


def exact_interval(runs):
    """By going through all ways of drawing as many runs as there are."""
    medians = sorted(
        float(numpy.median([value for run in drawn for value in run]))
        for drawn in itertools.product(runs, repeat=len(runs))
    )
    last = len(medians) - 1
    return medians[int(0.025 * last)], medians[-(int(0.025 * last)) - 1]


@pytest.mark.parametrize(
    "runs",
    [
        [[1.0], [2.0], [4.0]],
        [[1.0, 1.1, 5.0], [2.0, 2.1, 0.5], [4.0, 4.5, 1.5]],
        [[3.0, 1.0], [2.0, 8.0], [4.0, 4.0], [0.5, 6.0]],
    ],
)
def test_interval_against_going_through_all_draws(runs):
    found = distribution(runs, seed=3)
    assert (found.low, found.high) == pytest.approx(exact_interval(runs))


def test_interval_of_many_runs_against_scipy():
    from scipy.stats import bootstrap

    values = numpy.random.default_rng(5).gamma(4, size=40)
    found = distribution([[value] for value in values], seed=1)
    other = bootstrap((values,), numpy.median, method="percentile", n_resamples=20000, rng=2)
    assert found.low == pytest.approx(other.confidence_interval.low, abs=0.1)
    assert found.high == pytest.approx(other.confidence_interval.high, abs=0.1)
    assert found.low < found.median < found.high


def test_tokens_of_a_run_are_not_taken_for_independent():
    runs = [[1.0] * 50, [2.0] * 50, [3.0] * 50, [4.0] * 50, [9.0] * 50]
    found, single = distribution(runs), distribution([[run[0]] for run in runs])
    assert (found.low, found.median, found.high) == (single.low, single.median, single.high) == (1, 3, 9)


def test_ratio_is_paired_by_run():
    # The machine slows down tenfold; the strategy takes 1.5 times as long all the while.
    full = [[scale * value for value in (1.0, 1.2, 1.1)] for scale in (1, 2, 4, 7, 10)]
    found = paired_ratio([[1.5 * value for value in run] for run in full], full)
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))
    assert not found.spans_one
    assert paired_ratio(full[:3], full) is None


@pytest.mark.gpu
def test_cuda_clock_waits_for_the_device():
    device = torch.device("cuda")
    clock = latency.clock_for(device)
    big = torch.ones(4000, 4000, device=device)
    clock.mark()
    for _ in range(20):
        big = big @ big * 1e-4
    clock.mark()
    clock.mark()
    busy, idle = clock.between()
    assert busy > 10 * idle
