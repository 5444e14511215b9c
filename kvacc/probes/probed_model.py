"""A loaded model as the probes use it: prompts of real text, and fresh decoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvacc.calibration import calibration_text
from kvacc.config import ModelEntry
from kvacc.engine.layers import layer_kinds
from kvacc.engine.wrapped import WrappedModel
from kvacc.errors import KvaccError
from kvacc.probes.cases import PlannedCase
from kvacc.probes.config import OWN_KERNEL
from kvacc.probes.decoder import Decoder, make_decoder
from kvacc.probes.records import ProbeCase

_ROW_OFFSET = 127
"""Tokens between the beginnings of a batch's rows: they read different text."""


class ProbedModel:
    """A model of transformers, wrapped only where kvacc's own kernel is asked for.

    Args:
        model: any causal language model, recurrent ones included.
        encode: text -> its tokens, without special ones.
        name: what it was asked for by.
    """

    def __init__(self, model, encode: Callable[[str], list[int]], name: str | None = None) -> None:
        self.model = model.eval()
        self.encode = encode
        self.name = name
        self._wrapped: WrappedModel | None = None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def wrapped(self) -> WrappedModel:
        """Under kvacc's attention function.

        Raises:
            KvaccError: the model's family is not one in which strategies can act.
        """
        if self._wrapped is None:
            if all(kind.name == "other" for kind in layer_kinds(self.model.config)):
                raise KvaccError(
                    f"model family {self.model.config.model_type!r} has no attention in which a strategy "
                    "could act; use strategy full with kernel eager"
                )
            self._wrapped = WrappedModel(
                self.model, calibration=lambda source: self.encode(calibration_text(source))
            )
        return self._wrapped

    def fingerprint(self) -> dict[str, Any]:
        """What exactly was loaded (:func:`kvacc.models.fingerprint`)."""
        from kvacc.models import fingerprint

        return fingerprint(self.model, self.name)

    def prompts(self, tokens: int, batch: int) -> torch.Tensor:
        """long [B, n] on the device: prose, from the beginning again where it is too short."""
        text = torch.tensor(self.encode(calibration_text()), dtype=torch.long)
        if not len(text):
            raise KvaccError(f"model {self.name!r}: its tokenizer makes no tokens of plain text")
        place = torch.arange(tokens) + _ROW_OFFSET * torch.arange(batch)[:, None]
        return text[place % len(text)].to(self.device)

    def require_length(self, case: ProbeCase) -> None:
        """Raise KvaccError for a case that is longer than the model's positions."""
        config = self.model.config.get_text_config(decoder=True)
        most = getattr(config, "max_position_embeddings", None)
        read = case.prompt_tokens + case.output_tokens - 1  # the last token is made, and not read
        if isinstance(most, int) and read > most:
            raise KvaccError(
                f"a prompt of {case.prompt_tokens} with {case.output_tokens} tokens after it exceeds the "
                f"model's {most} positions"
            )

    def decoder(self, planned: PlannedCase) -> Decoder:
        """A fresh decoder for a case.

        Raises:
            KvaccError: the strategy or kernel cannot be used with this model or on this device.
        """
        case = planned.case
        own = case.kernel == OWN_KERNEL
        return make_decoder(
            self.wrapped if own else self.model,
            planned.strategy,
            case.prompt_tokens,
            case.batch,
            case.protocol,
            case.kernel,
        )


def load_probed_model(entry: ModelEntry) -> ProbedModel:
    """Load a model and its tokenizer.

    Raises:
        KvaccError: as :func:`kvacc.models.load_model`.
    """
    from kvacc.models import load_model, load_tokenizer

    model = load_model(**entry.model_dump())
    names = ("revision", "trust_remote_code", "gguf_file")
    tokenizer = load_tokenizer(entry.pretrained, **{name: getattr(entry, name) for name in names})
    return ProbedModel(model, lambda text: tokenizer.encode(text, add_special_tokens=False), entry.pretrained)
