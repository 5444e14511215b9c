"""The compiled scans follow the reference scan decision for decision."""

from __future__ import annotations

import random

import pytest
import torch
from naive import draw_tokens, new_scan, one_request, sharp

from kvacc.compiled_choice import numba_is_here
from kvacc.engine import compiled, parallel
from kvacc.engine.plan import Request, build_rows, make_plan
from kvacc.engine.scan import Entries, masked_softmax, scan_block
from kvacc.strategy import make_strategy

needs_numba = pytest.mark.skipif(not numba_is_here(), reason="numba is not installed")

HEADS, GROUP = 2, 3

STRATEGIES = {
    "h2o": make_strategy("h2o", 0.4),
    "h2o heavy": make_strategy("h2o", 3, recent_fraction=0),
    "h2o recent": make_strategy("h2o", 0.5, recent_fraction=1),
    "h2o max": make_strategy("h2o", 0.4, aggregate="max"),
    "h2o one": make_strategy("h2o", 1),
    "h2o seen": make_strategy("h2o", 0.4, "seen"),
    "streaming_llm": make_strategy("streaming_llm", 0.4, sinks=2),
    "streaming_llm short": make_strategy("streaming_llm", 0.1),
    "recent": make_strategy("recent", 0.3),
    "recent seen": make_strategy("recent", 0.3, "seen"),
    "random": make_strategy("random", 0.4, seed=5),
    "random seen": make_strategy("random", 0.4, "seen"),
}


def random_rows(seed: int):
    """Trees of several documents, dense and compressed segments included, of one batch."""
    draw = random.Random(seed)
    rows, number = [], 0
    for _ in range(3):
        length = draw.randrange(4, 22)
        context = [draw.randrange(3, 128) for _ in range(length)]
        dense = draw.choice((0, length - 2, length))
        document = []
        for _ in range(draw.randrange(1, 5)):
            option = [draw.randrange(3, 6) for _ in range(draw.randrange(1, 6))]
            document.append((number, Request((*context, *option[:-1]), tuple(option), dense, dense or length)))
            number += 1
        rows += build_rows(document)
    return rows


def random_store(plan, generator, offset=9):
    """Stored entries before the plan: some slots empty, each head with its own positions."""
    rows = plan.tokens.shape[0]
    shape = (rows, HEADS, offset)
    position = torch.rand(rows, HEADS, 2 * offset, generator=generator).argsort(-1)[..., :offset].sort(-1).values
    alive = torch.rand(shape, generator=generator) < 0.8
    return Entries(position, alive, torch.rand(shape, generator=generator))


def run(scan, strategy, logits, use_compiled, blocks):
    """Decisions [B, H, T, W] and counts, in blocks of the given number of queries."""
    masks, counts = [], []
    count, width = logits.shape[3:]
    for first in range(0, count, blocks):
        size = min(blocks, count - first)
        columns = scan.offset + first + size
        part = logits[:, :, :, first : first + size, :columns].contiguous()
        if not use_compiled:
            visible, seen_by = scan_block(scan, part if strategy.needs_attention else None, first, size, None)
        elif strategy.compiled == "static":
            visible, seen_by = compiled.static(scan, first, size, columns)
        else:
            attention = part.clone()
            seen_by, _ = compiled.attention_sum(scan, attention, first, None)
            visible = attention.gt(0).any(2)
            torch.testing.assert_close(
                attention, masked_softmax(part, visible[:, :, None], None), atol=1e-6, rtol=0
            )
        masks.append(torch.nn.functional.pad(visible, (0, width - columns)))
        counts.append(seen_by)
    return torch.cat(masks, 2), torch.cat(counts, 2)


@needs_numba
@pytest.mark.parametrize("stored", [False, True], ids=["empty", "stored"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", STRATEGIES)
def test_compiled_equals_reference(name, seed, stored):
    strategy = STRATEGIES[name]
    plan = make_plan(random_rows(seed), strategy)
    generator = torch.Generator().manual_seed(seed)
    store = None
    if stored:
        store = random_store(plan, generator)
        plan.position += 18  # the stored positions lie before
    rows, count = plan.tokens.shape
    width = count + (9 if stored else 0)
    logits = 3 * torch.randn(rows, HEADS, GROUP, count, width, generator=generator)
    reference = new_scan(plan, strategy, HEADS, layer=1, stored=store)
    fast = new_scan(plan, strategy, HEADS, layer=1, stored=store)
    expected, expected_count = run(reference, strategy, logits, False, blocks=count)
    for blocks in (count, 5, 1):
        found, found_count = run(fast, strategy, logits, True, blocks)
        assert torch.equal(found, expected)
        assert torch.equal(found_count, expected_count)
        assert torch.equal(fast.current.alive, reference.current.alive)
        torch.testing.assert_close(fast.current.score, reference.current.score, atol=1e-5, rtol=1e-6)
        fast = new_scan(plan, strategy, HEADS, layer=1, stored=store)
    # The case is one in which something happens.
    assert (expected_count < plan.position[:, None] + 1)[:, :, -1].any() or stored
    if not stored:
        assert not (expected & ~plan.ancestors[:, None]).any()


@pytest.mark.parametrize("name", STRATEGIES)
def test_reference_does_not_depend_on_blocks(name):
    strategy = STRATEGIES[name]
    plan = make_plan(random_rows(9), strategy)
    rows, count = plan.tokens.shape
    logits = 3 * torch.randn(rows, HEADS, GROUP, count, count, generator=torch.Generator().manual_seed(9))
    whole, _ = run(new_scan(plan, strategy, HEADS), strategy, logits, False, count)
    pieces, _ = run(new_scan(plan, strategy, HEADS), strategy, logits, False, 4)
    assert torch.equal(whole, pieces)


@pytest.mark.parametrize("reference", [True, False], ids=["reference", "compiled"])
@pytest.mark.parametrize("options", [{}, {"scores": "full_row"}], ids=["renormalised", "full_row"])
def test_a_branch_reads_nothing_of_its_siblings(reference, options):
    # An option's decisions are those it would have alone in a row.
    strategy = make_strategy("h2o", 5, **options)
    context = draw_tokens(14)
    options = [draw_tokens(5, seed) for seed in (1, 2, 3)]
    items = [(n, Request((*context, *o), tuple([*o, 5]), 0, 14)) for n, o in enumerate(options)]
    (row,) = build_rows(items)
    plan = make_plan([row], strategy)
    logits, session = sharp("llama").parallel(plan, strategy, record=True, reference=reference)
    place = {int(column): i for i, column in enumerate(plan.counted[0].nonzero()[:, 0])}
    for number, request in items:
        alone = make_plan(build_rows([(0, request)]), strategy)
        own_logits, own = sharp("llama").parallel(alone, strategy, record=True, reference=reference)
        path = plan.ancestors[0, row.queries[number][-1]].nonzero()[:, 0]
        for layer, mask in session.decisions.items():
            assert torch.equal(mask[0][:, path][:, :, path], own.decisions[layer][0])
        mine = torch.stack([logits[place[query]] for query in row.queries[number]])
        torch.testing.assert_close(mine, own_logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("reference", [True, False], ids=["reference", "compiled"])
@pytest.mark.parametrize("name", ["h2o", "h2o seen", "streaming_llm", "random"])
def test_small_blocks_change_nothing_in_a_model(name, reference, monkeypatch):
    strategy = STRATEGIES[name]
    plan = make_plan(random_rows(2), strategy)
    whole, one = sharp("llama").parallel(plan, strategy, record=True, reference=reference)
    rows, count = plan.tokens.shape
    for queries in (1, 3):
        monkeypatch.setattr(parallel, "BLOCK_BYTES", 4 * rows * 4 * count * queries)
        pieces, other = sharp("llama").parallel(plan, strategy, record=True, reference=reference)
        torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=0)
        assert torch.equal(one.kept, other.kept) and torch.equal(one.hidden, other.hidden)
        for layer in one.decisions:
            assert torch.equal(one.decisions[layer], other.decisions[layer])


def test_full_rows_are_read_in_small_blocks_too(monkeypatch):
    strategy = make_strategy("h2o", 0.4, scores="full_row")
    plan = make_plan(build_rows([(0, one_request(draw_tokens(20)))]), strategy)
    whole, one = sharp("llama").parallel(plan, strategy, record=True)
    monkeypatch.setattr(parallel, "BLOCK_BYTES", 1)
    pieces, other = sharp("llama").parallel(plan, strategy, record=True)
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=0)
    assert all(torch.equal(one.decisions[layer], other.decisions[layer]) for layer in one.decisions)


def test_a_compiled_rule_is_used_only_where_it_is_exact():
    full_row = make_strategy("h2o", 5, scores="full_row")
    for strategy, fast in ((make_strategy("h2o", 5), True), (full_row, False), (make_strategy("random", 5), True)):
        plan = make_plan(build_rows([(0, one_request(draw_tokens(6)))]), strategy)
        assert compiled.supports(new_scan(plan, strategy, 1)) == (fast and numba_is_here())


# --- softmax over a kept set --------------------------------------------------------------


def test_masked_softmax_by_hand():
    logits = torch.tensor([1.0, 3.0, 2.0, 5.0]).log().view(1, 1, 1, 4)
    mask = torch.tensor([True, True, False, False]).view(1, 1, 1, 4)
    assert masked_softmax(logits, mask, None).flatten().tolist() == pytest.approx([0.25, 0.75, 0, 0])
    # A sink logit of log 4 takes part in the denominator only: 1 / 8 and 3 / 8.
    aux = torch.tensor([[4.0]]).log()
    assert masked_softmax(logits, mask, aux).flatten().tolist() == pytest.approx([0.125, 0.375, 0, 0])


@pytest.mark.parametrize("aux", [None, torch.tensor([[2.0]])])
def test_a_row_without_entries_is_zero(aux):
    out = masked_softmax(torch.randn(1, 1, 1, 4), torch.zeros(1, 1, 1, 4, dtype=torch.bool), aux)
    assert torch.equal(out, torch.zeros_like(out))


def test_a_subclass_with_a_rule_of_its_own_is_not_compiled():
    from kvacc.strategies.h2o import H2O

    class Same(H2O):
        pass

    class Other(H2O):
        def observe(self, scores, attention):
            return -super().observe(scores, attention)

    assert compiled._speaks_for(H2O) and compiled._speaks_for(Same)
    assert not compiled._speaks_for(Other)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2", "deepseek_v3", "opt"])
@pytest.mark.parametrize("aggregate", ["mean", "max"])
def test_a_dense_beginning_is_the_same_head_by_head(family, aggregate, monkeypatch):
    """On processors a block is computed one row and head at a time, elsewhere as a whole."""
    from kvacc.engine import dense_scan

    strategy = make_strategy("h2o", 6, aggregate=aggregate)
    model = sharp(family)
    rows = []
    for number, length in enumerate((30, 18)):
        tokens = tuple(3 + (5 * i + number) % 90 for i in range(length))
        rows += build_rows([(number, Request(tokens, tokens[-2:], length - 4, length - 4))])
    plan = make_plan(rows, strategy)
    logits, session = model.parallel(plan, strategy, record=True)
    monkeypatch.setattr(dense_scan, "one_by_one", lambda x: False)
    whole, other = model.parallel(plan, strategy, record=True)
    assert torch.allclose(logits, whole, atol=1e-4)
    for layer, visible in session.decisions.items():
        assert torch.equal(visible, other.decisions[layer])
