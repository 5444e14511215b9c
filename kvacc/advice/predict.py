"""Memory of candidates that were never probed: computed from the model's configuration alone.

Keys and values are exact (:mod:`kvacc.kv_size`). The peak is that of :mod:`kvacc.planner.memory`, a
formula of the activations in transformers' implementation, and so never more than likely.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvacc.advice.accuracy import Candidate
from kvacc.advice.cost import Cost, Setting, Wanted
from kvacc.errors import KvaccError
from kvacc.strategy import Strategy, make_strategy

KERNEL = "sdpa"
"""Attention whose activations are computed: transformers' own choice where nothing else is asked for."""
OUTPUT_TOKENS = 32
_SERVE = "serve"


def predict_costs(
    candidates: Sequence[Candidate], wanted: Wanted, protocol: str
) -> tuple[Setting, dict[str, Cost], dict[str, str]]:
    """The memory of each candidate, by its name, and why some have none.

    Args:
        wanted: its prompt length is needed; the batch is 1 where none is given.
        protocol: of the accuracy results; ``serve``, what a server does, is computed where every
            candidate supports it.

    Raises:
        KvaccError: no prompt length, or a model whose configuration is not at hand.
    """
    from kvacc.planner.memory import Workload, memory_of
    from kvacc.planner.models import find_model

    if wanted.prompt_tokens is None:
        raise KvaccError(
            "without probes memory is computed for one length of prompt: give --prompt, such as --prompt "
            "4096; or measure it with kvacc probe CONFIG, and name its folder with --probes"
        )
    first = candidates[0]
    number = _bytes_of(str(first.model.get("dtype") or first.spec.model.get("dtype")))
    model = find_model(str(first.spec.model["pretrained"]))
    strategies = {one.name: _strategy(one) for one in candidates}
    served = all(_SERVE in strategy.supported_protocols() for strategy in strategies.values())
    protocol = _SERVE if served else protocol
    batch = wanted.batch or 1
    work = Workload(
        prompt_tokens=wanted.prompt_tokens,
        output_tokens=OUTPUT_TOKENS,
        batch=batch,
        protocol=protocol,
        prefill_chunk=wanted.prefill_chunk,
        kernel=KERNEL,
        weight_bytes=number,
        activation_bytes=number,
        kv_bytes=number,
        reserve=0,
    )
    costs, unknown = {}, {}
    for name, strategy in strategies.items():
        try:
            parts = memory_of(model, strategy, work)
        except KvaccError as error:
            unknown[name] = str(error)
            continue
        of_prefill = parts.prefill_peak >= parts.decode_peak
        costs[name] = Cost(
            memory=parts.peak,
            memory_of="prefill" if of_prefill else "decode",
            kv_memory=parts.cache.on_device,
            kv_host=parts.host,
        )
    setting = Setting(
        wanted.prompt_tokens, batch, OUTPUT_TOKENS, protocol, wanted.prefill_chunk,
        f"kernel {KERNEL}", False, computed=True,
    )  # fmt: skip
    return setting, costs, unknown


def _strategy(candidate: Candidate) -> Strategy:
    spec = candidate.spec
    # What file a strategy of the user's own came from is no argument of it.
    options = {name: value for name, value in spec.options.items() if name != "file_sha256"}
    return make_strategy(spec.strategy, spec.budget, spec.budget_of, **options)


def _bytes_of(dtype: str) -> int:
    import torch

    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise KvaccError(f"number format {dtype!r} has no known size; measure memory with kvacc probe CONFIG")
    return found.itemsize
