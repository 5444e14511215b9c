"""How many tokens a batch may hold."""

from __future__ import annotations

import torch
from families import build

from kvacc.engine import memory, parallel
from kvacc.engine.memory import batch_tokens_for, bytes_per_token, free_bytes
from kvacc.engine.plan import Request
from kvacc.engine.scoring import score_documents
from kvacc.engine.wrapped import WrappedModel
from kvacc.strategy import make_strategy

GIB = 2**30


def test_bytes_of_a_token_worked_out_by_hand():
    model = build("llama")
    config = model.config
    # float32: six hidden states twice (once as such, once for attention), three inner ones.
    layer = 4 * (6 * config.hidden_size + 3 * config.intermediate_size) + 4 * 6 * config.hidden_size
    logits = config.vocab_size * (4 + 8)
    assert bytes_per_token(model) == max(layer, logits)


def test_tokens_follow_the_free_memory(monkeypatch):
    model = build("llama")
    each = bytes_per_token(model)
    for free, expected in ((1000 * each, 500), (10 * each, 256), (10**9 * each, 1024)):
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        assert batch_tokens_for(model) == expected


def test_free_memory_is_within_the_control_groups_limit(monkeypatch, tmp_path):
    limit, used = tmp_path / "max", tmp_path / "current"
    limit.write_text(f"{3 * GIB}\n")
    used.write_text(f"{GIB}\n")
    monkeypatch.setattr(memory, "_LIMIT_FILES", ((limit, used),))
    assert 0 < free_bytes(torch.device("cpu")) <= 2 * GIB
    limit.write_text("max\n")
    import psutil

    assert free_bytes(torch.device("cpu")) <= psutil.virtual_memory().total
    used.write_text(f"{9 * GIB}\n")
    limit.write_text(f"{3 * GIB}\n")
    assert free_bytes(torch.device("cpu")) == 0


def test_long_rows_are_attended_in_blocks_with_the_same_result(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    for family in ("llama", "gemma3_text", "gpt_oss"):
        wrapped = WrappedModel(build(family))
        context = tuple(torch.randint(3, 97, (40,), generator=draw).tolist())
        # Branches and padding need masks; the second document is a single path.
        documents = [
            [Request((*context, 5, 6), (5, 6, 7), 0, 40), Request((*context, 8), (8, 9), 0, 40)],
            [Request(context[:20], (4,), 0, 20)],
        ]
        strategies = [make_strategy("full"), make_strategy("h2o", 12), make_strategy("streaming_llm", 12)]
        for strategy in strategies:
            whole = score_documents(wrapped, documents, strategy)
            with monkeypatch.context() as patch:
                patch.setattr(parallel, "BLOCK_BYTES", 200)
                blocks = score_documents(wrapped, documents, strategy)
            for ours, theirs in zip(blocks, whole, strict=True):
                for one, other in zip(ours, theirs, strict=True):
                    assert abs(one.loglikelihood - other.loglikelihood) < 1e-4
                    assert one.kept_fraction == other.kept_fraction
