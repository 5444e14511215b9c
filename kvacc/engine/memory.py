"""How many tokens a batch may hold, from the memory that is free.

An estimate, on the safe side; a batch that does not fit all the same is halved and tried
again (:func:`kvacc.engine.scoring.score_documents`), without losing what is finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

MOST_TOKENS = {"cpu": 1024, "cuda": 65536}
"""More than these bring no speed: matrix multiplications run at their best long before, and the
states between them fall out of the processor's caches."""
MOST_PROMPT_TOKENS = {"cpu": 8192, "cuda": 65536}
"""The same for the prompts of a generation: there, more rows mean fewer decoding passes."""
LEAST_TOKENS = 256
USABLE = 0.5
"""Share of the free memory that a batch may take: the estimate knows no allocator's waste."""
_LIMIT_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def batch_tokens_for(model, most_tokens: Mapping[str, int] = MOST_TOKENS) -> int:
    """Tokens per forward pass of ``model`` that fit in its device's free memory."""
    device = model.device
    most = most_tokens.get(device.type, most_tokens["cpu"])
    return int(max(LEAST_TOKENS, min(most, USABLE * free_bytes(device) // bytes_per_token(model))))


def bytes_per_token(model) -> int:
    """What one token of a batch needs at the widest point of a forward pass, in bytes.

    The states beside a layer (its input, its residual, queries, keys, values, their copies for
    attention) and a feed-forward layer's intermediate states; or, when that is more, the logits
    of a token and their float32 log-softmax. Layers are run one after the other, and no cache
    is kept.
    """
    config = model.config.get_text_config(decoder=True)
    number = model.dtype.itemsize
    hidden = config.hidden_size
    inner = max(_numbers(config, ("intermediate_size", "ffn_dim", "n_inner")), default=4 * hidden)
    experts = max(_numbers(config, ("num_experts_per_tok",)), default=1)
    # Attention is computed in float32 where a strategy scores it.
    layer = number * (6 * hidden + 3 * inner * experts) + 4 * 6 * hidden
    logits = config.vocab_size * (number + 2 * 4)
    return max(layer, logits)


def free_bytes(device: torch.device) -> int:
    """Free memory of a device in bytes; on a processor, within the limit of its control group."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    import psutil

    free = psutil.virtual_memory().available
    for limit, used in _LIMIT_FILES:
        try:
            free = min(free, int(limit.read_text()) - int(used.read_text()))
        except (OSError, ValueError):
            continue  # no such group, or "max"
    return max(0, free)


def _numbers(config, names: tuple[str, ...]) -> list[int]:
    values = (getattr(config, name, None) for name in names)
    return [value for value in values if isinstance(value, int)]
