"""Queries guessed from the attention input of the layer before (InfiniGen).

Consecutive layers of a transformer read similar inputs, so a layer's own projections
applied to the input of the layer before give a query close to the real one, early
enough to fetch entries while that layer still runs (arXiv:2406.19707, section 4.2).

No family is known by name here: a hook notes what each attention module is given, and
the guess is the module itself, run on the input of the one before until it calls
attention. Where queries are linear in that input (no rotary positions, OPT), skewing
and the choice of columns are folded into one small matrix instead, as the paper does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvacc.engine.attention import AttentionCall, active
from kvacc.engine.packing import TokenPacking
from kvacc.engine.skewing import Skewing
from kvacc.select_strategy import SpeculationSettings


class _QueryIsKnown(Exception):
    pass


class _QueryOnly:
    """A session that ends a module's forward pass where its query is known."""

    query: torch.Tensor

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.query = call.query
        raise _QueryIsKnown


class Inputs:
    """What the layers of a model are given, noted while :meth:`watching`.

    Args:
        modules: layer -> its attention module.
        mixers: layer -> the module that takes the place of attention, in recurrent layers.
    """

    def __init__(
        self, modules: dict[int, torch.nn.Module], mixers: dict[int, torch.nn.Module] | None = None
    ) -> None:
        self.modules = modules
        self.watched = {**(mixers or {}), **modules}
        self.seen: dict[int, tuple[tuple, dict[str, Any]]] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as hooks:
            for layer, module in self.watched.items():
                handle = module.register_forward_pre_hook(self._note(layer), with_kwargs=True)
                hooks.callback(handle.remove)
            try:
                yield
            finally:
                self.seen.clear()

    def _note(self, layer: int):
        def note(module, arguments, named):
            self.seen[layer] = (arguments, named)

        return note

    def before(self, layer: int) -> int | None:
        """The layer before, or None where its input is not known: at the first layer."""
        return layer - 1 if layer - 1 in self.watched else None

    def hidden(self, layer: int) -> torch.Tensor:
        """The input of the layer's attention [B, n, width] in this forward pass."""
        arguments, named = self.seen[layer]
        return arguments[0] if arguments else named["hidden_states"]

    def query(self, layer: int, hidden: torch.Tensor, like: int | None = None) -> torch.Tensor:
        """The query [B, Q, n, D] that ``layer`` makes of ``hidden``; its other arguments are
        those that layer ``like`` was given in this pass (by default itself)."""
        arguments, named = self.seen[layer if like is None else like]
        # A cache would store the guess's keys.
        arguments = tuple(None if isinstance(value, Cache) else value for value in arguments)
        named = {name: None if isinstance(value, Cache) else value for name, value in named.items()}
        if "use_cache" in named:
            named["use_cache"] = False
        if arguments:
            arguments = (hidden, *arguments[1:])
        else:
            named["hidden_states"] = hidden
        session = _QueryOnly()
        # `forward`, not a call: a call would run the hooks that note the real input.
        with active(session), contextlib.suppress(_QueryIsKnown):
            self.modules[layer].forward(*arguments, **named)
        return session.query


def token_mixers(model: torch.nn.Module, layers: set[int]) -> dict[int, torch.nn.Module]:
    """layer -> the innermost module that knows itself to be that layer, for recurrent layers."""
    found = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if layer in layers and not any(
            getattr(part, "layer_idx", None) == layer for part in module.modules() if part is not module
        ):
            found[layer] = module
    return found


def _kind_and_place(module: torch.nn.Module) -> tuple:
    weight = next(module.parameters(), None)
    return type(module), getattr(module, "layer_type", None), None if weight is None else weight.device


class Speculation:
    """Skewed partial queries and keys of a model's layers.

    Args:
        inputs: the model's attention modules.
        skewing: rotations and column weights.
        settings: which columns, and what queries are guessed from.
        foldable: the model has no rotary positions, so queries may be linear in the input.
    """

    def __init__(
        self, inputs: Inputs, skewing: Skewing, settings: SpeculationSettings, foldable: bool
    ) -> None:
        self.inputs = inputs
        self.source = settings.source
        self.foldable = foldable
        self.basis: dict[int, torch.Tensor] = {}
        for layer, rotation in skewing.rotation.items():
            columns = skewing.columns(layer, settings.partial_ratio, settings.columns)
            index = columns[:, None].expand(-1, rotation.shape[1], -1)
            self.basis[layer] = rotation.gather(2, index)  # [K, D, C]
        self._folded: dict[int, tuple[torch.Tensor, torch.Tensor] | None] = {}

    def skewed(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Skewed partial columns of queries or keys: [B, K or Q, n, D] -> [.., C], float32."""
        basis = self.basis[layer].to(x.device)
        group = x.shape[1] // basis.shape[0]
        grouped = x.float().unflatten(1, (basis.shape[0], group))
        return (grouped @ basis[None, :, None]).flatten(1, 2)

    def can_guess(self, layer: int) -> bool:
        """False at the first layer, before which there is nothing to guess from."""
        return self.source == "current" or self.inputs.before(layer) is not None

    def queries(self, call: AttentionCall, packing: TokenPacking | None = None) -> torch.Tensor:
        """The speculated queries [B, Q, n, C] of a layer that runs now, on tokens that may be packed."""
        if self.source == "current":
            return self.skewed(call.layer, call.query)
        hidden = self.inputs.hidden(call.layer - 1).to(call.query.device)
        guess = self._guess(call.layer, hidden, None)
        return packing.spread(guess) if packing else guess

    def queries_ahead(self, layer: int, running: int) -> torch.Tensor | None:
        """The same for ``layer``, while ``running``, the one before, runs. None where the two
        are given different arguments: rotary frequencies of their own, or another device's."""
        own, other = self.inputs.modules[layer], self.inputs.watched[running]
        if _kind_and_place(own) != _kind_and_place(other):
            return None
        return self._guess(layer, self.inputs.hidden(running), running)

    def _guess(self, layer: int, hidden: torch.Tensor, like: int | None) -> torch.Tensor:
        if self.foldable and layer not in self._folded:
            self._folded[layer] = self._fold(layer, hidden, like)
        folded = self._folded.get(layer)
        if folded is None:
            return self.skewed(layer, self.inputs.query(layer, hidden, like))
        weight, bias = folded
        return torch.einsum("bnx,xqc->bqnc", hidden.float(), weight) + bias[:, None]

    def _fold(self, layer: int, hidden: torch.Tensor, like: int | None):
        """(weight [width, Q, C], bias [Q, C]) that map an attention input to its speculated
        query, or None where the module's query is not linear in its input."""
        width = hidden.shape[-1]
        probe = torch.eye(width, dtype=hidden.dtype, device=hidden.device)
        probe = torch.cat([torch.zeros_like(probe[:1]), probe])[None]
        made = self.skewed(layer, self.inputs.query(layer, probe, like))[0]  # [Q, 1 + width, C]
        bias = made[:, 0]
        weight = (made[:, 1:] - bias[:, None]).transpose(0, 1).contiguous()
        expected = self.skewed(layer, self.inputs.query(layer, hidden, like))
        found = torch.einsum("bnx,xqc->bqnc", hidden.float(), weight) + bias[:, None]
        close = (found - expected).abs().max() <= 1e-3 * expected.abs().max()
        return (weight, bias) if bool(close) else None
