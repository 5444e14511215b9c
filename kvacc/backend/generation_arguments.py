"""What a task asks of a generation: transformers' arguments, stop strings and lengths."""

from __future__ import annotations

import dataclasses
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from kvacc.errors import KvaccError

_SAMPLING = (
    "do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p", "num_beams", "num_return_sequences",
)  # fmt: skip
"""Arguments of ``generate`` that make it other than greedy."""


@dataclasses.dataclass(frozen=True)
class GenerationArguments:
    """A task's generation arguments.

    Attributes:
        options: transformers' own.
        until: stop strings.
        room: most new tokens.
        total: longest text, prompt included, if one is set.
    """

    options: dict[str, Any]
    until: list[str]
    room: int
    total: int | None

    @property
    def copies(self) -> int:
        """Rows that ``generate`` makes of each prompt."""
        return max(self.options.get("num_beams", 1), self.options.get("num_return_sequences", 1))

    @property
    def is_greedy(self) -> bool:
        return not self.options.get("do_sample") and self.copies == 1

    @property
    def limits(self) -> str:
        """What ends the answers, as text."""
        return repr((self.until, self.room, self.total))

    def greedy(self) -> GenerationArguments:
        """The same, with the most likely token at every step."""
        options = {name: value for name, value in self.options.items() if name not in _SAMPLING}
        return dataclasses.replace(self, options=options | {"do_sample": False})


def generation_arguments(hf: HFLM, instance: Instance) -> GenerationArguments:
    """The arguments of a request, with lm-eval's defaults.

    Raises:
        KvaccError: one of them cannot be used.
    """
    options = normalize_gen_kwargs(instance.args[1], hf.max_gen_toks)
    end = hf.tok_decode(hf.eot_token_id, skip_special_tokens=False)
    until = handle_stop_sequences(options.pop("until", None), eos=end)
    room = options.pop("max_gen_toks")
    if "cache_implementation" in options:
        raise KvaccError("generation argument cache_implementation: the strategy is the cache; leave it out")
    if "prefill_chunk_size" in options:
        raise KvaccError(
            "generation argument prefill_chunk_size: give the model prefill_chunk, which is checked "
            "against the strategy"
        )
    if hf.max_length - room < 1:
        raise KvaccError(
            f"max_gen_toks {room} leaves no room for a prompt in a context of {hf.max_length} tokens"
        )
    total = options.pop("max_length", None)
    return GenerationArguments(options, until, room, total)
