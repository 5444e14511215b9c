"""Rotations by hand and of every kind of model, the columns they are read by, and their cache."""

from __future__ import annotations

import threading
from fractions import Fraction

import pytest
import torch
from families import build, wrapped

from kvacc.engine import attention, skewing
from kvacc.engine.attention import AttentionCall, attention_logits, dense_attention
from kvacc.engine.layers import LayerKind
from kvacc.engine.skewing import RULES, Skewing, compute_skewing, fingerprint, skewing_for
from kvacc.engine.wrapped import WrappedModel
from kvacc.errors import KvaccError

FAMILIES = ("llama", "opt", "gpt_oss", "gemma2", "deepseek_v3", "qwen3_next")
TEXT = [3 + (7 * i + i * i // 5) % 120 for i in range(90)]
OTHER = [5 + (11 * i + i * i // 3) % 110 for i in range(40)]


class Calls:
    """A session with full attention that keeps every layer's call."""

    def __init__(self):
        self.of: dict[int, AttentionCall] = {}

    def attend(self, call):
        self.of[call.layer] = call
        return dense_attention(call, None)


def calls_of(model: WrappedModel, tokens: list[int]) -> dict[int, AttentionCall]:
    """Sliding windows are ignored here: any queries and keys serve."""
    session = Calls()
    with attention.active(session), torch.no_grad():
        model.model(input_ids=torch.tensor([tokens]), use_cache=False)
    return session.of


def per_group(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[1, Q, n, D] -> [H, G, n, D]."""
    return x[0].unflatten(0, (heads, -1))


def rotated(call: AttentionCall, rotation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Skewed query and key of a call, in its shapes."""
    query = per_group(call.query, len(rotation)) @ rotation[:, None]
    return query.flatten(0, 1)[None], call.key @ rotation


def full_layers(model: WrappedModel) -> list[int]:
    return [i for i, kind in enumerate(model.kinds) if kind.name == "full"]


def largest_error(rotation: torch.Tensor) -> float:
    product = rotation.double().mT @ rotation.double()
    return float((product - torch.eye(rotation.shape[-1])).abs().max())


def assert_logits_are_kept(model: WrappedModel, made: Skewing, tokens: list[int]) -> None:
    for layer, call in calls_of(model, tokens).items():
        if layer not in made.rotation:
            continue
        plain = attention_logits(call, call.query, call.key)
        skewed = attention_logits(call, *rotated(call, made.rotation[layer]))
        assert (skewed - plain).abs().max() <= 1e-4 * max(1.0, float(plain.abs().max())), layer


def share_in_best(weight: torch.Tensor, count: int) -> torch.Tensor:
    """Share of a layer's weight [H, D] in each head's ``count`` heaviest columns, [H]."""
    return weight.sort(-1, descending=True).values[:, :count].sum(-1) / weight.sum(-1)


# By hand


def record(query, key, scaling=1.0, skew=True) -> Skewing:
    """Skewing of one layer from one KV head's queries [Q, n, D] and keys [n, D]."""
    recorder = skewing._Recorder([LayerKind("full")], skew)
    key = torch.tensor(key, dtype=torch.float32)[None, None]
    call = AttentionCall(
        None, 0, torch.tensor(query, dtype=torch.float32)[None], key, key, scaling, None, None
    )
    recorder.attend(call)
    return recorder.skewing


def test_two_dimensions_by_hand():
    """Scaled by a half the queries are (3, 4) and (-0.4, 0.3): singular values 5 and 0.5 along
    (0.6, 0.8) and (0.8, -0.6), with the larger entry positive."""
    made = record([[[6, 8], [-0.8, 0.6]]], [[1, 0], [0, -2]], scaling=0.5)
    assert torch.allclose(made.rotation[0], torch.tensor([[[0.6, 0.8], [0.8, -0.6]]]), atol=1e-6)
    # Q A is (5, 0) and (0, -0.5); K A is (0.6, 0.8) and (-1.6, 1.2).
    assert torch.allclose(made.query_weight[0], torch.tensor([[5.0, 0.5]]), atol=1e-6)
    assert torch.allclose(made.key_weight[0], torch.tensor([[2.2, 2.0]]), atol=1e-6)
    assert made.columns(0, 0.5).tolist() == [[0]]


def test_the_query_heads_of_a_group_share_a_rotation():
    """The same two queries, one per query head."""
    together = record([[[6, 8], [-0.8, 0.6]]], [[1, 0], [0, -2]])
    grouped = record([[[6, 8], [6, 8]], [[-0.8, 0.6], [-0.8, 0.6]]], [[1, 0], [0, -2]])
    assert torch.allclose(grouped.rotation[0], together.rotation[0], atol=1e-6)
    assert torch.allclose(grouped.query_weight[0], 2 * together.query_weight[0], atol=1e-5)
    assert torch.equal(grouped.key_weight[0], together.key_weight[0])


def test_without_skewing_columns_stay_as_they_are():
    made = record([[[6, 8], [-0.8, 0.6]]], [[1, 0], [0, -2]], scaling=0.5, skew=False)
    assert torch.equal(made.rotation[0], torch.eye(2)[None])
    assert torch.allclose(made.query_weight[0], torch.tensor([[3.4, 4.3]]))
    assert made.key_weight[0].tolist() == [[1, 2]]


def test_queries_in_a_subspace_still_give_a_whole_rotation():
    made = record([[[1, 2, 2, 0], [2, 4, 4, 0]]], [[1, 0, 0, 0], [0, 1, 0, 0]])
    assert largest_error(made.rotation[0]) < 1e-6
    assert torch.allclose(made.rotation[0][0, :, 0], torch.tensor([1, 2, 2, 0]) / 3, atol=1e-6)
    assert torch.allclose(made.query_weight[0], torch.tensor([[9.0, 0, 0, 0]]), atol=1e-6)
    zero = record([[[0, 0], [0, 0]]], [[1, 0], [0, 1]])
    assert largest_error(zero.rotation[0]) < 1e-6


# Models


@pytest.mark.parametrize("family", FAMILIES)
def test_rotations_are_orthogonal_and_keep_the_logits(family):
    model = wrapped(family)
    made = compute_skewing(model, TEXT)
    calls = calls_of(model, TEXT)
    assert list(made.rotation) == list(made.query_weight) == list(made.key_weight) == full_layers(model)
    for layer, rotation in made.rotation.items():
        heads, dimension = calls[layer].key.shape[1], calls[layer].key.shape[3]
        assert rotation.shape == (heads, dimension, dimension) and rotation.dtype == torch.float32
        assert made.query_weight[layer].shape == made.key_weight[layer].shape == (heads, dimension)
        assert largest_error(rotation) < 1e-5
        assert not torch.allclose(rotation, torch.eye(dimension).expand_as(rotation), atol=0.1)
        peak = rotation.abs().argmax(-2, keepdim=True)
        assert (rotation.gather(-2, peak) > 0).all()
    assert_logits_are_kept(model, made, TEXT)
    assert_logits_are_kept(model, made, OTHER)


@pytest.mark.parametrize("family", ["llama", "opt", "deepseek_v3"])  # no sliding layers, no sink logits
def test_against_a_singular_value_decomposition(family):
    model = wrapped(family)
    made = compute_skewing(model, TEXT)
    for layer, call in calls_of(model, TEXT).items():
        rotation = made.rotation[layer]
        query = per_group(call.query, len(rotation)).flatten(1, 2).double() * call.scaling
        values = torch.linalg.svd(query, full_matrices=False).S
        turned = query @ rotation.double()
        # Columns are as long as the singular values say, the longest first, at right angles.
        assert torch.allclose(turned.norm(dim=1), values, rtol=1e-4, atol=1e-5 * float(values.max()))
        assert torch.allclose(
            turned.mT @ turned, torch.diag_embed(values**2), atol=1e-5 * float(values.max()) ** 2
        )
        assert torch.allclose(made.query_weight[layer], turned.abs().sum(1).float(), rtol=1e-4, atol=1e-4)
        key = (call.key[0] @ rotation).abs().sum(1)
        assert torch.allclose(made.key_weight[layer], key, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_few_columns_carry_most_of_the_queries(family):
    model = wrapped(family)
    skewed, plain = compute_skewing(model, TEXT), compute_skewing(model, TEXT, skew=False)
    for layer in skewed.rotation:
        count = skewing._column_count(0.3, skewed.query_weight[layer].shape[-1])
        best, unskewed = (share_in_best(x.query_weight[layer], count) for x in (skewed, plain))
        assert best.mean() > unskewed.mean() + 0.02, layer
        # Squared, the theorem holds for every head: no other basis has more in so few columns.
        call = calls_of(model, TEXT)[layer]
        energies = [
            per_group(call.query, len(x.rotation[layer])).flatten(1, 2) @ x.rotation[layer]
            for x in (skewed, plain)
        ]
        most, other = (share_in_best(x.square().sum(1), count) for x in energies)
        assert (most >= other - 1e-4).all(), layer


def test_two_tokens_are_enough_and_one_is_not():
    model = wrapped("llama")  # 2 tokens of 2 query heads: 4 queries in 8 dimensions
    made = compute_skewing(model, [5, 9])
    assert max(largest_error(x) for x in made.rotation.values()) < 1e-5
    assert_logits_are_kept(model, made, TEXT)
    for tokens in ([], [5]):
        refusal = rf"^calibration text has {len(tokens)} tokens, .*; give a longer text$"
        with pytest.raises(KvaccError, match=refusal):
            compute_skewing(model, tokens)
        with pytest.raises(KvaccError, match=refusal):
            skewing_for(model, tokens, "digest")


def test_only_what_fits_the_models_context_is_read(tmp_path):
    model = wrapped("opt")  # learned positions: more than 128 tokens would fail
    long = (TEXT + OTHER + TEXT)[:200]
    assert model.config.max_position_embeddings == 128
    made, first = compute_skewing(model, long), compute_skewing(model, long[:128])
    assert all(torch.equal(made.rotation[layer], first.rotation[layer]) for layer in first.rotation)
    skewing_for(model, long, "digest", tmp_path)
    skewing_for(model, long[:128], "digest", tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_model_whose_every_layer_slides():
    """Mistral 7B v0.1: strategies act in its layers while a text is shorter than the window."""
    model = WrappedModel(build("mistral", sliding_window=16))
    assert {kind.name for kind in model.kinds} == {"sliding"}
    made = compute_skewing(model, TEXT)
    assert list(made.rotation) == [0, 1]
    # What layer 1 reads depends on what layer 0 could see.
    unlimited = WrappedModel(build("mistral", sliding_window=200))
    assert not torch.allclose(
        compute_skewing(unlimited, TEXT).query_weight[1], made.query_weight[1], rtol=1e-3
    )
    assert torch.allclose(compute_skewing(unlimited, TEXT).query_weight[0], made.query_weight[0], rtol=1e-3)


def test_sliding_layers_read_their_window_only():
    """Layer 1 of this model is a full layer above a sliding one: its queries are the model's own."""
    model = wrapped("gpt_oss")
    seen = {}
    hook = model.model.model.layers[1].self_attn.q_proj.register_forward_hook(
        lambda module, inputs, output: seen.setdefault(len(seen), output)
    )
    try:
        compute_skewing(model, TEXT)
        model.model.set_attn_implementation("eager")
        with torch.no_grad():
            model.model(input_ids=torch.tensor([TEXT]), use_cache=False)
    finally:
        hook.remove()
        model.model.set_attn_implementation(attention.NAME)
    assert torch.allclose(seen[0], seen[1], atol=1e-3 * float(seen[1].abs().max()))


def test_the_model_is_left_as_it_was():
    model = wrapped("llama")

    def logits():
        with attention.active(Calls()), torch.no_grad():
            return model.model(input_ids=torch.tensor([OTHER]), use_cache=False).logits

    hooks = [len(module._forward_pre_hooks) for module in model.model.modules()]
    before = logits()
    made = compute_skewing(model, TEXT)
    assert [len(module._forward_pre_hooks) for module in model.model.modules()] == hooks
    assert torch.equal(logits(), before) and before.shape[1] == len(OTHER)
    assert not any(x.is_inference() or x.requires_grad for x in made.rotation.values())


def test_the_same_every_time():
    first, second = (compute_skewing(wrapped("gemma2"), TEXT) for _ in range(2))
    for part in ("rotation", "query_weight", "key_weight"):
        for layer, x in getattr(first, part).items():
            assert torch.equal(x, getattr(second, part)[layer])


def test_values_that_are_not_finite():
    model = WrappedModel(build("llama"))
    with torch.no_grad():
        model.model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("inf")
    with pytest.raises(
        KvaccError, match=r"^layer 1 computes queries or keys that are not finite .* another dtype .*\)$"
    ):
        compute_skewing(model, TEXT)
    assert not any(module._forward_pre_hooks for module in model.model.modules())


# Columns


def weights(query: list[list[float]], key: list[list[float]]) -> Skewing:
    query, key = torch.tensor(query), torch.tensor(key)
    return Skewing({3: torch.eye(query.shape[1]).expand(len(query), -1, -1)}, {3: query}, {3: key})


QUERY = [[9.0, 5, 1, 0, 4], [1.0, 1, 2, 0, 3]]
KEY = [[0.0, 1, 8, 7, 3], [0.0, 0, 9, 0, 9]]
"""Sums, queries times the square root of 5: 20.1, 12.2, 10.2, 7, 11.9 and 2.2, 2.2, 13.5, 0, 15.7."""


@pytest.mark.parametrize(
    "rule, ratio, expected",
    [
        ("paper", 0.2, [[0], [4]]),
        ("paper", 0.4, [[0, 1], [2, 4]]),
        ("paper", 0.6, [[0, 1, 4], [0, 2, 4]]),  # of the equal sums 2.2 and 2.2 the lower column
        ("query", 0.2, [[0], [4]]),
        ("query", 0.4, [[0, 1], [2, 4]]),
        ("query", 0.8, [[0, 1, 2, 4], [0, 1, 2, 4]]),
        # Queries 0, 1 and keys 2, 3; queries 4, 2 and keys 2, 4, filled up with the sums 2.2 and 2.2.
        ("union", 0.4, [[0, 1, 2, 3], [0, 1, 2, 4]]),
        # Queries 0 and keys 2; queries 4 and keys 2 (of equal keys the lower).
        ("union", 0.2, [[0, 2], [2, 4]]),
        ("paper", 1, [[0, 1, 2, 3, 4]] * 2),
        ("union", 1.0, [[0, 1, 2, 3, 4]] * 2),
    ],
)
def test_columns_by_hand(rule, ratio, expected):
    found = weights(QUERY, KEY).columns(3, ratio, rule)
    assert found.dtype == torch.long and found.tolist() == expected


@pytest.mark.parametrize(
    "ratio, dimension, count",
    [
        (0.3, 64, 20), (0.3, 10, 3), (0.3, 128, 39), (0.1, 8, 1), (0.001, 8, 1), (1.0, 64, 64), (1, 64, 64),
        (0.7, 10, 7), (0.29, 100, 29), (Fraction(1, 3), 9, 3), (0.5, 64, 32), (0.9, 1000, 900),
    ],
)  # fmt: skip
def test_the_number_of_columns_is_exact(ratio, dimension, count):
    """0.29 * 100 is 28.999999999999996 and 0.7 * 10 is 7.000000000000001 in floating point."""
    assert skewing._column_count(ratio, dimension) == count


@pytest.mark.parametrize("rule", RULES)
def test_columns_of_a_model(rule):
    made = compute_skewing(wrapped("llama"), TEXT)
    for ratio in (0.1, 0.3, 0.6, 1.0):
        found = made.columns(0, ratio, rule)
        count = skewing._column_count(ratio, 8)
        assert count <= found.shape[1] <= (min(8, 2 * count) if rule == "union" else count)
        assert found.shape[0] == 2
        assert (found.diff() > 0).all() and found.min() >= 0 and found.max() < 8


@pytest.mark.parametrize("ratio", [0, -0.1, 1.01, 30])
def test_ratio_out_of_range(ratio):
    with pytest.raises(
        KvaccError, match=rf"^partial ratio {ratio} is not in \(0, 1\]; give the share .*0.3$"
    ):
        weights(QUERY, KEY).columns(3, ratio)


def test_unknown_rule():
    with pytest.raises(
        KvaccError, match=r"unknown column rule 'papr' \(did you mean 'paper'\?\); known: paper, query, union"
    ):
        weights(QUERY, KEY).columns(3, 0.3, "papr")


# The cache


class Forwards:
    """Counts a model's forward passes."""

    def __init__(self, model: WrappedModel):
        self.count = 0
        model.model.register_forward_pre_hook(self._one_more)

    def _one_more(self, *_):
        self.count += 1


@pytest.fixture
def counted():
    model = WrappedModel(build("llama"))
    return model, Forwards(model)


def assert_same(a: Skewing, b: Skewing) -> None:
    for part in ("rotation", "query_weight", "key_weight"):
        first, second = getattr(a, part), getattr(b, part)
        assert sorted(first) == sorted(second)
        for layer, x in first.items():
            assert x.dtype == second[layer].dtype and torch.equal(x, second[layer])


def test_computed_once(counted, tmp_path):
    model, forwards = counted
    first = skewing_for(model, TEXT, "digest", tmp_path / "new")
    assert forwards.count == 1
    assert_same(first, skewing_for(model, TEXT, "digest", tmp_path / "new"))
    # The same model loaded again, as by another process.
    again = WrappedModel(build("llama"))
    others = Forwards(again)
    assert_same(first, skewing_for(again, tuple(TEXT), "digest", tmp_path / "new"))
    assert forwards.count == 1 and others.count == 0
    assert_same(first, compute_skewing(model, TEXT))
    assert [file.suffix for file in (tmp_path / "new").iterdir()] == [".safetensors"]


def test_it_lies_in_the_cache_folder(counted, tmp_path, monkeypatch):
    monkeypatch.setenv("KVACC_CACHE_DIR", str(tmp_path))
    skewing_for(counted[0], TEXT, "digest")
    assert len(list((tmp_path / "skewing").glob("*.safetensors"))) == 1


def test_other_text_tokens_option_or_version(counted, tmp_path, monkeypatch):
    model, forwards = counted
    skewing_for(model, TEXT, "digest", tmp_path)
    skewing_for(model, TEXT, "another digest", tmp_path)
    skewing_for(model, TEXT[:-1], "digest", tmp_path)
    plain = skewing_for(model, TEXT, "digest", tmp_path, skew=False)
    assert forwards.count == 4
    assert torch.equal(plain.rotation[0], torch.eye(8).expand(2, -1, -1))
    assert_same(plain, skewing_for(model, TEXT, "digest", tmp_path, skew=False))
    assert forwards.count == 4
    monkeypatch.setattr(skewing, "FORMAT_VERSION", skewing.FORMAT_VERSION + 1)
    skewing_for(model, TEXT, "digest", tmp_path)
    assert forwards.count == 5


@pytest.mark.parametrize("place", [(0, 0), (13, 21), (31, 31)])
def test_one_changed_weight(counted, tmp_path, place):
    """Any one, and by the smallest step, not only those values that are compared one by one."""
    model, forwards = counted
    before = skewing_for(model, TEXT, "digest", tmp_path)
    weight = model.model.model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        old = weight[place].clone()
        weight[place] = torch.nextafter(old, torch.tensor(10.0))
        skewing_for(model, TEXT, "digest", tmp_path)
        assert forwards.count == 2
        weight[place] = old
    assert_same(before, skewing_for(model, TEXT, "digest", tmp_path))
    assert forwards.count == 2


def test_fingerprints():
    model = build("llama")
    known = fingerprint(model)
    assert known == fingerprint(build("llama"))
    assert known != fingerprint(build("llama", rms_norm_eps=1e-3))  # the same weights, another model
    assert known != fingerprint(build("llama").bfloat16())
    assert known != fingerprint(build("opt"))
    # Where a model lies and how its attention is called is not what it is.
    model.config._name_or_path = "/elsewhere"
    model.set_attn_implementation("sdpa")
    assert known == fingerprint(model)
    assert fingerprint(model.to("meta")) is None


def test_weights_that_lie_on_no_device_are_not_cached(counted, tmp_path, monkeypatch):
    model, forwards = counted
    monkeypatch.setattr(skewing, "fingerprint", lambda _: None)
    first = skewing_for(model, TEXT, "digest", tmp_path)
    assert_same(first, skewing_for(model, TEXT, "digest", tmp_path))
    assert forwards.count == 2 and not list(tmp_path.iterdir())


def truncate(content: bytes) -> bytes:
    return content[:-10]


def flip_a_bit(content: bytes) -> bytes:
    return content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]


DAMAGES = {
    "truncated": truncate,
    "one bit flipped": flip_a_bit,
    "header cut": lambda content: content[:50],
    "empty": lambda content: b"",
    "not safetensors": lambda content: b"hello" * 100,
    "longer": lambda content: content + b"more",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_again(counted, tmp_path, damage):
    model, forwards = counted
    first = skewing_for(model, TEXT, "digest", tmp_path)
    [file] = tmp_path.iterdir()
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    for _ in range(2):  # made again, and kept again
        assert_same(first, skewing_for(model, TEXT, "digest", tmp_path))
        assert forwards.count == 2


def test_a_file_of_something_else_is_not_trusted(counted, tmp_path):
    from safetensors.torch import save_file

    model, forwards = counted
    first = skewing_for(model, TEXT, "digest", tmp_path)
    [file] = tmp_path.iterdir()
    skewing_for(model, OTHER, "digest", tmp_path)
    [other] = set(tmp_path.iterdir()) - {file}
    file.write_bytes(other.read_bytes())
    assert_same(first, skewing_for(model, TEXT, "digest", tmp_path))
    for strange in (
        {"weight": torch.ones(2)},
        {"rotation.first": torch.ones(2)},
        {"columns.0": torch.ones(2)},
    ):
        save_file(strange, file)
        assert_same(first, skewing_for(model, TEXT, "digest", tmp_path))
    file.unlink()
    file.mkdir()  # nothing can be read or written there
    assert_same(first, skewing_for(model, TEXT, "digest", tmp_path))
    assert forwards.count == 7


def test_a_folder_that_cannot_be_written_is_no_error(counted, tmp_path, capsys):
    model, forwards = counted
    blocked = tmp_path / "file"
    blocked.write_text("")
    for _ in range(2):
        made = skewing_for(model, TEXT, "digest", blocked / "skewing")
    assert forwards.count == 2 and sorted(made.rotation) == [0, 1]
    message = capsys.readouterr().err.splitlines()
    assert len(message) == 2 and message[0].startswith("kvacc: cannot keep the skewing in ")
    assert message[0].endswith("set KVACC_CACHE_DIR to a folder that you may write")


def test_writers_at_the_same_time(tmp_path):
    """Readers see a whole file or none, and no temporary file stays."""
    made = compute_skewing(wrapped("llama"), TEXT)
    path = tmp_path / "one.safetensors"
    done, wrong = threading.Event(), []

    def read():
        while not done.is_set():
            if path.exists() and skewing._read(path, "key") is None:
                wrong.append("a file that was not whole")

    def write():
        for _ in range(20):
            skewing._write(path, "key", made)

    writers = [threading.Thread(target=write) for _ in range(4)]
    reader = threading.Thread(target=read)
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert not wrong and list(tmp_path.iterdir()) == [path]
    assert_same(skewing._read(path, "key"), made)


# The embedded model


@pytest.mark.slow
def test_smollm2(smollm2_folder, tmp_path):
    from kvacc.calibration import calibration_digest, calibration_text
    from kvacc.models import load_model, load_tokenizer

    model = WrappedModel(load_model("smollm2-135m", device="cpu"))
    tokens = load_tokenizer("smollm2-135m")(calibration_text())["input_ids"]
    skewed = skewing_for(model, tokens, calibration_digest(), tmp_path)
    assert_same(skewed, skewing_for(model, tokens, calibration_digest(), tmp_path))
    assert list(skewed.rotation) == list(range(30))
    assert max(largest_error(x) for x in skewed.rotation.values()) < 1e-5
    assert_logits_are_kept(model, skewed, tokens[:300])

    # At 0.3 of 64 columns: sum |Q| gains little here (0.548 -> 0.556), its squares more.
    plain = compute_skewing(model, tokens, skew=False)
    shares = {
        name: torch.stack([share_in_best(x.query_weight[layer], 20).mean() for layer in range(30)])
        for name, x in (("skewed", skewed), ("plain", plain))
    }
    assert shares["skewed"].mean() > shares["plain"].mean() + 0.004
    assert (shares["skewed"] > shares["plain"]).sum() >= 18
    calls = calls_of(model, tokens)
    energy = {
        name: torch.stack(
            [
                share_in_best(
                    (per_group(call.query, 3).flatten(1, 2) @ x.rotation[layer]).square().sum(1), 20
                )
                for layer, call in calls.items()
            ]
        )
        for name, x in (("skewed", skewed), ("plain", plain))
    }
    assert (energy["skewed"] >= energy["plain"]).all()
    assert energy["skewed"].mean() > energy["plain"].mean() + 0.03
