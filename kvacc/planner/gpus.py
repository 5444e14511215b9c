"""GPUs by name, from a table, or described by their numbers."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from importlib import resources

from kvacc.errors import KvaccError, unknown

ALIASES = {
    "a100": "a100-80gb", "a100-40": "a100-40gb", "a100-80": "a100-80gb", "h100-80gb": "h100",
    "h100-sxm": "h100", "v100": "v100-32gb", "rtx-a6000": "a6000", "3090": "rtx-3090",
    "4090": "rtx-4090", "5090": "rtx-5090",
}  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """One GPU's limits.

    Attributes:
        memory: bytes that programs can use.
        bandwidth: bytes per second to its own memory.
        operations: matrix operations per second by type of number; dense.
        host: bytes per second to host memory, one direction.
        link: bytes per second to the other GPUs, one direction; None is over ``host``.
    """

    key: str
    name: str
    memory: int
    bandwidth: float
    operations: dict[str, float] = field(hash=False)
    host: float
    link: float | None = None

    @property
    def between(self) -> float:
        """Bytes per second to the other GPUs, one direction."""
        return self.link or self.host

    def operations_for(self, dtype: str) -> float | None:
        """Peak for numbers of a type, or None where the GPU has no matrix units for it."""
        return self.operations.get(dtype)


@functools.cache
def known_gpus() -> dict[str, Gpu]:
    """The table, by key."""
    import yaml

    text = resources.files("kvacc.planner").joinpath("gpus.yaml").read_text(encoding="utf-8")
    return {key: _gpu(key, values) for key, values in yaml.safe_load(text).items()}


def _gpu(key: str, values: dict) -> Gpu:
    link = values.get("link")
    return Gpu(
        key,
        values["name"],
        int(values["memory_gib"] * 2**30),
        float(values["bandwidth"]),
        {dtype: float(rate) for dtype, rate in values["operations"].items()},
        float(values["host"]),
        None if link is None else float(link),
    )


def find_gpu(
    name: str | None,
    memory: int | None = None,
    bandwidth: float | None = None,
    operations: float | None = None,
    host: float | None = None,
    link: float | None = None,
) -> Gpu:
    """A GPU of the table, with any of its numbers replaced, or one described by numbers alone.

    Args:
        operations: per second, for every type of number.

    Raises:
        KvaccError: unknown name; or no name, and memory, bandwidth or operations missing.
    """
    table = known_gpus()
    if name is None:
        missing = [
            f"--gpu-{word}"
            for word, value in (("memory", memory), ("bandwidth", bandwidth), ("flops", operations))
            if value is None
        ]
        if missing:
            raise KvaccError(
                f"name a GPU with --gpu ({', '.join(table)}), or describe one: {', '.join(missing)} missing"
            )
        gpu = Gpu("custom", "custom GPU", 0, 0.0, {}, 32e9)
    else:
        key = name.lower().replace("_", "-").replace(" ", "-")
        key = ALIASES.get(key, key)
        if key not in table:
            raise unknown("GPU", name, table)
        gpu = table[key]
    changes = {"memory": memory, "bandwidth": bandwidth, "host": host, "link": link}
    gpu = replace(gpu, **{name: value for name, value in changes.items() if value is not None})
    if operations is not None:
        every = dict.fromkeys(("float32", "float16", "bfloat16", "float8"), operations)
        gpu = replace(gpu, operations=every)
    return gpu
