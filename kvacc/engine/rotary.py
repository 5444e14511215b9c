"""Rotate vectors that already carry rotary positions by a further number of positions.

Families differ in the pairing of dimensions, the share that is rotated, the
frequencies, and whether a layer is rotated at all. Instead of a table of families,
:func:`find_rotation` asks the model: every attention layer is given the same input at
all positions, so that the keys of a layer can differ by their rotation only, and the
convention that explains the difference is the model's.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from kvacc.engine.attention import AttentionCall, active, dense_attention
from kvacc.errors import KvaccError

PAIRINGS = ("half", "interleaved")
PROBED = (1, 2, 4, 9, 33, 90)
"""Positions at which keys are compared: near ones tell fast pairs apart, far ones slow."""


@dataclass(frozen=True)
class Rotation:
    """How each full-attention layer rotates: layer -> (pairing, frequencies), or None in a
    layer without positions (Llama 4, Cohere 2), where moving a key changes nothing."""

    layers: dict[int, tuple[str, torch.Tensor] | None]

    def rotate(self, layer: int, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """Move ``x`` [B, H, n, D] by ``by`` [B, H or 1, n] positions."""
        known = self.layers[layer]
        return x if known is None else _rotate(x, by, *known)


def _rotate(x: torch.Tensor, by: torch.Tensor, pairing: str, frequencies: torch.Tensor) -> torch.Tensor:
    angle = by[..., None].double() * frequencies.to(x.device).double()
    cos, sin = angle.cos().float(), angle.sin().float()
    turned = 2 * frequencies.numel()
    part, rest = x[..., :turned].float(), x[..., turned:]
    if pairing == "half":
        a, b = part.chunk(2, -1)
        out = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    else:
        a, b = part[..., 0::2], part[..., 1::2]
        out = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([out.to(x.dtype), rest], -1)


class _Recorder:
    """A session with full causal attention that keeps the module and keys of every layer."""

    def __init__(self) -> None:
        self.modules: dict[int, torch.nn.Module] = {}
        self.keys: dict[int, torch.Tensor] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.modules[call.layer] = call.module
        self.keys[call.layer] = call.key.detach()
        return dense_attention(call, None)


def find_rotation(model, full_layers: list[int], latent: bool = False) -> Rotation:
    """The rotation of ``model``, checked against its own keys.

    Raises:
        KvaccError: keys do not follow a rotary embedding that can be re-applied.
    """
    family = model.config.get_text_config(decoder=True).model_type
    refusal = KvaccError(
        f"model family {family!r} has no rotary positions that can be re-applied; "
        "use positions=original with this strategy"
    )
    candidates = _frequencies(model)
    # Without rotary frequencies positions are learned, and part of what a layer reads; with
    # frequencies that change as a text grows, a key cannot be moved by a fixed angle.
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = {value.get("rope_type") for value in (rope, *rope.values()) if isinstance(value, dict)}
    if latent or not candidates or kinds & {"dynamic", "longrope"}:
        raise refusal
    recorder = _Recorder()
    tokens = torch.arange(3, 3 + len(PROBED), device=model.device)[None]
    named = {"use_cache": False, "position_ids": torch.tensor([PROBED], device=model.device)}
    with active(recorder), torch.inference_mode(), contextlib.ExitStack() as hooks:
        model(input_ids=tokens, **named)
        for module in recorder.modules.values():
            handle = module.register_forward_pre_hook(_same_everywhere, with_kwargs=True)
            hooks.callback(handle.remove)
        model(input_ids=tokens, **named)
    found: dict[int, tuple[str, torch.Tensor] | None] = {}
    for layer in full_layers:
        key, exact = recorder.keys[layer].float(), recorder.keys[layer].dtype == torch.float32
        found[layer] = _explain(key, exact, candidates, refusal)
    return Rotation(found)


def _same_everywhere(module, arguments, named):
    """Give an attention module its first position's input at all positions."""
    if arguments:
        return (arguments[0][:, :1].expand_as(arguments[0]), *arguments[1:]), named
    hidden = named["hidden_states"]
    return arguments, {**named, "hidden_states": hidden[:, :1].expand_as(hidden)}


def _explain(key: torch.Tensor, exact: bool, candidates: list[torch.Tensor], refusal: KvaccError):
    """The convention that turns the key at the first position probed into the others."""
    scale = key.abs().max()
    # Half precision rounds each key; a wrong convention is off by the key's own size.
    allowed = scale * (1e-3 if exact else 2e-2)

    def explains(pairing: str, frequencies: torch.Tensor) -> bool:
        if 2 * frequencies.numel() > key.shape[-1]:
            return False
        by = torch.tensor(PROBED, device=key.device)[None, None] - PROBED[0]
        moved = _rotate(key[:, :, :1].expand_as(key), by, pairing, frequencies)
        return bool((moved - key).abs().max() <= allowed)

    if (key - key[:, :, :1]).abs().max() < scale * 1e-4:
        return None
    for frequencies in candidates:
        for pairing in PAIRINGS:
            if explains(pairing, frequencies):
                return pairing, frequencies
    raise refusal


def has_rotary_positions(model) -> bool:
    """False where keys and queries carry no rotary positions (OPT, GPT-2)."""
    return bool(_frequencies(model))


def _frequencies(model) -> list[torch.Tensor]:
    """Every set of rotary frequencies that the model holds, radians per position."""
    found = [
        buffer.detach().float()
        for name, buffer in model.named_buffers()
        if name.rsplit(".", 1)[-1].endswith("inv_freq") and buffer.dim() == 1
    ]
    turned = getattr(model.config, "rotary_dim", None)
    if turned:  # GPT-J and CodeGen hold a table of sines with the original base instead
        found.append(10_000.0 ** -(torch.arange(0, turned, 2).float() / turned))
    return found
