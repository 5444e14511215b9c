"""Weights in the layout that the processor's matrix kernels want, while answers are computed.

PyTorch's own linear layer rearranges a weight in every call. oneDNN keeps it rearranged, as
``torch.compile`` has it do when it freezes a model; for float32 that is the faster kernel, too.
Only the order of the sums within a product changes, so answers differ in their last bits.

Generation uses it, too. What is measured of a model is measured without it: latency and memory
in probes are those of the model as PyTorch runs it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvacc.engine.memory import free_bytes

LEAST_WEIGHTS = 2**16
"""Numbers in a matrix below which there is nothing to gain."""
MOST_MEMORY = 0.25
"""Share of the free memory that the second copy of the weights may take."""


@dataclass(frozen=True)
class _Packed:
    weight: torch.Tensor
    version: int
    layout: torch.Tensor

    def is_of(self, module: torch.nn.Linear) -> bool:
        """The weight is still the one that was rearranged."""
        return module.weight is self.weight and _version(module.weight) == self.version


class PrepackedWeights:
    """A second copy of a model's linear layers, made when it is first used.

    Nothing is done on other devices, in other types than float32, where PyTorch was built without
    oneDNN, or where the copy would take more than a quarter of the free memory.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._packed: dict[torch.nn.Linear, _Packed] = {}
        self._depth = 0
        self._fits: bool | None = None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Inside the block the model's linear layers multiply by the copy. May be nested."""
        modules = self._modules() if not self._depth else []
        # All copies before the first layer is changed: there may be no memory for one of them.
        for module in modules:
            packed = self._packed.get(module)
            if packed is None or not packed.is_of(module):
                self._packed[module] = _rearranged(module)
        for module in modules:
            module.forward = functools.partial(_multiply, self._packed[module].layout, module.bias)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            for module in modules:
                del module.forward

    def _modules(self) -> list[torch.nn.Linear]:
        if not torch.backends.mkldnn.is_available():
            return []
        found = [module for module in self._model.modules() if _can_be_packed(module)]
        if self._fits is None:
            size = sum(module.weight.nbytes for module in found)
            self._fits = size <= MOST_MEMORY * free_bytes(torch.device("cpu"))
        return found if self._fits else []


def _can_be_packed(module: torch.nn.Module) -> bool:
    # A forward of the instance's own is somebody's hook (accelerate's, say), a subclass another layer.
    if type(module) is not torch.nn.Linear or "forward" in vars(module):
        return False
    weight = module.weight
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and weight.numel() >= LEAST_WEIGHTS


def _rearranged(module: torch.nn.Linear) -> _Packed:
    with torch.inference_mode():
        layout = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), None)
    return _Packed(module.weight, _version(module.weight), layout)


def _version(weight: torch.Tensor) -> int:
    """Counts changes in place; tensors made in inference mode have no such count."""
    return 0 if weight.is_inference() else weight._version


def _multiply(layout: torch.Tensor, bias: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(states, layout, bias, "none", [], "")
