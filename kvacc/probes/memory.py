"""Bytes in use, their peak, and a limit to them.

On CUDA the allocator of PyTorch counts, and enforces the limit. On a processor nobody counts, so
:class:`_LiveStorages` follows every tensor that an operation of PyTorch makes or touches: exact,
the same on every run, and slow, so nothing is timed under it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import re
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvacc.engine.host_memory import ON_HOST
from kvacc.errors import KvaccError


class MemoryMeter:
    """Counts the bytes of tensors on a device while its block runs.

    Args:
        device: where they are counted. Under CUDA, all devices of ``held`` besides it.
        limit_bytes: most bytes that may be in use, ``held`` included; None is all there is.
        held: a model, or tensors, whose bytes are there from the beginning. On CUDA everything
            that is allocated already counts as well.

    Raises:
        torch.OutOfMemoryError: (inside the block) the limit would be exceeded.
        KvaccError: the limit is not a number of bytes, or more than a GPU has.
    """

    def __init__(
        self,
        device: torch.device | str,
        limit_bytes: int | None = None,
        held: torch.nn.Module | Iterable[torch.Tensor] | None = None,
    ) -> None:
        if limit_bytes is not None and limit_bytes < 1:
            raise KvaccError(f"a memory limit of {limit_bytes} bytes holds nothing; give more, or none")
        tensors = list(_tensors(held))
        kind = _CudaMemory if torch.device(device).type == "cuda" else _ProcessorMemory
        self._memory = kind(torch.device(device), limit_bytes, tensors)

    def __enter__(self) -> MemoryMeter:
        self._memory.start()
        return self

    def __exit__(self, *exc) -> None:
        self._memory.stop()

    @property
    def current_bytes(self) -> int:
        """Bytes on the device now."""
        return self._memory.current()

    @property
    def peak_bytes(self) -> int:
        """Most bytes on the device at once since the start or :meth:`reset_peak`."""
        return self._memory.peak()

    @property
    def reserved_bytes(self) -> int:
        """Most bytes that the allocator took from the system since then, free ones that it keeps
        for later included. Not the same on every run."""
        return self._memory.reserved()

    @property
    def host_bytes(self) -> int | None:
        """Bytes of offloaded entries now; None on CUDA, where they are not the device's."""
        return self._memory.host()

    @property
    def method(self) -> str:
        """How bytes are counted, in words."""
        return self._memory.method

    def reset_peak(self) -> None:
        """Let the peak begin at what is in use now."""
        self._memory.reset_peak()


def _tensors(held) -> Iterable[torch.Tensor]:
    if held is None:
        return ()
    return (*held.parameters(), *held.buffers()) if isinstance(held, torch.nn.Module) else held


class _CudaMemory:
    method = "CUDA: torch's caching allocator (allocated and reserved bytes)"

    def __init__(self, device: torch.device, limit: int | None, held: list[torch.Tensor]) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.devices = sorted({index, *(t.device.index for t in held if t.device.type == "cuda")})
        self.limit = limit
        if limit is not None and len(self.devices) > 1:
            raise KvaccError(f"a memory limit for {len(self.devices)} GPUs at once is not possible; use one")
        if len(self.devices) > 1:
            self.method += ", of all GPUs; the peak is the sum of their peaks"

    def start(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        if self.limit is not None:
            total = torch.cuda.get_device_properties(self.devices[0]).total_memory
            if self.limit > total:
                raise KvaccError(f"a memory limit of {self.limit:,} bytes is more than the GPU's {total:,}")
            torch.cuda.set_per_process_memory_fraction(self.limit / total, self.devices[0])
        self.reset_peak()

    def stop(self) -> None:
        if self.limit is not None:
            torch.cuda.set_per_process_memory_fraction(1.0, self.devices[0])

    def _sum(self, of) -> int:
        for device in self.devices:
            torch.cuda.synchronize(device)
        return sum(of(device) for device in self.devices)

    def current(self) -> int:
        return self._sum(torch.cuda.memory_allocated)

    def peak(self) -> int:
        return self._sum(torch.cuda.max_memory_allocated)

    def reserved(self) -> int:
        return self._sum(torch.cuda.max_memory_reserved)

    def host(self) -> None:
        return None

    def reset_peak(self) -> None:
        for device in self.devices:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)


class _ProcessorMemory:
    method = (
        "CPU: every tensor that an operation of PyTorch made or read, by storage; without the work space "
        "inside of an operation and of compiled (numba) kernels. Reserved: the process's peak resident set "
        "(VmHWM) over that at the start"
    )

    def __init__(self, device: torch.device, limit: int | None, held: list[torch.Tensor]) -> None:
        self.live = _LiveStorages(device.type, limit)
        self.held = held
        self._resident = self._counted = 0

    def start(self) -> None:
        _return_free_memory()
        self.live.add(self.held)
        self._counted, self._resident = self.live.current, _status("VmRSS")
        self.reset_peak()
        self.live.__enter__()

    def stop(self) -> None:
        self.live.__exit__(None, None, None)
        self.live.forget()

    def current(self) -> int:
        return self.live.current

    def peak(self) -> int:
        return self.live.peak

    def reserved(self) -> int:
        # What was resident at the start stands for what was counted then.
        return max(self.live.peak, self._counted + _status("VmHWM") - self._resident)

    def host(self) -> int:
        return self.live.on_host

    def reset_peak(self) -> None:
        self.live.peak = self.live.current
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


class _LiveStorages(TorchDispatchMode):
    """The storages that are alive. Views share one, which counts once, until its last tensor is
    gone.

    Attributes:
        current: bytes of the storages on the device now; peak: most at once.
        on_host: bytes now of those made inside :func:`kvacc.engine.host_memory.on_host`.
    """

    def __init__(self, device_type: str, limit: int | None) -> None:
        super().__init__()
        self.device_type = device_type
        self.limit = limit
        self.current = self.peak = self.on_host = 0
        self._known: dict[int, list] = {}  # address of the storage -> [bytes, on host?, finalizer]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # Under inference_mode a composed operation arrives whole: its parts make tensors too.
        with self:
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self.add(inputs)
        if self.limit is not None:
            # Matrix products make much larger tensors than they read: refuse before they exist.
            self._check(self.current + _product_bytes(func, inputs))
        out = func(*args, **kwargs)
        self.add(t for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        self._check(self.current)
        return out

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note the storages of these tensors, new ones and those whose size has changed."""
        for tensor in tensors:
            # A weight in a layout of oneDNN's own has no storage that could be followed; no probe makes one.
            if tensor.device.type != self.device_type or tensor.is_mkldnn:
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            known = self._known.get(key)
            if known is None:
                host = ON_HOST.get()
                self._known[key] = [size, host, weakref.finalize(storage, self._gone, key)]
                self._grow(size, host)
            elif known[0] != size:
                self._grow(size - known[0], known[1])
                known[0] = size
        self.peak = max(self.peak, self.current)

    def _grow(self, by: int, host: bool) -> None:
        if host:
            self.on_host += by
        else:
            self.current += by

    def _gone(self, key: int) -> None:
        size, host, _ = self._known.pop(key)
        self._grow(-size, host)

    def forget(self) -> None:
        """Follow nothing any more; the counts stay as they are."""
        for _, _, finalizer in self._known.values():
            finalizer.detach()
        self._known.clear()

    def _check(self, total: int) -> None:
        if self.limit is not None and total > self.limit:
            raise torch.OutOfMemoryError(
                f"kvacc's memory limit of {self.limit:,} bytes: {total:,} would be in use"
            )


def _product_bytes(func, inputs: list[torch.Tensor]) -> int:
    """Bytes of what a matrix product will make; 0 for another operation."""
    if func.overloadpacket._qualified_op_name.split("::")[-1] not in _PRODUCTS or len(inputs) < 2:
        return 0
    left, right = inputs[-2:]
    if left.dim() < 2 or right.dim() < 2:
        return 0
    return math.prod((*left.shape[:-1], right.shape[-1])) * left.element_size()


_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")


def _status(name: str) -> int:
    """Bytes of a line of /proc/self/status; 0 where there is none."""
    with contextlib.suppress(OSError):
        found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0


def _return_free_memory() -> None:
    """Let the C library give freed memory back, so that later allocations show in the resident set."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
