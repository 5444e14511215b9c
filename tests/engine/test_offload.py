"""The step path of strategies that select: the host pool, what is brought of it, and when."""

from __future__ import annotations

import pytest
import torch
from families import build
from kvacc.strategies.infinigen import InfiniGen
from naive import calibration, draw_tokens, sharp
from naive_select import read_at_once, read_by_steps

from kvacc.engine import attention, offloaded_attention
from kvacc.engine.generation import generate
from kvacc.engine.offload import OffloadedLayer
from kvacc.engine.scoring import step_forward
from kvacc.engine.stepping import KeptLayer, RowReading
from kvacc.engine.wrapped import WrappedModel
from kvacc.errors import KvaccError
from kvacc.select_strategy import LayerContext
from kvacc.strategy import make_strategy

pytestmark = pytest.mark.usefixtures("skewing_folder")
TOKENS = draw_tokens(26, seed=4)
ENTRY = (8 + 8) * 4
"""Bytes of an entry of a KV head: a key and a value of 8 numbers in float32."""
INFINIGEN = make_strategy("infinigen", 7, alpha=3.0)


def strategies(budget=7):
    return {
        "infinigen": make_strategy("infinigen", budget, alpha=3.0),
        "pool": make_strategy("infinigen", budget, pool=12, alpha=3.0),
        "quest": make_strategy("quest", budget, page_size=3, dense_layers=1),
        "infllm": make_strategy("infllm", budget, init=1, local_fraction=0.3, block=2, representatives=1),
    }


every_strategy = pytest.mark.parametrize("name", strategies())


def llama():
    return sharp("llama", num_hidden_layers=3)


# --- the pool -----------------------------------------------------------------------------


def layer_with(entries, rows=1, heads=2):
    """A layer that holds ``entries`` columns of random keys and values."""
    torch.manual_seed(0)
    layer = OffloadedLayer()
    key, value = torch.randn(rows, heads, entries, 4), torch.randn(rows, heads, entries, 6)
    layer.update(key, value)
    return layer, key, value


def test_the_pool_and_what_is_brought_are_different_memory():
    layer, key, value = layer_with(5)
    assert layer.pool_keys.data_ptr() != key.data_ptr()
    brought = layer.bring(torch.ones(1, 2, 5).bool())
    assert brought.key.data_ptr() != layer.pool_keys.data_ptr()
    assert brought.value.data_ptr() != layer.pool_values.data_ptr()
    brought.key.zero_()
    brought.value.zero_()
    assert torch.equal(layer.pool_keys[:, :, :5], key) and torch.equal(layer.pool_values[:, :, :5], value)


def test_new_entries_are_given_back_alone():
    layer, _, _ = layer_with(5)
    key, value = torch.randn(1, 2, 2, 4), torch.randn(1, 2, 2, 6)
    got = layer.update(key, value)
    assert got[0] is key and got[1] is value and layer.seen == layer.get_seq_length() == 7
    assert torch.equal(layer.pool_keys[:, :, 5:7], key)
    assert layer.get_mask_sizes(3) == (10, 0) and layer.get_max_length() == -1


def test_only_wanted_entries_are_brought():
    layer, key, value = layer_with(5, rows=2)
    wanted = torch.zeros(2, 2, 5, dtype=torch.bool)
    wanted[0, 0, [1, 4]] = True
    wanted[0, 1, [0, 2, 3]] = True
    wanted[1, 1, [2]] = True
    brought = layer.bring(wanted)
    # As many slots as the head that reads most; the others of a head are empty.
    assert brought.key.shape == (2, 2, 3, 4) and brought.value.shape == (2, 2, 3, 6)
    assert brought.valid.tolist() == [[[True, True, False], [True] * 3], [[False] * 3, [True, False, False]]]
    assert brought.column[0, 1].tolist() == [0, 2, 3] and brought.column[0, 0, :2].tolist() == [1, 4]
    assert torch.equal(brought.key[0, 0, :2], key[0, 0, [1, 4]])
    assert torch.equal(brought.value[0, 1], value[0, 1, [0, 2, 3]])
    assert torch.equal(brought.key[1, 1, 0], key[1, 1, 2])
    assert not brought.key[~brought.valid].any()
    # 5 and 1 entries of 4 + 6 numbers in float32.
    assert brought.bytes_of_row.tolist() == [200, 40]


def test_nothing_wanted_is_nothing_brought():
    layer, _, _ = layer_with(3)
    for width in (3, 0):
        brought = layer.bring(torch.zeros(1, 2, width).bool())
        assert brought.key.shape == (1, 2, 0, 4) and brought.bytes_of_row.tolist() == [0]


def test_the_pool_doubles():
    layer, _, _ = layer_with(3)
    held, capacities, pools = [layer.pool_keys[:, :, :3].clone()], [], set()
    for _ in range(30):
        key = torch.randn(1, 2, 1, 4)
        layer.update(key, torch.randn(1, 2, 1, 6))
        held.append(key)
        capacities.append(layer.pool_keys.shape[2])
        pools.add(layer.pool_keys.data_ptr())
        assert layer.pool_values.shape[2] == capacities[-1]
    assert capacities == [6] * 3 + [12] * 6 + [24] * 12 + [48] * 9
    assert torch.equal(layer.pool_keys[:, :, :33], torch.cat(held, 2))
    # Room that is not filled does not count: 33 entries of 2 heads x 10 numbers.
    assert layer.host_bytes() == 33 * 2 * 10 * 4
    layer.update(torch.randn(1, 2, 200, 4), torch.randn(1, 2, 200, 6))
    assert layer.pool_keys.shape[2] == 233  # a chunk that is more than the double


def test_a_cache_that_is_reset_is_empty():
    layer, _, _ = layer_with(3)
    layer.reset()
    assert layer.seen == 0 and layer.host_bytes() == layer.device_bytes() == 0 and not layer.is_initialized
    layer.reorder_cache(torch.tensor([0]))  # nothing to follow


def test_it_cannot_be_cropped():
    with pytest.raises(KvaccError, match="cannot be cropped; use no assisted decoding"):
        OffloadedLayer().crop(3)


# --- what the step path moves -------------------------------------------------------------


def moved_by_hand(reads, t, layers):
    """Selected entries but for the query's own, of both KV heads in the layers that select."""
    return sum(int(reads[layer][:, t].sum() - reads[layer][:, t, t].sum()) for layer in layers) * ENTRY


@every_strategy
def test_bytes_of_every_token_are_counted(name):
    strategy = strategies()[name]
    _, reads, parallel = read_at_once(llama(), strategy, TOKENS)
    _, chosen, session = read_by_steps(llama(), strategy, TOKENS)
    by_steps = [int(moved[0]) for moved in session.moved]
    assert by_steps == parallel.moved[0].tolist()
    selecting = range(strategy.dense_layers, 3)
    assert by_steps == [moved_by_hand(reads, t, selecting) for t in range(26)]
    assert by_steps[0] == 0 and by_steps[1] == 2 * len(selecting) * ENTRY
    assert sorted(reads) == list(selecting) and sorted(chosen) == [0, 1, 2]


def test_bytes_of_half_precision_are_half():
    model = sharp("llama", dtype=torch.bfloat16, num_hidden_layers=3)
    strategy = strategies()["quest"]
    _, reads, parallel = read_at_once(model, strategy, TOKENS)
    assert parallel.moved[0].tolist() == [moved_by_hand(reads, t, (1, 2)) / 2 for t in range(26)]
    _, chosen, session = read_by_steps(model, strategy, TOKENS)
    assert [int(m[0]) for m in session.moved] == [moved_by_hand(chosen, t, (1, 2)) // 2 for t in range(26)]


@every_strategy
def test_only_selected_entries_reach_the_device(name, monkeypatch):
    strategy, brought, widths = strategies()[name], [], []
    bring, attend = OffloadedLayer.bring, offloaded_attention.attend_selected

    def watched_bring(self, wanted, ahead=False):
        brought.append((self, wanted, bring(self, wanted, ahead)))
        return brought[-1][2]

    def watched_attend(call, selection, *rest):
        widths.append((call.layer, call.key.shape[2], call.value.shape[2], selection.visible))
        return attend(call, selection, *rest)

    monkeypatch.setattr(OffloadedLayer, "bring", watched_bring)
    monkeypatch.setattr(offloaded_attention, "attend_selected", watched_attend)
    _, reads, session = read_by_steps(llama(), strategy, TOKENS)
    assert len(brought) == len(widths) == 26 * (3 - strategy.dense_layers)
    for layer, wanted, found in brought:
        assert found.key.shape[2] == found.value.shape[2] == int(wanted.sum(-1).max())
        assert found.key.shape[2] <= 7 or strategy.name == "quest"
        row, head, slot = found.valid.nonzero(as_tuple=True)
        assert len(row) == int(wanted.sum())
        column = found.column[row, head, slot]
        assert torch.equal(found.key[row, head, slot], layer.pool_keys[row, head, column])
        assert torch.equal(found.value[row, head, slot], layer.pool_values[row, head, column])
    counts = dict.fromkeys(range(3), 0)
    for layer, keys, values, visible in widths:
        t, counts[layer] = counts[layer], counts[layer] + 1
        others = reads[layer][:, t].sum(-1) - reads[layer][:, t, t].int()
        # What attention sees: those, and the token's own entry.
        assert keys == values == int(others.max()) + 1 <= 8
        assert torch.equal(visible[0, :, 0].sum(-1), reads[layer][:, t].sum(-1))
    assert all(isinstance(layer, OffloadedLayer) for layer in session.cache.layers[strategy.dense_layers :])
    assert all(isinstance(layer, KeptLayer) for layer in session.cache.layers[: strategy.dense_layers])


@every_strategy
def test_bytes_on_the_device_and_in_host_memory_are_measured(name):
    strategy = strategies()[name]
    _, _, session = read_by_steps(llama(), strategy, TOKENS)
    offloaded = session.cache.layers[strategy.dense_layers :]
    per_layer = 26 * 2 * ENTRY
    assert session.host_bytes() == len(offloaded) * per_layer
    summaries = sum(sum(x.nbytes for x in layer.selector.state.values()) for layer in offloaded)
    assert session.measured_bytes() == strategy.dense_layers * per_layer + summaries
    if strategy.name == "infinigen":
        # 0.3 of 8 columns are 3: 26 keys of 2 heads in float32.
        assert summaries == 2 * 26 * 2 * 3 * 4


def test_latent_attention_moves_latents():
    # One latent of 8 numbers and a rotary part of 4 stand for the keys and values of all heads.
    model = WrappedModel(build("deepseek_v3", num_hidden_layers=3), calibration=calibration)
    for strategy in (
        make_strategy("quest", 7, page_size=3, dense_layers=1),
        make_strategy("infinigen", 7, alpha=3.0),
        make_strategy(
            "infllm",
            7,
            init=1,
            local_fraction=0.3,
            block=2,
            representatives=1,
            positions="original",
            dense_layers=1,
        ),
    ):
        logits, reads, parallel = read_at_once(model, strategy, TOKENS)
        found, chosen, session = read_by_steps(model, strategy, TOKENS)
        torch.testing.assert_close(found, logits, atol=1e-3, rtol=0)
        for layer, mask in reads.items():
            assert mask.shape[0] == 1 and torch.equal(mask, chosen[layer])
        expected = [
            sum(int(m[0, t].sum()) - int(m[0, t, t]) for m in reads.values()) * (8 + 4) * 4 for t in range(26)
        ]
        assert [int(moved[0]) for moved in session.moved] == parallel.moved[0].tolist() == expected
        assert session.host_bytes() == 2 * 26 * (8 + 4) * 4
        pool = session.cache.layers[2]
        assert pool.pool_keys.shape[1] == 1 and pool.pool_keys.shape[3] + pool.pool_values.shape[3] == 12


# --- ahead of time ------------------------------------------------------------------------


@pytest.fixture
def ahead(monkeypatch):
    """How often a selection was fetched ahead, and used."""
    count = {"fetched": 0, "used": 0}
    fetch, take = OffloadedLayer.fetch_ahead, OffloadedLayer.take_ahead

    def fetching(self, visible):
        count["fetched"] += 1
        fetch(self, visible)

    def taking(self):
        taken = take(self)
        count["used"] += taken is not None
        return taken

    monkeypatch.setattr(OffloadedLayer, "fetch_ahead", fetching)
    monkeypatch.setattr(OffloadedLayer, "take_ahead", taking)
    return count


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("dense_layers", [1, 2])
def test_a_selection_made_ahead_is_the_same(family, dense_layers, ahead, monkeypatch):
    model = sharp(family, num_hidden_layers=4)
    strategy = make_strategy("infinigen", 7, alpha=2.0, dense_layers=dense_layers)
    assert strategy.selects_ahead
    for dense in (0, 12):
        ahead.update(fetched=0, used=0)
        logits, reads, session = read_by_steps(model, strategy, TOKENS, dense=dense)
        # In every layer that selects, but for the first token: nothing is stored yet. The first of
        # these layers has a dense one before it, which also leaves time to fetch.
        assert ahead == {"fetched": 25 * (4 - dense_layers), "used": 25 * (4 - dense_layers)}
        with monkeypatch.context() as patch:
            patch.setattr(InfiniGen, "selects_ahead", property(lambda self: False))
            late, chosen, other = read_by_steps(model, strategy, TOKENS, dense=dense)
        assert ahead["fetched"] == 25 * (4 - dense_layers)
        assert all(torch.equal(reads[layer], chosen[layer]) for layer in reads)
        torch.testing.assert_close(logits, late, atol=1e-4, rtol=0)
        assert torch.equal(torch.stack(session.moved), torch.stack(other.moved))
        assert all(
            torch.equal(a, c) and torch.equal(b, d)
            for (a, b), (c, d) in zip(session.passes, other.passes, strict=True)
        )


@pytest.mark.parametrize(
    "options",
    [dict(speculate_from="current"), dict(current_token="ranked"), dict(pool=9)],
    ids=["current", "ranked", "pool"],
)
def test_a_choice_that_needs_the_token_itself_is_made_late(options, ahead):
    strategy = make_strategy("infinigen", 7, **options)
    assert not strategy.selects_ahead
    read_by_steps(llama(), strategy, TOKENS)
    assert ahead == {"fetched": 0, "used": 0}


def test_a_chunk_is_not_chosen_ahead(ahead):
    read_by_steps(llama(), INFINIGEN, TOKENS, [10, 6, 10])
    assert ahead["fetched"] == 0
    logits, _, _ = read_by_steps(llama(), INFINIGEN, TOKENS)
    mixed, _, _ = read_by_steps(llama(), INFINIGEN, TOKENS, [10, 1, 1, 4, 1, 9])
    torch.testing.assert_close(mixed, logits, atol=1e-3, rtol=0)


def test_layers_of_another_kind_are_not_guessed_ahead(ahead):
    # A hybrid's sliding layer is given rotary frequencies of its own.
    model = WrappedModel(
        build("gemma3_text", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2),
        calibration=calibration,
    )
    logits, reads, _ = read_at_once(model, INFINIGEN, TOKENS)
    found, chosen, _ = read_by_steps(model, INFINIGEN, TOKENS)
    assert sorted(reads) == [1, 3] and ahead["used"] == 0
    assert all(torch.equal(reads[layer], chosen[layer]) for layer in reads)
    torch.testing.assert_close(found, logits, atol=1e-3, rtol=0)


# --- rows ---------------------------------------------------------------------------------


def generated(prompts, strategy, copies=1, new=6, dense=False, **settings):
    model = llama()
    width = max(map(len, prompts))
    padding = [width - len(p) for p in prompts]
    tokens = torch.tensor([[0] * n + p for n, p in zip(padding, prompts, strict=True)])
    mask = torch.tensor([[0] * n + [1] * len(p) for n, p in zip(padding, prompts, strict=True)])
    rows = [RowReading(n, len(p) if dense else 0, len(p)) for n, p in zip(padding, prompts, strict=True)]

    def call(cache):
        return model.model.generate(
            input_ids=tokens, attention_mask=mask, max_new_tokens=new, pad_token_id=0, eos_token_id=None,
            do_sample=False, cache=cache, **settings,
        )  # fmt: skip

    made, measured = generate(model, strategy, rows, call, width, copies)
    return made[:, width:].tolist(), measured


PROMPTS = [draw_tokens(18, seed=1), draw_tokens(11, seed=2), draw_tokens(15, seed=3)]


@every_strategy
@pytest.mark.parametrize("dense", [False, True], ids=["stream", "serve"])
def test_a_batch_generates_as_its_rows_alone(name, dense):
    strategy = strategies()[name]
    together, measured = generated(PROMPTS, strategy, dense=dense)
    for prompt, made, one in zip(PROMPTS, together, measured, strict=True):
        [alone], [other] = generated([prompt], strategy, dense=dense)
        assert alone == made
        assert one.kept_fraction == pytest.approx(other.kept_fraction, abs=1e-9)
        # The first token comes from the prompt's pass, whose entries need not be brought.
        assert one.moved_bytes == pytest.approx(other.moved_bytes) and one.moved_bytes > 0
        assert one.hidden == other.hidden


@every_strategy
def test_generation_follows_the_tokens_one_by_one(name):
    strategy, model = strategies()[name], llama()
    [made], _ = generated([PROMPTS[0]], strategy)
    session = model.step(strategy, [RowReading(0, 0, 18)])
    tokens = list(PROMPTS[0])
    with attention.active(session), torch.inference_mode():
        for column in range(18 + 5):
            logits = step_forward(model, session, torch.tensor([[tokens[column]]]), column)
            if column >= 17:
                tokens.append(int(logits[0, -1].argmax()))
    assert tokens[18:] == made


@every_strategy
def test_beams(name):
    strategy = strategies()[name]
    together, _ = generated(PROMPTS, strategy, copies=2, num_beams=2)
    for prompt, made in zip(PROMPTS, together, strict=True):
        [alone], _ = generated([prompt], strategy, copies=2, num_beams=2)
        assert alone == made
    full, _ = generated(PROMPTS, make_strategy("full"), copies=2, num_beams=2)
    everything, _ = generated(
        PROMPTS, strategies(64)[name if name != "pool" else "quest"], copies=2, num_beams=2
    )
    assert everything == full


@every_strategy
@pytest.mark.parametrize("how", ["reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
def test_rows_keep_their_state_when_they_are_moved(name, how):
    """Read half, move the rows, read the rest: as each row's own text read from the start."""
    strategy, model = strategies()[name], llama()
    first, rest = [draw_tokens(14, seed=5), draw_tokens(14, seed=6)], draw_tokens(9, seed=7)
    if how == "batch_repeat_interleave":
        rows, move = [0, 0, 1, 1], lambda cache: cache.batch_repeat_interleave(2)
    else:
        rows = [1, 1, 0] if how == "batch_select_indices" else [1, 1]
        move = lambda cache: getattr(cache, how)(torch.tensor(rows))  # noqa: E731
    reading = RowReading(0, 0, 23)
    session = model.step(strategy, [reading] * 2, record=True)
    wide = model.step(strategy, [reading] * len(rows), record=True)
    with attention.active(session), torch.inference_mode():
        for column in range(14):
            step_forward(model, session, torch.tensor([[text[column]] for text in first]), column)
    # As generate does: a session of as many rows as there will be.
    wide.cache.layers[:] = session.cache.layers
    for layer in wide.cache.layers:
        assert layer.seen == 14
    move(wide.cache)
    logits = []
    with attention.active(wide), torch.inference_mode():
        for i, token in enumerate(rest):
            logits.append(step_forward(model, wide, torch.tensor([[token]] * len(rows)), 14 + i)[:, 0])
    logits = torch.stack(logits, 1)
    for row, source in enumerate(rows):
        expected, reads, _ = read_by_steps(model, strategy, [*first[source], *rest])
        torch.testing.assert_close(logits[row], expected[14:], atol=1e-3, rtol=0)
        for i, each in enumerate(wide.reads):
            for layer, mask in each.items():
                assert torch.equal(mask[row, :, 0], reads[layer][:, 14 + i, : mask.shape[-1]])


def test_moved_rows_drop_what_was_fetched_for_others():
    layer, _, _ = layer_with(3, rows=2)
    layer.selector = make_strategy("quest", 4).selector(LayerContext(2, 2, torch.tensor([3, 3])))
    layer.fetch_ahead(torch.ones(2, 2, 1, 3).bool())
    layer.reorder_cache(torch.tensor([1, 0]))
    assert layer.take_ahead() is None


@pytest.mark.gpu
def test_on_a_gpu_the_pool_is_pinned_and_the_counts_are_the_same():
    model = WrappedModel(build("llama", num_hidden_layers=3).cuda(), calibration=calibration)
    _, reads, parallel = read_at_once(model, INFINIGEN, TOKENS)
    session = model.step(INFINIGEN, [RowReading(0, 0, 26)], record=True)
    with attention.active(session), torch.inference_mode():
        for column, token in enumerate(TOKENS):
            step_forward(model, session, torch.tensor([[token]], device="cuda"), column)
    assert [int(moved[0]) for moved in session.moved] == parallel.moved[0].tolist()
    for layer in session.cache.layers[1:]:
        assert layer.pool_keys.is_pinned() and layer.pool_values.is_pinned()
        assert layer.selector.state["partial_keys"].is_cuda
