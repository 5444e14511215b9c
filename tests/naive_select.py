"""What InfiniGen, Quest and InfLLM must read, written the slow, obvious way: oracles that share
no code with the engine or the strategies.

A decoder is computed from the model's own projections, layer by layer; for each query a rule
walks over Python lists of positions. H KV heads, G query heads per KV head, T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch


class Llama:
    """Grouped queries, rotary positions."""

    def __init__(self, model):
        config = model.config
        self.model, self.dim = model, config.head_dim
        self.query_heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.blocks = model.model.layers

    def embed(self, tokens):
        return self.model.model.embed_tokens(torch.tensor(tokens))

    def attention_input(self, layer, hidden):
        return self.blocks[layer].input_layernorm(hidden)

    def project(self, layer, x):
        """Query, key and value [T, heads, D] before their rotation."""
        attention = self.blocks[layer].self_attn
        return (
            attention.q_proj(x).view(len(x), self.query_heads, self.dim),
            attention.k_proj(x).view(len(x), self.kv_heads, self.dim),
            attention.v_proj(x).view(len(x), self.kv_heads, self.dim),
        )

    def turn(self, x, places):
        """x [n, heads, D] at ``places``, by the model's own tables."""
        cos, sin = (y[0, :, None] for y in self.model.model.rotary_emb(x, torch.tensor([places])))
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def finish(self, layer, hidden, out):
        block = self.blocks[layer]
        hidden = hidden + block.self_attn.o_proj(out.flatten(1))
        return hidden + block.mlp(block.post_attention_layernorm(hidden))

    def logits(self, hidden):
        return self.model.lm_head(self.model.model.norm(hidden))


class Opt:
    """One KV head per query head, learned positions."""

    def __init__(self, model):
        config = model.config
        self.model, self.dim = model, config.hidden_size // config.num_attention_heads
        self.query_heads = self.kv_heads = config.num_attention_heads
        self.decoder = model.model.decoder
        self.blocks = self.decoder.layers

    def embed(self, tokens):
        places = self.decoder.embed_positions.weight[2 : 2 + len(tokens)]
        return self.decoder.embed_tokens(torch.tensor(tokens)) + places

    def attention_input(self, layer, hidden):
        return self.blocks[layer].self_attn_layer_norm(hidden)

    def project(self, layer, x):
        attention = self.blocks[layer].self_attn
        three = (attention.q_proj, attention.k_proj, attention.v_proj)
        return tuple(linear(x).view(len(x), self.query_heads, self.dim) for linear in three)

    def turn(self, x, places):
        return x

    def finish(self, layer, hidden, out):
        block = self.blocks[layer]
        hidden = hidden + block.self_attn.out_proj(out.flatten(1))
        return hidden + block.fc2(torch.relu(block.fc1(block.final_layer_norm(hidden))))

    def logits(self, hidden):
        return self.model.lm_head(self.decoder.final_layer_norm(hidden))


DECODERS = {"llama": Llama, "opt": Opt}


@dataclass
class Layer:
    """What a rule may look at: of the whole text, but a rule asks for tokens up to its query.

    Attributes:
        query, key: [T, heads, D] as the model rotates them.
        guess: queries made of the attention input of the layer before, None in the first layer.
        moved_query, moved_key: (place) -> all queries or keys as if they stood there.
    """

    number: int
    scaling: float
    query: torch.Tensor
    key: torch.Tensor
    guess: torch.Tensor | None
    moved_query: object
    moved_key: object

    @property
    def group(self):
        return self.query.shape[1] // self.key.shape[1]

    def product(self, g, t, head, j):
        """q . k of query head g (within its KV head) at t with the key j, not scaled."""
        return float(self.query[t, head * self.group + g] @ self.key[j, head])


def select(decoder, tokens, rule, dense_layers=0, dense=0):
    """The decoder's logits when every layer from ``dense_layers`` on reads by ``rule``.

    Args:
        rule: (Layer) -> reads[head][t], lists of positions; and with ``rule.distance`` also
            far[head][t], the positions among them that are read at that distance.
        dense: tokens that read everything.

    Returns:
        logits [T, vocabulary]; reads: layer -> bool [H, T, T].
    """
    count, reads = len(tokens), {}
    places = list(range(count))
    with torch.inference_mode():
        hidden, before = decoder.embed(tokens), None
        for number in range(len(decoder.blocks)):
            x = decoder.attention_input(number, hidden)
            plain_query, plain_key, value = decoder.project(number, x)
            guess = None if before is None else decoder.turn(decoder.project(number, before)[0], places)
            here = Layer(
                number, decoder.dim**-0.5,
                decoder.turn(plain_query, places), decoder.turn(plain_key, places), guess,
                lambda place, q=plain_query: decoder.turn(q, [place] * count),
                lambda place, k=plain_key: decoder.turn(k, [place] * count),
            )  # fmt: skip
            everything = [[list(range(t + 1)) for t in places] for _ in range(decoder.kv_heads)]
            near, far = everything, [[[] for _ in places] for _ in range(decoder.kv_heads)]
            if number >= dense_layers:
                near = rule(here)
                near, far = near if isinstance(near, tuple) else (near, far)
                near = [
                    [everything[h][t] if t < dense else near[h][t] for t in places]
                    for h in range(decoder.kv_heads)
                ]
                far = [[[] if t < dense else far[h][t] for t in places] for h in range(decoder.kv_heads)]
                reads[number] = torch.zeros(decoder.kv_heads, count, count, dtype=torch.bool)
            out = torch.zeros(count, decoder.query_heads, decoder.dim)
            distant = getattr(rule, "distance", None)
            if distant is not None:
                far_query, far_key = here.moved_query(distant), here.moved_key(0)
            for head in range(decoder.kv_heads):
                for t in places:
                    chosen = near[head][t]
                    if number >= dense_layers:
                        reads[number][head, t, chosen] = True
                    for g in range(here.group):
                        at = head * here.group + g
                        logits = here.key[chosen, head] @ here.query[t, at]
                        for i, j in enumerate(chosen):
                            if j in far[head][t]:
                                logits[i] = far_key[j, head] @ far_query[t, at]
                        out[t, at] = (logits * here.scaling).softmax(-1) @ value[chosen, head]
            hidden, before = decoder.finish(number, hidden, out), x
        return decoder.logits(hidden), reads


def by_rank(score, count):
    """The ``count`` best of a dict position -> score; of equal ones the lower position."""
    return sorted(sorted(score, key=lambda j: (-score[j], j))[: max(0, count)])


def wanted_most(logits):
    """One score per candidate from the logits of several query heads, a list of dicts: how far
    it is below the highest of the head that wants it most."""
    best = [max(of_head.values()) for of_head in logits]
    return {j: max(of_head[j] - top for of_head, top in zip(logits, best, strict=True)) for j in logits[0]}


def allowed(entries, t):
    return entries(t + 1) if callable(entries) else entries


@dataclass
class NaiveTop:
    """The highest true logits, no more than ``entries`` with the query's own."""

    entries: object
    always: bool = True

    def __call__(self, layer):
        heads = layer.key.shape[1]
        reads = [[] for _ in range(heads)]
        for head in range(heads):
            for t in range(len(layer.query)):
                budget = allowed(self.entries, t)
                candidates = range(t if self.always else t + 1)
                score = wanted_most(
                    [{j: layer.product(g, t, head, j) * layer.scaling for j in candidates} for g in range(layer.group)]
                ) if candidates else {}  # fmt: skip
                chosen = by_rank(score, budget - self.always) + [t] * self.always
                reads[head].append(list(range(t + 1)) if t < budget else chosen)
        return reads


def queries_and_keys(decoder, tokens):
    """layer -> rotated queries and keys [T, heads, D] under full attention."""
    seen = {}

    def everything(layer):
        seen[layer.number] = (layer.query.clone(), layer.key.clone())
        return [[list(range(t + 1)) for t in range(len(tokens))] for _ in range(layer.key.shape[1])]

    select(decoder, tokens, everything)
    return seen


def skewed_columns(decoder, tokens, ratio):
    """layer -> for each KV head a matrix [D, columns]: right singular vectors of its queries over
    ``tokens``, those with the largest sums of absolute queries and keys."""
    bases = {}
    for number, (query, key) in queries_and_keys(decoder, tokens).items():
        group = query.shape[1] // key.shape[1]
        bases[number] = []
        for head in range(key.shape[1]):
            q = torch.cat([query[:, head * group + g] for g in range(group)]).double()
            rotation = torch.linalg.svd(q).Vh.T
            size = (q @ rotation).abs().sum(0) + (key[:, head].double() @ rotation).abs().sum(0)
            best = size.argsort(descending=True)[: math.ceil(ratio * decoder.dim)]
            bases[number].append(rotation[:, best].float())
    return bases


@dataclass
class NaivePool:
    """The entries of one KV head that host memory holds."""

    capacity: int
    policy: str
    held: list = field(default_factory=list)
    worth: dict = field(default_factory=dict)
    victims: list = field(default_factory=list)

    def fetch(self, chosen, t):
        for j in chosen:
            if self.policy == "lru":
                self.worth[j] = t  # used at t, before t itself arrives
            elif self.policy == "counter":
                self.worth[j] += 1

    def store(self, t, evicts=True):
        while evicts and len(self.held) >= self.capacity:
            self.overwrite()
        self.held.append(t)
        self.worth[t] = t + 0.5 if self.policy == "lru" else 0

    def shrink(self):
        while len(self.held) > self.capacity:
            self.overwrite()

    def overwrite(self):
        victim = min(self.held, key=lambda j: (self.worth[j], j))
        self.held.remove(victim)
        self.victims.append(victim)


@dataclass
class NaiveInfiniGen:
    """arXiv:2406.19707, section 4. ``bases`` as :func:`skewed_columns` makes them."""

    entries: object
    bases: dict
    alpha: float
    counts: str = "mean"
    always: bool = True
    current: bool = False
    pool: tuple | None = None
    dense: int = 0
    pools: dict = field(default_factory=dict)

    def __call__(self, layer):
        heads, count = layer.key.shape[1], len(layer.query)
        guess = layer.query if self.current or layer.guess is None else layer.guess
        reads = [[] for _ in range(heads)]
        pools = [NaivePool(*self.pool) for _ in range(heads)] if self.pool else None
        self.pools[layer.number] = pools
        for t in range(count):
            budget = allowed(self.entries, t)
            scores, needed = [], []
            for head in range(heads):
                basis = self.bases[layer.number][head]
                before = pools[head].held if self.pool else list(range(t))
                candidates = before if self.always else [*before, t]
                logits = [
                    {
                        j: float((guess[t, head * layer.group + g] @ basis) @ (layer.key[j, head] @ basis))
                        * layer.scaling
                        for j in candidates
                    }
                    for g in range(layer.group)
                ]
                scores.append(wanted_most(logits) if candidates else {})
                needed.append(sum(score >= -self.alpha for score in scores[-1].values()))
            for head in range(heads):
                number = sum(needed) // heads if self.counts == "mean" else needed[head]
                number = min(number, budget - 1 if self.always else budget)
                chosen = by_rank(scores[head], number) + [t] * self.always
                if t < budget:
                    chosen = sorted({*scores[head], *([t] if self.always else [])})
                reads[head].append(sorted(chosen))
                if self.pool:
                    acts = t >= self.dense
                    if acts:
                        pools[head].fetch([j for j in chosen if j != t], t)
                    pools[head].store(t, acts)
                    if t == self.dense - 1:
                        pools[head].shrink()
        return reads


@dataclass
class NaiveQuest:
    """arXiv:2406.10774, Algorithm 1."""

    entries: object
    page: int
    min_pages: int = 0

    def __call__(self, layer):
        heads = layer.key.shape[1]
        reads = [[] for _ in range(heads)]
        for head in range(heads):
            for t in range(len(layer.query)):
                budget = allowed(self.entries, t)
                pages = max(self.min_pages, budget // self.page)
                starts = range(0, t + 1, self.page)
                logits = []
                for g in range(layer.group):
                    q, bound = layer.query[t, head * layer.group + g], {}
                    for start in starts:
                        keys = layer.key[start : min(start + self.page, t + 1), head]  # so far
                        bound[start] = sum(
                            max(float(q[c] * keys[:, c].min()), float(q[c] * keys[:, c].max()))
                            for c in range(len(q))
                        )
                    logits.append(bound)
                best = by_rank(wanted_most(logits), pages)
                chosen = [j for start in best for j in range(start, min(start + self.page, t + 1))]
                if pages == 0:
                    chosen = list(range(max(0, t + 1 - budget), t + 1))
                reads[head].append(list(range(t + 1)) if t < budget else chosen)
        return reads


@dataclass
class NaiveInfLLM:
    """arXiv:2402.04617, section 3. ``fixed``: sinks and blocks at the window's far end."""

    entries: int
    init: int
    local: int
    block: int
    blocks: int
    representatives: int
    fixed: bool = True

    @property
    def distance(self):
        return self.local if self.fixed else None

    def __call__(self, layer):
        heads, count = layer.key.shape[1], len(layer.query)
        moved_query = layer.moved_query(self.local) if self.fixed else layer.query
        moved_key = layer.moved_key(0) if self.fixed else layer.key
        reads, far = [], []
        for t in range(count):
            relevance = {}
            start = self.init
            while start + self.block - 1 + self.local <= t:  # its last token has left the window
                total = 0.0
                for head in range(heads):
                    received = {
                        j: sum(
                            layer.product(g, later, head, j)
                            for later in range(j + 1, j + self.local + 1)
                            for g in range(layer.group)
                        )
                        for j in range(start, start + self.block)
                    }
                    for j in by_rank(received, self.representatives):
                        for g in range(layer.group):
                            total += float(moved_query[t, head * layer.group + g] @ moved_key[j, head])
                relevance[start] = total
                start += self.block
            best = by_rank(relevance, self.blocks)
            near = [j for j in range(t + 1) if t - j < self.local]
            distant = {
                *range(min(self.init, t + 1)),
                *(j for start in best for j in range(start, start + self.block)),
            }
            distant -= set(near)
            if t < self.entries:
                near, distant = list(range(t + 1)), set()
            reads.append(sorted({*near, *distant}))
            far.append(distant if self.fixed else set())
        return [reads] * heads, [far] * heads


def read_by_steps(wrapped, strategy, tokens, chunks=None, dense=0, compressed=None, padding=0):
    """Read ``tokens`` on the step path, one at a time or in chunks of the given sizes.

    Returns:
        logits [T, vocabulary]; layer -> bool [H, T, T], what was read; and the session.
    """
    from kvacc.engine import attention
    from kvacc.engine.scoring import step_forward
    from kvacc.engine.stepping import RowReading

    session = wrapped.step(strategy, [RowReading(padding, dense, compressed or len(tokens))], record=True)
    columns = torch.tensor([[0] * padding + list(tokens)])
    sizes = list(chunks or [1] * columns.shape[1])
    assert sum(sizes) == columns.shape[1]
    logits, first = [], 0
    with attention.active(session), torch.inference_mode():
        for size in sizes:
            logits.append(step_forward(wrapped, session, columns[:, first : first + size], first)[0])
            first += size
    reads = {}
    for layer in session.reads[0]:
        parts = [
            torch.nn.functional.pad(each[layer][0], (0, first - each[layer].shape[-1]))
            for each in session.reads
        ]
        reads[layer] = torch.cat(parts, 1)[:, padding:, padding:]
    return torch.cat(logits)[padding:], reads, session


def read_at_once(wrapped, strategy, tokens, dense=0, compressed=None):
    """The same on the parallel path; reads of the layers that select."""
    from naive import one_request

    from kvacc.engine.plan import build_rows, make_plan

    plan = make_plan(build_rows([(0, one_request(tokens, dense, compressed))]), strategy)
    logits, session = wrapped.parallel(plan, strategy, record=True)
    return logits, {layer: mask[0] for layer, mask in session.decisions.items()}, session


def assert_both_paths(wrapped, strategy, tokens, expected, dense=0, compressed=None):
    """Logits and reads of both paths are those ``expected`` of :func:`select`."""
    logits, reads = expected
    for how, read in (("parallel", read_at_once), ("step", read_by_steps)):
        found, chosen, _ = read(wrapped, strategy, tokens, dense=dense, compressed=compressed)
        for layer, mask in reads.items():
            differ = (chosen[layer].expand_as(mask) != mask).nonzero()
            assert len(differ) == 0, (how, "layer", layer, "head, query, entry", differ[:3].tolist())
        torch.testing.assert_close(found, logits, atol=1e-3, rtol=0)
