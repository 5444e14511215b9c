"""The pool's victims: by hand under each policy, and never the same one twice."""

from __future__ import annotations

import pytest
import torch

from kvacc.errors import KvaccError
from kvacc.pool import POLICIES, Pool


def pool_of(capacity: int | list[int], policy: str, heads: int = 1, **options) -> Pool:
    capacity = [capacity] if isinstance(capacity, int) else capacity
    return Pool(torch.tensor(capacity), policy, heads, **options)


def real(rows: int = 1) -> torch.Tensor:
    return torch.ones(rows, dtype=torch.bool)


def columns(mask: torch.Tensor) -> list[int]:
    """Columns that are set in row 0, head 0."""
    return mask[0, 0].nonzero().flatten().tolist()


def read(pool: Pool, *chosen: int) -> None:
    selected = torch.zeros_like(pool.held)
    selected[..., list(chosen)] = True
    pool.used(selected)


# By hand: three entries fit, six tokens arrive.


def run(
    policy: str, reads: list[tuple[int, ...]], capacity: int = 3, **options
) -> tuple[list[list[int]], Pool]:
    """The victims of each step; token i arrives, then its query fetches ``reads[i]``."""
    pool = pool_of(capacity, policy, **options)
    victims = []
    for chosen in reads:
        victims.append(columns(pool.store(real())))
        read(pool, *chosen)
    return victims, pool


READS = [(0,), (0, 1), (0, 2), (0, 3), (0, 3), (0,)]


def test_fifo_forgets_the_oldest_arrival_however_often_it_is_used():
    victims, pool = run("fifo", READS)
    assert victims == [[], [], [], [0], [1], [2]]
    assert columns(pool.held) == [3, 4, 5]
    assert pool.evictions.tolist() == [[3]]


def test_lru_forgets_what_was_not_used_for_longest():
    # Last use before token 3: 0 at 2, 1 at 1, 2 at 2. Before token 4: 0 at 3, 2 at 2, 3 at 3.
    # Before token 5: 0 and 3 at 4, after 4 arrived, which was never used.
    victims, pool = run("lru", READS)
    assert victims == [[], [], [], [1], [2], [4]]
    assert columns(pool.held) == [0, 3, 5]


def test_lru_counts_an_entry_never_used_by_its_arrival():
    # Nothing is used before token 3: it overwrites 0. Token 4 overwrites 2, since 1 was used;
    # that was after 3 arrived, so 3 is next.
    victims, _ = run("lru", [(), (), (), (1,), (), ()], capacity=3)
    assert victims == [[], [], [], [0], [2], [3]]
    # 0 was fetched after 2 arrived and before 3 did.
    victims, _ = run("lru", [(), (), (0,), (), (), ()], capacity=3)
    assert victims == [[], [], [], [1], [2], [0]]


def test_counter_forgets_what_was_used_least():
    # Uses before token 3: 0 three times, 1 once, 2 once. Before token 4: 2 and 3 once each.
    # Before token 5: 0 five times, 3 twice, 4 never.
    victims, pool = run("counter", READS)
    assert victims == [[], [], [], [1], [2], [4]]
    assert columns(pool.held) == [0, 3, 5]


@pytest.mark.parametrize(
    "limit, counts, later, victim",
    [(255, [4, 3, 1, 0, 0], [4, 3, 2, 2, 2], 2), (4, [2, 1, 0, 0, 0], [2, 1, 1, 2, 2], 1)],
)
def test_counters_are_halved_when_one_saturates(limit, counts, later, victim):
    """The fourth use of 0 halves every count, rounded down, so that 1 falls behind 3 and 4."""
    _, pool = run("counter", [(0,), (0, 1), (0, 1), (1, 2), (0,)], capacity=5, counter_limit=limit)
    assert pool._worth[0, 0].tolist() == counts
    read(pool, 3, 4)
    read(pool, 2, 3, 4)
    assert pool._worth[0, 0].tolist() == later
    assert columns(pool.store(real())) == [victim]


def test_a_counter_holds_one_byte_by_default():
    pool = pool_of(2, "counter", heads=2)
    pool.store(real())
    pool.store(real())
    selected = torch.tensor([[[True, False], [False, False]]])
    for _ in range(254):
        pool.used(selected)
    assert pool._worth.tolist() == [[[254, 0], [0, 0]]]
    pool.used(torch.ones_like(selected))
    # Head 0 saturated, head 1 did not.
    assert pool._worth.tolist() == [[[127, 0], [1, 1]]]


def test_halving_lets_old_fame_fade():
    """An entry of 254 uses is overtaken after one halving by entries used a little more."""

    def victim(limit: int) -> list[int]:
        pool = pool_of(2, "counter", counter_limit=limit)
        pool.store(real())
        for _ in range(6):
            read(pool, 0)
        pool.store(real())
        for _ in range(4):
            read(pool, 1)
        return columns(pool.store(real()))

    assert victim(255) == [1]
    assert victim(6) == [0]  # its 6 became 3


# Properties


def random_run(
    policy: str, length: int = 256, share: float = 0.8, heads: int = 3, seed: int = 0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    capacity = torch.tensor([int(share * length), 40])
    pool = Pool(capacity, policy, heads, counter_limit=20)
    evicted = torch.zeros(2, heads, length, dtype=torch.long)
    for step in range(length):
        victims = pool.store(real(2))
        assert not victims[..., -1].any(), "the arriving entry was the victim"
        assert pool.held[..., -1].all()
        assert pool.held.shape == victims.shape == (2, heads, step + 1)
        evicted[..., : step + 1] += victims
        assert (pool.held.sum(-1) == torch.tensor([[min(step + 1, int(c))] for c in capacity])).all()
        chosen = torch.rand(2, heads, step + 1, generator=generator) < 0.2
        pool.used(chosen)
    return [evicted, pool.held, pool.evictions, capacity]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_as_many_distinct_victims_as_evictions(policy, seed):
    evicted, held, evictions, capacity = random_run(policy, seed=seed)
    assert evictions.tolist() == [[256 - int(c)] * 3 for c in capacity] and int(capacity[0]) == 204
    assert (evicted <= 1).all(), "a victim that was already gone"
    assert (evicted.sum(-1) == evictions).all()
    assert torch.equal(held, evicted == 0)


def test_policies_differ_and_repeat_themselves():
    held = {policy: random_run(policy)[1] for policy in POLICIES}
    assert not torch.equal(held["fifo"], held["lru"])
    assert not torch.equal(held["counter"], held["lru"])
    assert torch.equal(random_run("counter")[1], held["counter"])


@pytest.mark.parametrize("policy", POLICIES)
def test_against_the_definition(policy):
    """Plain Python: one row, one head, lists instead of tensors."""
    generator = torch.Generator().manual_seed(3)
    pool = pool_of(7, policy, counter_limit=5)
    held, last, count = [], {}, {}
    for step in range(60):
        gone = []
        if len(held) == 7:
            worth = {"fifo": lambda e: 0, "lru": last.get, "counter": count.get}[policy]
            gone = [min(held, key=lambda e: (worth(e), e))]
            held.remove(gone[0])
        held.append(step)
        last[step], count[step] = step, 0
        assert columns(pool.store(real())) == gone
        assert columns(pool.held) == held
        chosen = (torch.rand(1, 1, step + 1, generator=generator) < 0.3) & pool.held
        pool.used(chosen)
        for entry in columns(chosen):
            # Used after its step's arrival, before the next.
            last[entry], count[entry] = step + 0.5, count[entry] + 1
        if any(count[entry] >= 5 for entry in held):
            count = {entry: value // 2 for entry, value in count.items()}


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_and_heads_are_independent(policy):
    generator = torch.Generator().manual_seed(5)
    capacities = [4, 9, 6]
    together = pool_of(capacities, policy, heads=2, counter_limit=6)
    alone = [[pool_of(c, policy, counter_limit=6) for _ in range(2)] for c in capacities]
    for step in range(40):
        arrives = torch.rand(3, generator=generator) < 0.7
        victims = together.store(arrives)
        chosen = torch.rand(3, 2, step + 1, generator=generator) < 0.3
        together.used(chosen)
        for row in range(3):
            for head in range(2):
                one = alone[row][head]
                assert torch.equal(one.store(arrives[row : row + 1])[0, 0], victims[row, head])
                one.used(chosen[row, head][None, None])
                assert torch.equal(one.held[0, 0], together.held[row, head])
                assert one.evictions[0, 0] == together.evictions[row, head]


@pytest.mark.parametrize("policy", POLICIES)
def test_padding_is_never_held_and_evicts_nothing(policy):
    pool = pool_of([2, 2], policy)
    for step in range(5):
        pool.store(torch.tensor([True, step >= 3]))
        pool.used(torch.ones_like(pool.held))
    # All are used alike, so the oldest goes, except that the newest has been used less often.
    assert columns(pool.held) == ([0, 4] if policy == "counter" else [3, 4])
    assert pool.held[1, 0].tolist() == [False, False, False, True, True]
    assert pool.evictions.tolist() == [[3], [0]]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_of_one_entry_holds_the_newest(policy):
    pool = pool_of(1, policy)
    for step in range(4):
        pool.store(real())
        read(pool, step)
        assert columns(pool.held) == [step]


def test_entries_that_are_gone_cannot_be_used():
    pool = pool_of(2, "counter", counter_limit=3)
    for _ in range(3):
        pool.store(real())
    for _ in range(5):
        read(pool, 0)
    assert pool._worth.tolist() == [[[0, 0, 0]]]


@pytest.mark.parametrize("policy", POLICIES)
def test_reorder(policy):
    generator = torch.Generator().manual_seed(8)
    pool = pool_of([3, 5], policy, heads=2, counter_limit=4)
    twin = pool_of([5, 3, 5], policy, heads=2, counter_limit=4)
    order = torch.tensor([1, 0, 1])
    for step in range(30):
        chosen = torch.rand(2, 2, step + 1, generator=generator) < 0.4
        if step < 15:
            pool.store(real(2))
            pool.used(chosen)
        else:
            if step == 15:
                pool.reorder(order)
            pool.store(real(3))
            pool.used(chosen[order])
        twin.store(real(3))
        twin.used(chosen[order])
    assert torch.equal(pool.held, twin.held) and torch.equal(pool.evictions, twin.evictions)
    assert pool.capacity.tolist() == [5, 3, 5]


# Dense prefill


def test_nothing_is_evicted_while_dense_then_all_at_once():
    for policy, expected in (("fifo", [3, 4]), ("lru", [1, 4]), ("counter", [1, 3])):
        pool = pool_of(2, policy)
        for step in range(5):
            assert not pool.store(real(), evicts=~real()).any()
            read(pool, *((1, 3) if step == 3 else (1,) if step == 4 else ()))
        assert columns(pool.held) == [0, 1, 2, 3, 4] and pool.evictions.tolist() == [[0]]
        gone = pool.shrink()
        assert columns(pool.held) == expected, policy
        assert torch.equal(gone, ~pool.held) and pool.evictions.tolist() == [[3]]
        assert not pool.shrink().any() and pool.evictions.tolist() == [[3]]


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_may_be_dense_for_different_lengths(policy):
    """Row 0 reads 3 tokens densely, row 1 reads 6; each shrinks when its own prompt ends."""
    pool = pool_of([2, 2], policy)
    for step in range(6):
        evicts = torch.tensor([step >= 3, False])
        if step == 3:
            gone = pool.shrink(evicts)
            assert gone[:, 0].sum(-1).tolist() == [1, 0]
        pool.store(real(2), evicts)
    assert pool.held[:, 0].sum(-1).tolist() == [2, 6]
    assert pool.evictions.tolist() == [[4], [0]]
    pool.shrink(torch.tensor([False, True]))
    assert pool.held[:, 0].tolist() == [[False] * 4 + [True] * 2] * 2
    assert pool.evictions.tolist() == [[4], [4]]


@pytest.mark.parametrize("policy", POLICIES)
def test_storing_after_a_dense_prefill_evicts_all_that_is_too_much(policy):
    pool = pool_of(3, policy)
    for _ in range(7):
        pool.store(real(), evicts=~real())
    assert columns(pool.store(real())) == [0, 1, 2, 3, 4]
    assert columns(pool.held) == [5, 6, 7] and pool.evictions.tolist() == [[5]]


# Mistakes


def test_unknown_policy():
    with pytest.raises(
        KvaccError, match=r"unknown pool policy 'counters' \(did you mean 'counter'\?\); known: counter"
    ):
        pool_of(3, "counters")


@pytest.mark.parametrize("capacity", [0, -2])
def test_a_pool_that_holds_nothing(capacity):
    with pytest.raises(KvaccError, match=f"pool capacity {capacity} holds nothing; give 1 entry or more"):
        pool_of([4, capacity], "fifo")
