"""Strategies written the slow, obvious way: oracles that share no code with the engine's
scans, and helpers that hand a scan its logits.

The oracle keeps a Python list of positions and a dict of scores per KV head, walks over
the tokens one by one, and computes a Llama layer from the model's own projections.
"""

from __future__ import annotations

import functools
import random

import torch

from kvacc.verify.tiny_models import sharp_model


def draw_tokens(count: int, seed: int = 0) -> list[int]:
    """``count`` random token numbers of the tiny models' vocabulary."""
    draw = random.Random(seed)
    return [draw.randrange(3, 128) for _ in range(count)]


def calibration(source: str = "prose") -> list[int]:
    """Tokens that tiny models are calibrated on, in place of a text's."""
    return draw_tokens(100, seed=3)


@functools.cache
def sharp(family: str = "llama", dtype: torch.dtype = torch.float32, **changes):
    """A wrapped tiny model whose heads look at a few tokens each, made once per test session."""
    from families import FAMILIES

    from kvacc.engine.wrapped import WrappedModel

    model = sharp_model(family, **{**FAMILIES[family], **changes}).to(dtype)
    return WrappedModel(model, calibration=calibration)


class NaiveRecent:
    """The newest ``budget`` tokens."""

    def evict(self, kept, score, newest, budget):
        return kept[-budget:]


class NaiveStreaming:
    """The first ``sinks`` tokens and the newest."""

    def __init__(self, sinks):
        self.sinks = sinks

    def evict(self, kept, score, newest, budget):
        sinks = min(self.sinks, budget - 1)
        first = [place for place in kept if place < sinks]
        return first + [place for place in kept if place >= sinks][-(budget - sinks) :]


class NaiveH2O:
    """arXiv:2306.14048, Algorithm 1: the lowest accumulated score outside the recent window goes."""

    def __init__(self, recent_of):
        self.recent_of = recent_of  # budget -> newest tokens that stay

    def evict(self, kept, score, newest, budget):
        kept = list(kept)
        while len(kept) > budget:
            old = [place for place in kept if place <= newest - self.recent_of(budget)]
            worst = old[0] if old else kept[-1]
            for place in old:
                if score[place] <= score[worst]:  # of equal scores the later goes
                    worst = place
            kept.remove(worst)
        return kept


def softmax(values: list[float]) -> list[float]:
    return torch.tensor(values, dtype=torch.float32).softmax(-1).tolist()


def replay(logits, rule, budget_of_seen, dense=0, aggregate="mean"):
    """Walk over the tokens of one KV head.

    Args:
        logits: ``logits(g, t, kept) -> list`` of the query head g's logits at ``kept``.
        rule: one of the classes above.
        budget_of_seen: tokens seen -> entries allowed.
        dense: tokens read before anything is evicted.
        aggregate: (groups, how) through :func:`share`.

    Returns:
        (reads, after): lists of positions that query t reads, and that stay after it;
        and the attention weights [t][g] -> list over reads[t].
    """
    groups, how = aggregate
    kept: list[int] = []
    score: dict[int, float] = {}
    reads, after, weights = [], [], []
    for t in range(budget_of_seen.tokens):
        kept.append(t)
        score[t] = 0.0
        attention = [softmax(logits(g, t, kept)) for g in range(groups)]
        for i, place in enumerate(kept):
            column = [head[i] for head in attention]
            score[place] += max(column) if how == "max" else sum(column) / groups
        reads.append(list(kept))
        weights.append(attention)
        if t >= dense - 1:
            kept = rule.evict(kept, score, t, budget_of_seen(t + 1))
        after.append(list(kept))
    return reads, after, weights


class Limit:
    """Entries allowed after ``seen`` of ``tokens`` tokens, computed without kvacc.budget."""

    def __init__(self, tokens, entries):
        self.tokens = tokens
        self.entries = entries

    def __call__(self, seen):
        return self.entries(seen) if callable(self.entries) else self.entries


def llama(model, tokens, rule, entries, dense=0, cache_positions=False, how="mean"):
    """A Llama's logits with every layer and KV head under ``rule``.

    Args:
        tokens: list of token numbers.
        entries: an int, or tokens seen -> entries allowed.
        cache_positions: rotate keys to their place in the cache, and the query to the last.

    Returns:
        logits [T, vocabulary], and (reads, after): dicts (layer, head) -> list of lists.
    """
    config = model.config
    count, dim = len(tokens), config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    groups = heads // kv_heads
    all_reads, all_after = {}, {}

    def rotated(x, places):
        """x [n, D] at ``places``, by the model's own tables."""
        cos, sin = model.model.rotary_emb(x, torch.tensor([places]))
        half = x.shape[-1] // 2
        return x * cos[0] + torch.cat([-x[:, half:], x[:, :half]], -1) * sin[0]

    with torch.inference_mode():
        hidden = model.model.embed_tokens(torch.tensor(tokens))
        for number, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            normed = layer.input_layernorm(hidden)
            query = attention.q_proj(normed).view(count, heads, dim)
            key = attention.k_proj(normed).view(count, kv_heads, dim)
            value = attention.v_proj(normed).view(count, kv_heads, dim)
            out = torch.zeros(count, heads, dim)
            for head in range(kv_heads):

                def logits(g, t, kept, head=head, query=query, key=key):
                    places = list(range(len(kept))) if cache_positions else kept
                    q = rotated(query[t : t + 1, head * groups + g], [places[-1]])
                    k = rotated(key[kept, head], places)
                    return (k @ q[0] * dim**-0.5).tolist()

                reads, after, weights = replay(logits, rule, Limit(count, entries), dense, (groups, how))
                for t in range(count):
                    for g in range(groups):
                        out[t, head * groups + g] = torch.tensor(weights[t][g]) @ value[reads[t], head]
                all_reads[number, head], all_after[number, head] = reads, after
            hidden = hidden + attention.o_proj(out.flatten(1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return model.lm_head(model.model.norm(hidden)), all_reads, all_after


def as_mask(reads: list[list[int]]) -> torch.Tensor:
    """bool [T, T] from the positions that each query reads."""
    mask = torch.zeros(len(reads), len(reads), dtype=torch.bool)
    for t, places in enumerate(reads):
        mask[t, places] = True
    return mask


def one_request(tokens, dense=0, compressed=None, scored=None):
    """A request for all of ``tokens`` in which the last ``scored`` queries count (all of them)."""
    from kvacc.engine.plan import Request

    scored = len(tokens) if scored is None else scored
    return Request(tuple(tokens), (5,) * scored, dense, compressed or len(tokens))


def flat_plan(strategy, count, dense=0, compressed=None):
    """The plan of one text of ``count`` tokens."""
    from kvacc.engine.plan import build_rows, make_plan

    return make_plan(build_rows([(0, one_request(range(3, 3 + count), dense, compressed))]), strategy)


def new_scan(plan, strategy, heads, layer=0, stored=None):
    from kvacc.engine.scan import Entries, start_scan

    empty = torch.zeros(plan.tokens.shape[0], heads, 0)
    return start_scan(plan, strategy, stored or Entries(empty.long(), empty.bool(), empty), layer)


def scan_by_hand(strategy, logits, use_compiled, plan=None, aux=None, layer=0, stored=None):
    """Hand a scan its logits.

    Args:
        logits: float32 [B, H, G, T, W], or [B, H] shape-only tensor of static rules too.
        use_compiled: the numba kernel, else the PyTorch reference.

    Returns:
        visible bool [B, H, T, W], seen_by [B, H, T], and the scan afterwards.
    """
    from kvacc.engine import compiled
    from kvacc.engine.scan import scan_block

    rows, heads, _, count, width = logits.shape
    plan = plan or flat_plan(strategy, count)
    scan = new_scan(plan, strategy, heads, layer, stored)
    if not use_compiled:
        visible, seen_by = scan_block(scan, logits.clone(), 0, count, aux)
    elif strategy.compiled == "static":
        visible, seen_by = compiled.static(scan, 0, count, width)
    else:
        attention = logits.clone().contiguous()
        seen_by, _ = compiled.attention_sum(scan, attention, 0, aux)
        visible = attention.gt(0).any(2)
    return visible, seen_by, scan


def step_through(wrapped, strategy, tokens, chunks=None, dense=0, compressed=None, padding=0):
    """Read ``tokens`` on the step path in chunks of the given sizes (ones by default).

    Returns:
        logits [T, vocabulary]; after: list over chunks of {(layer, head): kept positions};
        and the session.
    """
    from kvacc.engine import attention
    from kvacc.engine.scoring import step_forward
    from kvacc.engine.stepping import KeptLayer, RowReading

    session = wrapped.step(strategy, [RowReading(padding, dense, compressed or len(tokens))])
    columns = torch.tensor([[0] * padding + list(tokens)])
    logits, after, first = [], [], 0
    sizes = iter(chunks or [1] * columns.shape[1])
    with attention.active(session), torch.inference_mode():
        while first < columns.shape[1]:
            size = min(next(sizes), columns.shape[1] - first)
            logits.append(step_forward(wrapped, session, columns[:, first : first + size], first)[0])
            first += size
            kept = {}
            for layer, cache in enumerate(session.cache.layers):
                if isinstance(cache, KeptLayer):
                    for head in range(cache.entries.alive.shape[1]):
                        alive = cache.entries.alive[0, head]
                        kept[layer, head] = sorted(cache.entries.position[0, head][alive].tolist())
            after.append(kept)
    return torch.cat(logits)[padding:], after, session
