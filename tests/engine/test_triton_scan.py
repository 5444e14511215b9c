"""The Triton scan follows the reference scan decision for decision.

The comparisons run twice: on a GPU, where there is one, and anywhere that Triton is installed in
its interpreter, which takes CPU tensors. The interpreter has to be chosen before Triton is
imported, so it gets a process of its own (``test_in_the_interpreter``). Without Triton both skip.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from engine.test_scan import GROUP, HEADS, STRATEGIES, random_rows, random_store
from naive import draw_tokens, new_scan, one_request, sharp

from kvacc.engine import compiled, parallel, triton_scan
from kvacc.engine.plan import Plan, Request, build_rows, make_plan
from kvacc.engine.scan import Entries, masked_softmax, scan_block
from kvacc.strategy import EvictStrategy, make_strategy

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@pytest.fixture(
    params=[
        pytest.param(
            "cpu", marks=[needs_triton, pytest.mark.skipif(not INTERPRETED, reason="not interpreted")]
        ),
        pytest.param("cuda", marks=[needs_triton, pytest.mark.gpu]),
    ]
)
def device(request):
    """Where the kernel runs."""
    return request.param


def entries_on(device: str, entries: Entries) -> Entries:
    return Entries(*(x.to(device) for x in (entries.position, entries.alive, entries.score)))


def compare(
    plan: Plan,
    strategy: EvictStrategy,
    logits: torch.Tensor,
    device: str,
    blocks: int,
    aux: torch.Tensor | None = None,
    stored: Entries | None = None,
) -> torch.Tensor:
    """Replay ``logits`` [B, H, G, T, W] whole with the reference and in blocks of queries with
    Triton; everything that they leave behind must be equal. Returns what was visible."""
    rows, heads, _, count, width = logits.shape
    reference = new_scan(plan, strategy, heads, layer=1, stored=stored)
    given = logits.clone() if strategy.needs_attention else None
    expected, expected_count = scan_block(reference, given, 0, count, aux)
    there = entries_on(device, stored) if stored else Entries(*(x.to(device) for x in _nothing(rows, heads)))
    scan = new_scan(plan.to(device), strategy, heads, layer=1, stored=there)
    for first in range(0, count, blocks):
        size = min(blocks, count - first)
        columns = scan.offset + first + size
        here = slice(first, first + size)
        if strategy.compiled == "static":
            visible, seen_by = triton_scan.static(scan, first, size, columns)
        else:
            attention = logits[:, :, :, here, :columns].to(device, copy=True).contiguous()
            sinks = None if aux is None else aux.to(device)
            seen_by, visible = triton_scan.attention_sum(scan, attention, first, sinks, record=True)
            wanted = masked_softmax(
                logits[:, :, :, here, :columns], expected[:, :, None, here, :columns], aux
            )
            torch.testing.assert_close(attention.cpu(), wanted, atol=1e-5, rtol=0)
        assert torch.equal(visible.cpu(), expected[:, :, here, :columns])
        assert torch.equal(seen_by.cpu(), expected_count[:, :, here])
    assert torch.equal(scan.current.alive.cpu(), reference.current.alive)
    torch.testing.assert_close(scan.current.score.cpu(), reference.current.score, atol=1e-5, rtol=1e-6)
    return expected


def _nothing(rows: int, heads: int) -> tuple[torch.Tensor, ...]:
    empty = torch.zeros(rows, heads, 0)
    return empty.long(), empty.bool(), empty


def draw_logits(plan: Plan, seed: int, group: int = GROUP, offset: int = 0) -> torch.Tensor:
    rows, count = plan.tokens.shape
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, HEADS, group, count, offset + count, generator=generator)


def compare_random(name: str, seed: int, device: str, blocks: int, store: bool) -> None:
    strategy = STRATEGIES[name]
    plan = make_plan(random_rows(seed), strategy)
    stored = random_store(plan, torch.Generator().manual_seed(seed)) if store else None
    if stored:
        plan.position += 18  # the stored positions lie before
    logits = draw_logits(plan, seed, offset=9 if store else 0)
    expected = compare(plan, strategy, logits, device, blocks, stored=stored)
    # Trees, padding, and something is evicted.
    assert (plan.parent > 0).any() or (plan.start.shape[1] > 1)
    assert (plan.segment < 0).any()
    assert store or (expected.sum(-1) < plan.position[:, None] + 1).any()


@pytest.mark.parametrize("name", STRATEGIES)
def test_equals_the_reference(name, device):
    number = list(STRATEGIES).index(name)
    compare_random(name, seed=number % 4, device=device, blocks=(100, 5)[number % 2], store=number % 3 == 0)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("store", [False, True], ids=["empty", "stored"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", STRATEGIES)
def test_equals_the_reference_on_every_case(name, seed, store, device):
    for blocks in (100, 5, 1):
        compare_random(name, seed, device, blocks, store)


@pytest.mark.parametrize("aggregate", ["mean", "max"])
def test_attention_sinks_join_the_denominator(aggregate, device):
    strategy = make_strategy("h2o", 0.4, aggregate=aggregate)
    plan = make_plan(random_rows(1), strategy)
    aux = torch.tensor([[0.5, 3.0, -2.0], [9.0, float("-inf"), 1.0]])
    compare(plan, strategy, draw_logits(plan, 1), device, blocks=6, aux=aux)


def test_one_query_head_per_kv_head(device):
    strategy = STRATEGIES["h2o"]
    plan = make_plan(random_rows(2), strategy)
    compare(plan, strategy, draw_logits(plan, 2, group=1), device, blocks=7)


@pytest.mark.parametrize("dense", [0, 24])
def test_of_equal_scores_the_lower_position_stays(dense, device):
    # Each query divides its attention equally between itself and at most one other entry, so
    # every score is a multiple of 1/4, exact in any order of addition, and most are equal.
    strategy = make_strategy("h2o", 6, recent_fraction=0.2)
    plan = make_plan(build_rows([(0, one_request(draw_tokens(30), dense))]), strategy)
    generator = torch.Generator().manual_seed(dense)
    logits = torch.full((1, HEADS, 2, 30, 30), -300.0)
    for t in range(30):
        logits[..., t, t] = 0.0
        other = torch.randint(0, t + 1, (1, HEADS, 2, 1), generator=generator)
        logits[:, :, :, t].scatter_(-1, other, 0.0)
    expected = compare(plan, strategy, logits, device, blocks=11)
    # By hand: with attention to themselves only, all have score 1, so after a prompt read densely
    # the first five and the two newest are left when the next token arrives.
    logits[:] = -300.0
    logits.diagonal(dim1=-2, dim2=-1).zero_()
    expected = compare(plan, strategy, logits, device, blocks=30)
    if dense:
        assert expected[0, 0, 24].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 22, 23, 24]


def test_a_row_that_reads_nothing_but_minus_infinity_is_zero(device):
    strategy = make_strategy("h2o", 3)
    plan = make_plan(build_rows([(0, one_request(draw_tokens(6)))]), strategy)
    logits = draw_logits(plan, 0)
    logits[..., 2, :] = float("-inf")
    compare(plan, strategy, logits, device, blocks=6)


def test_ranks_order_every_score(device):
    # Negative scores, both zeros and infinities: a strategy may start its entries anywhere.
    from kvacc.strategies.random import Random

    class Any(Random):
        compiled = "static"

        def observe(self, scores, attention):
            return scores

        def keep(self, *args):
            return super().keep(*args)

        def initial_score(self, position, layer, heads):
            values = torch.tensor([0.0, -0.0, -1.5, 2.5, -1e-42, 1e-42, float("-inf"), 3e38, -3e38, 2.5])
            return values.to(position.device)[position % 10, None].expand(*position.shape, heads)

    for budget in (1, 4, 9, 14):
        for dense in (0, 17):
            strategy = Any(budget)
            plan = make_plan(build_rows([(0, one_request(draw_tokens(20), dense))]), strategy)
            compare(plan, strategy, torch.zeros(1, 1, 1, 20, 20), device, blocks=20)


@pytest.mark.parametrize("name", ["h2o", "streaming_llm"])
def test_in_a_model(name, device, monkeypatch):
    # Through the engine's own dispatch, behind blocks that were read densely.
    if device == "cpu":
        monkeypatch.setattr(triton_scan, "supports", lambda scan: True)
    calls = []
    launch = triton_scan._replay
    monkeypatch.setattr(triton_scan, "_replay", lambda *args: calls.append(1) or launch(*args))
    strategy = make_strategy(name, 6)
    context = draw_tokens(12)
    options = [(n, Request((*context, *draw_tokens(3, n)), (5,) * 4, 12, 12)) for n in (1, 2)]
    plan = make_plan(build_rows(options), strategy)
    monkeypatch.setattr(parallel, "BLOCK_BYTES", 4 * 4 * plan.tokens.shape[1] * 8)
    wrapped = sharp("llama")
    expected, reference = wrapped.parallel(plan, strategy, record=True, reference=True)
    assert not calls
    wrapped.model.to(device)
    try:
        found, session = wrapped.parallel(plan.to(device), strategy, record=True)
    finally:
        wrapped.model.to("cpu")
    assert calls
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=0)
    for layer, mask in reference.decisions.items():
        assert torch.equal(session.decisions[layer].cpu(), mask)


# --- without a GPU ------------------------------------------------------------------------


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
@pytest.mark.timeout(900)  # half a minute on an idle machine
def test_in_the_interpreter():
    command = [
        sys.executable,
        "-m",
        "pytest",
        __file__,
        "-n",
        "0",
        "-q",
        "-k",
        "cpu",
        "-p",
        "no:cacheprovider",
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=850)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed and int(passed[1]) >= 20, done.stdout[-3000:] + done.stderr[-1000:]


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("columns", [128, triton_scan.MOST_COLUMNS])
@pytest.mark.parametrize("scored", [True, False], ids=["attention_sum", "static"])
def test_compiles_for_a_gpu_that_is_not_here(columns, scored, tmp_path, monkeypatch):
    # The interpreter accepts programs whose types the compiler rejects.
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvacc.engine.triton_kernels import COUNTS, replay_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    floats = {"logits", "aux", "arrival", "score_now", "score_first", "score_ends"}
    flags = {"visible", "dense", "compress", "alive_now", "alive_first", "alive_ends"}
    options = {
        "GROUP": 4,
        "BLOCK": columns,
        "SCORED": scored,
        "USE_MAX": False,
        "HAS_AUX": scored,
        "RECORD": True,
    }

    def kind(name):
        if name in options:
            return "constexpr"
        if name in COUNTS:
            return "i32"
        return "*fp32" if name in floats else "*u8" if name in flags else "*i32"

    source = ASTSource(replay_kernel, {name: kind(name) for name in replay_kernel.arg_names}, options)
    warps = min(1024, columns // 8) // 32 or 1
    built = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": warps})
    assert built.asm["cubin"]
    # Nothing is held in shared memory but what reductions exchange: it would not fit.
    assert built.metadata.shared <= 1024


def scan_on(kind: str, width: int):
    """As much of a scan as the choice between implementations looks at."""
    alive = SimpleNamespace(device=torch.device(kind), shape=(1, 1, width))
    return SimpleNamespace(strategy=make_strategy("h2o", 5), current=SimpleNamespace(alive=alive))


def test_serves_gpus_up_to_a_width(monkeypatch):
    monkeypatch.setattr(triton_scan, "runs_on", lambda device: True)
    assert compiled.supports(scan_on("cuda", triton_scan.MOST_COLUMNS))
    assert not compiled.supports(scan_on("cuda", triton_scan.MOST_COLUMNS + 1))
    assert not triton_scan.supports(scan_on("cpu", 10))
    monkeypatch.setattr(triton_scan, "runs_on", lambda device: False)
    assert not compiled.supports(scan_on("cuda", 10))


def test_without_triton_the_reference_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not triton_scan.runs_on.__wrapped__(torch.device("cuda"))
    assert not triton_scan.supports(scan_on("cuda", 11)) or torch.cuda.is_available()


def test_a_compiler_that_fails_is_named_and_the_reference_runs(monkeypatch, caplog):
    def fail(device):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setattr(triton_scan, "_try_out", fail)
    with caplog.at_level(logging.WARNING):
        assert not triton_scan.runs_on.__wrapped__(torch.device("cuda"))
    assert "Failed to find C compiler" in caplog.text and "slow" in caplog.text


def test_trying_out_notices_a_kernel_that_does_nothing(monkeypatch):
    monkeypatch.setattr(triton_scan, "_replay", lambda *args: torch.zeros(1, 1, 1, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="wrong result"):
        triton_scan._try_out(torch.device("cpu"))
