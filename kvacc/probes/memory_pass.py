"""The memory of one case: bytes by part, measured beside what the formula says."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvacc.errors import KvaccError
from kvacc.kv_size import KVBytes, kv_bytes_of, kv_formula
from kvacc.probes.decoder import Decoder, step_path_only
from kvacc.probes.memory import MemoryMeter
from kvacc.probes.records import MemoryRecord, ProbeCase
from kvacc.strategy import Strategy


def measure_memory(
    make: Callable[[], Decoder],
    model: torch.nn.Module,
    strategy: Strategy,
    case: ProbeCase,
    prompts: torch.Tensor,
) -> MemoryRecord:
    """Read the prompts and make tokens under a meter, without taking time.

    Args:
        make: a fresh decoder.
        prompts: long [B, n].

    Raises:
        KvaccError: something would have used the parallel path.
        torch.OutOfMemoryError: it does not fit.
    """
    make()  # what is prepared once for a model is there before anything is counted
    with step_path_only(), MemoryMeter(prompts.device, held=model) as meter:
        decoder = make()
        meter.reset_peak()
        token = decoder.prefill(prompts, case.prefill_chunk).argmax(-1)
        prefill_peak, prefill_reserved, after = meter.peak_bytes, meter.reserved_bytes, decoder.kv_bytes()
        meter.reset_peak()
        for _ in range(case.output_tokens - 1):
            token = decoder.step(token).argmax(-1)
        decode_peak, decode_reserved, end = meter.peak_bytes, meter.reserved_bytes, decoder.kv_bytes()
        bookkeeping, method = decoder.bookkeeping_bytes(), meter.method
    weights = bytes_of_weights(model)
    reserved, live = max((prefill_reserved, prefill_peak), (decode_reserved, decode_peak))
    predicted, formula = _predicted(model, strategy, case)
    at_prompt, at_end = predicted or (None, None)
    return MemoryRecord(
        weights=weights,
        kv_device=after.device,
        kv_host=after.host,
        summaries=after.summaries,
        state=after.state,
        kv_device_end=end.device,
        kv_host_end=end.host,
        predicted_device=at_prompt and at_prompt.device,
        predicted_host=at_prompt and at_prompt.host,
        predicted_device_end=at_end and at_end.device,
        predicted_host_end=at_end and at_end.host,
        formula="; ".join([formula, *_differences(at_prompt, after, at_end, end), _uncounted(bookkeeping)]),
        prefill_peak=prefill_peak,
        decode_peak=decode_peak,
        prefill_activations=max(0, prefill_peak - weights - after.on_device),
        reserved=reserved,
        fragmentation=max(0, reserved - live),
        method=method,
    )


def bytes_of_weights(model: torch.nn.Module) -> int:
    """Bytes of parameters and buffers, those that are shared once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
    }
    return sum(storages.values())


def _predicted(
    model: torch.nn.Module, strategy: Strategy, case: ProbeCase
) -> tuple[tuple[KVBytes, KVBytes] | None, str]:
    """What the formula gives after the prompt and at the end, and the formula in words."""
    number = model.dtype.itemsize
    try:
        # The last token is made and not read, so its entry is never stored.
        at_prompt, at_end = (
            kv_bytes_of(
                model.config,
                strategy,
                case.prompt_tokens,
                generated,
                case.batch,
                number,
                case.protocol,
                prefill_chunk=case.prefill_chunk,
            )
            for generated in (0, case.output_tokens - 1)
        )
        return (at_prompt, at_end), kv_formula(model.config, strategy, number)
    except KvaccError as error:
        return None, f"no formula: {error}"


def _differences(at_prompt: KVBytes | None, after: KVBytes, at_end: KVBytes | None, end: KVBytes):
    if at_prompt is None or at_end is None:
        return
    pairs = {"after the prompt": (at_prompt, after), "at the end": (at_end, end)}
    for when, (predicted, measured) in pairs.items():
        for part in ("device", "host", "summaries", "state"):
            off = getattr(measured, part) - getattr(predicted, part)
            if off:
                yield f"{part} {when} is {off:+,} bytes off the formula"


def _uncounted(bookkeeping: int) -> str:
    counted = "not counted: what the allocator holds beyond entries, copies while a token is computed"
    return f"{counted}, and {bookkeeping:,} bytes of positions and scores" if bookkeeping else counted
