"""A batch without its padding, for everything in a model that treats tokens one by one.

Rows of a batch are as wide as the longest. Projections, feed-forward layers and
normalisation need not know about rows: they are given the tokens alone, as one row of N,
and only attention sees the batch [B, T] again. So rows of any lengths go together.
"""

from __future__ import annotations

import torch

LEAST_PADDING = 1 / 32
"""Share of padding below which a batch stays as it is: moving the states costs something, too."""


class TokenPacking:
    """Which places of a batch hold a token.

    Args:
        real: bool [B, T], False at padding. N are true.
    """

    def __init__(self, real: torch.Tensor) -> None:
        self.shape = real.shape
        self._places = {real.device: real.flatten().nonzero()[:, 0]}

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """[B, T] -> [1, N], row after row."""
        return values.flatten()[self._places_on(values.device)][None]

    def spread(self, states: torch.Tensor) -> torch.Tensor:
        """[1, H, N, D] -> [B, H, T, D], zero at padding."""
        _, heads, _, size = states.shape
        rows, width = self.shape
        out = states.new_zeros(rows * width, heads, size)
        out[self._places_on(states.device)] = states[0].transpose(0, 1)
        return out.view(rows, width, heads, size).transpose(1, 2)

    def gather(self, states: torch.Tensor) -> torch.Tensor:
        """[B, H, T, D] -> [1, H, N, D]."""
        rows, heads, width, size = states.shape
        flat = states.transpose(1, 2).reshape(rows * width, heads, size)
        return flat[self._places_on(states.device)].transpose(0, 1)[None]

    def _places_on(self, device: torch.device) -> torch.Tensor:
        """long [N], on a layer's device: the layers of a large model lie on several."""
        if device not in self._places:
            self._places[device] = next(iter(self._places.values())).to(device)
        return self._places[device]


def packing_of(real: torch.Tensor) -> TokenPacking | None:
    """The packing of a batch, or None where it has next to no padding."""
    padding = real.numel() - int(real.sum())
    return TokenPacking(real) if padding > LEAST_PADDING * real.numel() else None
