"""The models that a strategy is checked on, and the model's own attention as an oracle."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from kvacc.engine import attention
from kvacc.engine.wrapped import WrappedModel
from kvacc.errors import KvaccError
from kvacc.strategy import Strategy
from kvacc.verify.tiny_models import FAMILIES, LONGEST, flat_model, sharp_model

_ORACLE = "kvacc_oracle"
_CALIBRATION_TOKENS = 96


@dataclass(frozen=True)
class Subject:
    """A model under kvacc's attention.

    Attributes:
        label: how results name it.
        is_tiny: made here; many cases cost nothing.
    """

    label: str
    wrapped: WrappedModel
    is_tiny: bool

    @functools.cached_property
    def _stored(self) -> tuple[int, int]:
        return _stored_by_transformers(self.wrapped)

    @property
    def stored_heads(self) -> int:
        """Heads of the keys that the model hands to a cache of transformers' own."""
        return self._stored[0]

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry of one kept set: its key and value."""
        return self._stored[1] // self.deciding_heads

    @property
    def deciding_heads(self) -> int:
        """Kept sets per layer: one per KV head, or one where all heads share a latent."""
        return 1 if self.wrapped.latent else self.stored_heads

    def draw_tokens(self, count: int, seed: int) -> tuple[int, ...]:
        """Random token numbers, the same for a seed; texts of one seed begin alike."""
        draw = random.Random(seed)
        return tuple(draw.randrange(3, self.wrapped.config.vocab_size) for _ in range(count))

    def half_precision(self) -> Subject:
        """The same model in bfloat16."""
        model = copy.deepcopy(self.wrapped.model).to(torch.bfloat16)
        wrapped = WrappedModel(model, calibration=self.wrapped.calibration)
        return Subject(f"{self.label} (bfloat16)", wrapped, self.is_tiny)


def layers_for(strategy: Strategy) -> int:
    """Layers of a tiny model in which the strategy acts in two at least: it may leave the
    first ones alone, and hybrid models have as many layers that slide."""
    first = getattr(strategy, "dense_layers", 0)
    return 2 + first + first % 2


def tiny_subjects(layers: int = 2) -> list[Subject]:
    """One model of each structure in :data:`kvacc.verify.tiny_models.FAMILIES`."""
    return [tiny_subject(family, layers) for family in FAMILIES]


@functools.cache
def tiny_subject(family: str, layers: int = 2) -> Subject:
    """A tiny model whose heads look at a few tokens each; made once, do not change it."""
    return _tiny(f"tiny {family}", sharp_model(family, layers, max_position_embeddings=LONGEST))


@functools.cache
def flat_subject(layers: int = 2) -> Subject:
    """A tiny model in which every query attends equally to all that it reads."""
    return _tiny("flat llama", flat_model(layers))


def _tiny(label: str, model) -> Subject:
    draw = random.Random(11)
    tokens = [draw.randrange(3, model.config.vocab_size) for _ in range(_CALIBRATION_TOKENS)]
    return Subject(label, WrappedModel(model, calibration=lambda source: list(tokens)), True)


def loaded_subject(pretrained: str, dtype: str = "float32") -> Subject:
    """A real model by name, folder or alias.

    Raises:
        KvaccError: it cannot be loaded, or strategies cannot act in it.
    """
    from kvacc.models import load_model

    model = load_model(pretrained, dtype=dtype)
    subject = Subject(pretrained.rstrip("/").rsplit("/", 1)[-1], WrappedModel(model), False)
    tokens = list(subject.draw_tokens(_CALIBRATION_TOKENS, seed=11))
    subject.wrapped.calibration = lambda source: list(tokens)
    return subject


def _stored_by_transformers(wrapped: WrappedModel) -> tuple[int, int]:
    """Heads, and bytes per token of a layer, in transformers' own cache."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache = DynamicCache(config=wrapped.config)
    with _oracle(wrapped.model, _Replayed({}, None)):
        wrapped.model(input_ids=torch.tensor([[3, 4]], device=wrapped.device), cache=cache, use_cache=True)
    layer = next(layer for layer in cache.layers if type(layer) is DynamicLayer)
    return layer.keys.shape[1], (layer.keys.nbytes + layer.values.nbytes) // layer.keys.shape[2]


# The oracle: the model's own eager attention function, with a mask from recorded decisions.

_REPLAYED: ContextVar[_Replayed | None] = ContextVar("kvacc_oracle", default=None)


@dataclass(frozen=True)
class _Replayed:
    """What each layer's queries read: layer -> bool [H, T, T]; and, for a strategy that
    rotates to cache positions, how."""

    decisions: dict[int, torch.Tensor]
    rotation: object | None


def own_logits(
    subject: Subject,
    tokens: tuple[int, ...],
    decisions: dict[int, torch.Tensor] | None = None,
    rotation: object | None = None,
) -> torch.Tensor:
    """Logits [T, vocabulary] by the model's own attention over the whole text, at the
    positions that the model gives it.

    Args:
        decisions: entries read by each query; layers that are not in it read everything
            that the model lets them.
        rotation: moves keys and queries to their places among the entries read.

    Raises:
        KvaccError: the family has no attention function that takes a mask, or its heads
            read different entries while they share cache positions.
    """
    model = subject.wrapped.model
    with _oracle(model, _Replayed(decisions or {}, rotation)):
        return model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0].float()


@contextlib.contextmanager
def _oracle(model, replayed: _Replayed) -> Iterator[None]:
    """Within it the model computes its own attention, under a mask."""
    _register_oracle()
    token = _REPLAYED.set(replayed)
    try:
        model.set_attn_implementation(_ORACLE)
        with torch.inference_mode():
            yield
    finally:
        model.set_attn_implementation(attention.NAME)
        _REPLAYED.reset(token)


@functools.cache
def _register_oracle() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(_ORACLE, _oracle_attention)
    AttentionMaskInterface.register(_ORACLE, eager_mask)


def _oracle_attention(module, query, key, value, attention_mask, **options):
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise KvaccError(f"{type(module).__name__} has no attention function that takes a mask")
    replayed = _REPLAYED.get()
    decision = replayed.decisions.get(module.layer_idx)
    if decision is None:
        return eager(module, query, key, value, attention_mask, **options)
    if replayed.rotation is not None:
        return _by_cache_positions(eager, module, query, key, value, decision, replayed.rotation, options)
    lowest = torch.finfo(query.dtype).min
    # A mask per query head; the model's own still applies, so nothing later can be read.
    per_head = decision.repeat_interleave(query.shape[1] // decision.shape[0], 0)[None]
    mask = attention_mask.masked_fill(~per_head.to(query.device), lowest)
    return eager(module, query, key, value, mask, **options)


def _by_cache_positions(eager, module, query, key, value, decision, rotation, options):
    """One call per query, over the entries that it reads alone, moved to 0, 1, 2, ..."""
    if not bool((decision == decision[:1]).all()):
        raise KvaccError("its KV heads keep different entries, which have no common cache positions")
    outputs = []
    for place in range(query.shape[2]):
        kept = decision[0, place].nonzero()[:, 0].to(query.device)
        by = (torch.arange(len(kept), device=query.device) - kept)[None, None]
        moved_key = rotation.rotate(module.layer_idx, key[:, :, kept], by)
        back = by.new_tensor([[[len(kept) - 1 - place]]])
        moved_query = rotation.rotate(module.layer_idx, query[:, :, place : place + 1], back)
        open_mask = query.new_zeros(1, 1, 1, len(kept))
        outputs.append(eager(module, moved_query, moved_key, value[:, :, kept], open_mask, **options)[0])
    return torch.cat(outputs, 1), None


@contextlib.contextmanager
def rounded_otherwise(subject: Subject, seed: int) -> Iterator[None]:
    """Within it the model's input embeddings are off by about what rounding could do."""
    weight = subject.wrapped.model.get_input_embeddings().weight
    before = weight.data
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(before.shape, generator=generator).to(before)
    weight.data = before * (1 + _ROUNDING * noise)
    try:
        yield
    finally:
        weight.data = before


_ROUNDING = 3e-6
