"""What a strategy that keeps its cache in host memory moves for each token, and what waits for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvacc.engine.offload import OffloadedLayer
from kvacc.engine.transfer_meter import TransferMeter
from kvacc.probes.decoder import Decoder, step_path_only
from kvacc.probes.records import TransferRecord

PROCESSOR_METHOD = (
    "processor's clock around the copies between two allocations of one memory, which stand for host "
    "and device; they are made by the thread that computes, so all of their time is exposed; seconds are "
    "of a token of all rows together"
)
CUDA_METHOD = (
    "CUDA events around the copies and around waiting for them; gathering in host memory keeps the "
    "thread that starts all work, and counts as exposed; seconds are of a token of all rows together"
)


def measure_transfers(
    make: Callable[[], Decoder], prompts: torch.Tensor, output_tokens: int, chunk: int | None = None
) -> TransferRecord | None:
    """Read the prompts, make tokens, and measure what moves meanwhile.

    Args:
        make: a fresh decoder.
        prompts: long [B, n].
        output_tokens: tokens made; the first comes from the prompt, so there are one fewer
            passes that move anything.
        chunk: tokens per prefill pass; None is all.

    Returns:
        Figures per token and row; None where nothing is offloaded, or no token is read after
        the prompt.

    Raises:
        KvaccError: something would have used the parallel path.
    """
    batch, passes = prompts.shape[0], output_tokens - 1
    if passes < 1:
        return None
    with step_path_only():
        decoder = make()
        token = decoder.prefill(prompts, chunk).argmax(-1)
        layers = [layer for layer in decoder.cache.layers if isinstance(layer, OffloadedLayer)]
        if not layers:
            return None
        of_prompt, passes_before = decoder.kv_bytes().host, len(decoder.moved_bytes)
        meter = TransferMeter(prompts.device)
        for layer in layers:
            layer.meter = meter
        for _ in range(passes):
            token = decoder.step(token).argmax(-1)
        hidden, exposed = meter.seconds()
        tokens = passes * batch
        return TransferRecord(
            bytes_to_device=sum(decoder.moved_bytes[passes_before:]) / tokens,
            bytes_to_host=(decoder.kv_bytes().host - of_prompt) / tokens,
            bytes_to_host_of_prompt=of_prompt,
            prefetched_share=meter.entries_ahead / meter.entries if meter.entries else None,
            # Rows of a batch wait together: a pass's time is no row's alone, and is not divided.
            seconds_hidden=hidden / passes,
            seconds_exposed=exposed / passes,
            method=CUDA_METHOD if prompts.device.type == "cuda" else PROCESSOR_METHOD,
        )
