"""InfiniGen's offline skewing: rotate each head so that few columns carry its attention.

``Q K' = (Q A)(K A)'`` for any orthogonal A, so a rotation changes no logit. With A the
right singular vectors of a head's queries over a calibration text, most of the queries'
size stands in the first columns, and attention can be guessed from those alone.

Source: InfiniGen (2406.19707); the authors' accuracy code for LLaMA, which rotates after
the rotary positions, since A does not commute with them.

Shapes: H KV heads (the query heads, where each has keys of its own), G query heads per KV
head, n calibration tokens, D key dimension.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from kvacc.embedded_model import cache_dir
from kvacc.engine.attention import AttentionCall, active, dense_attention
from kvacc.engine.layers import LayerKind
from kvacc.errors import KvaccError, unknown

RULES = ("paper", "union", "query")
FORMAT_VERSION = 1
"""Raise it when a skewing would come out differently: old cache files are then redone."""
ORTHOGONAL = 1e-5
"""The largest entry of ``A'A - I`` allowed."""
_SAMPLED = 64
_PARTS = ("rotation", "query_weight", "key_weight")


@dataclass(frozen=True)
class Skewing:
    """Rotations of a model's heads, and how much each rotated column carries.

    Attributes:
        rotation: layer -> float32 [H, D, D], orthogonal; a query or key [..., D] is rotated
            by ``x @ rotation[layer][head]``.
        query_weight: layer -> float32 [H, D], sum of ``|Q A|`` over the calibration tokens and
            the query heads of the group, with the queries scaled as the logits are.
        key_weight: layer -> float32 [H, D], sum of ``|K A|`` over the calibration tokens.
    """

    rotation: dict[int, torch.Tensor]
    query_weight: dict[int, torch.Tensor]
    key_weight: dict[int, torch.Tensor]

    def columns(self, layer: int, ratio: float | Fraction, rule: str = "paper") -> torch.Tensor:
        """The columns that attention is guessed from.

        Args:
            layer: a layer of ``rotation``.
            ratio: share of the D columns, in (0, 1]; ``r = ratio * D`` is rounded up, exactly
                (0.3 is three tenths).
            rule: ``paper``: the r largest sums of query and key weight, with queries as they are
                before their division by the square root of D (in the authors' OPT code, whose
                queries are divided already, the keys decide nearly alone). ``query`` (the authors'
                speed code): the r largest query weights. ``union`` (their accuracy code): the
                r largest query weights and the r largest key weights, up to 2 r columns.
                Heads whose two sets overlap more than another's are filled up with their
                next largest sums, so that a layer has one width.

        Returns:
            long [H, width], ascending. Of equal columns the lower is taken.

        Raises:
            KvaccError: unknown rule, or ratio out of range.
        """
        if rule not in RULES:
            raise unknown("column rule", rule, RULES)
        query, key = self.query_weight[layer], self.key_weight[layer]
        both = query * query.shape[-1] ** 0.5 + key
        count = _column_count(ratio, query.shape[-1])
        if rule == "paper":
            return _largest(both, count)
        if rule == "query":
            return _largest(query, count)
        either = torch.zeros_like(query, dtype=torch.bool)
        for weight in (query, key):
            either = either.scatter(-1, _largest(weight, count), True)
        return _largest(both.masked_fill(either, math.inf), int(either.sum(-1).max()))


def _column_count(ratio: float | Fraction, dimension: int) -> int:
    # The shortest decimal that prints as this float is what the user wrote.
    exact = ratio if isinstance(ratio, Fraction) else Fraction(repr(float(ratio)))
    if not 0 < exact <= 1:
        raise KvaccError(f"partial ratio {ratio} is not in (0, 1]; give the share of columns, such as 0.3")
    return math.ceil(exact * dimension)


def _largest(weight: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` largest along the last dimension, ascending."""
    order = weight.argsort(dim=-1, descending=True, stable=True)
    return order[..., :count].sort(-1).values


def compute_skewing(wrapped, tokens: Sequence[int], skew: bool = True) -> Skewing:
    """Skewing of every layer in which a strategy can act, from one full forward pass.

    Args:
        wrapped: a :class:`~kvacc.engine.wrapped.WrappedModel`.
        tokens: calibration token ids; what exceeds the model's context is left out.
        skew: False leaves the columns as they are (the paper's ablation, Fig. 13); their
            weights are still measured.

    Raises:
        KvaccError: fewer than 2 tokens, or queries or keys that are not finite.
    """
    tokens = _within_context(wrapped, tokens)
    recorder = _Recorder(wrapped.kinds, skew)
    # Only attention is of interest; a vocabulary projection of all tokens would take more
    # memory than everything else. No inference mode: its tensors refuse ordinary use later.
    head = wrapped.model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, -1:], *inputs[1:]))
    try:
        with active(recorder), torch.no_grad():
            wrapped.model(input_ids=torch.tensor([tokens], device=wrapped.device), use_cache=False)
    finally:
        handle.remove()
    return recorder.skewing


def _within_context(wrapped, tokens: Sequence[int]) -> list[int]:
    limit = getattr(wrapped.config, "max_position_embeddings", None)
    tokens = [int(token) for token in tokens][:limit]
    if len(tokens) < 2:
        raise KvaccError(
            f"calibration text has {len(tokens)} tokens, and rotations need 2 or more; give a longer text"
        )
    return tokens


class _Recorder:
    """A session with full attention that skews every layer as its queries and keys pass,
    so that those of all layers are never held at once."""

    def __init__(self, kinds: list[LayerKind], skew: bool) -> None:
        self.kinds = kinds
        self.skew = skew
        self.skewing = Skewing({}, {}, {})
        # Strategies act in full layers; where all layers slide, in those (WrappedModel.kinds_for).
        names = {kind.name for kind in kinds}
        self.acting = "full" if "full" in names else "sliding"

    def attend(self, call: AttentionCall) -> torch.Tensor:
        kind = self.kinds[call.layer]
        if kind.name == self.acting:
            self._record(call)
        position = torch.arange(call.key.shape[2], device=call.key.device)
        mask = kind.visible(position, position)
        if mask is not None:
            mask = (mask & (position[:, None] >= position))[None, None]
        return dense_attention(call, mask)

    def _record(self, call: AttentionCall) -> None:
        heads, dimension = call.key.shape[1], call.key.shape[3]
        # On the CPU in float64: one result on every device, and orthogonal to rounding.
        query = (call.query[0].cpu().double() * call.scaling).reshape(heads, -1, dimension)
        key = call.key[0].cpu().double()
        if not (query.isfinite().all() and key.isfinite().all()):
            raise KvaccError(
                f"layer {call.layer} computes queries or keys that are not finite from the calibration text; "
                "load the model with another dtype (bfloat16 or float32)"
            )
        rotation = _rotation(query) if self.skew else torch.eye(dimension).double().expand(heads, -1, -1)
        self.skewing.rotation[call.layer] = rotation.float().contiguous()
        self.skewing.query_weight[call.layer] = (query @ rotation).abs().sum(1).float()
        self.skewing.key_weight[call.layer] = (key @ rotation).abs().sum(1).float()


def _rotation(query: torch.Tensor) -> torch.Tensor:
    """Right singular vectors of ``query`` [H, G n, D] as columns, float64 [H, D, D].

    The largest singular value comes first. The authors order the columns by the product of
    the queries' and the keys' singular values, ascending; both are sorted alike, so that is
    the same order from the other end. Each column's largest entry (the first of equals) is
    made positive, because singular vectors come with either sign.
    """
    # As eigenvectors of Q'Q: the same in float64 (to 2e-15 of an SVD's, where queries were
    # computed in float32), many times faster, and D columns also of fewer than D queries.
    columns = torch.linalg.eigh(query.mT @ query).eigenvectors.flip(-1)
    peak = columns.abs().argmax(-2, keepdim=True)
    return torch.where(columns.gather(-2, peak) < 0, -columns, columns)


def skewing_for(
    wrapped, tokens: Sequence[int], digest: str, folder: Path | None = None, skew: bool = True
) -> Skewing:
    """:func:`compute_skewing`, kept on disk so that a model is calibrated once.

    A file that is damaged, or that was made from another model, text or version, is computed
    again. Where nothing can be written, the skewing is computed every time, with a warning.

    Args:
        wrapped, tokens, skew: as :func:`compute_skewing`.
        digest: of the calibration text (:func:`kvacc.calibration.calibration_digest`).
        folder: by default ``skewing`` in kvacc's cache folder.
    """
    tokens = _within_context(wrapped, tokens)
    model = fingerprint(wrapped.model)
    if model is None:
        return compute_skewing(wrapped, tokens, skew)
    source = json.dumps([FORMAT_VERSION, model, digest, tokens, skew])
    key = hashlib.sha256(source.encode()).hexdigest()
    path = (cache_dir() / "skewing" if folder is None else Path(folder)) / f"{key[:32]}.safetensors"
    stored = _read(path, key)
    if stored is not None:
        return stored
    skewing = compute_skewing(wrapped, tokens, skew)
    try:
        _write(path, key, skewing)
    except OSError as error:
        print(
            f"kvacc: cannot keep the skewing in {str(path.parent)!r} ({error.strerror or error}), so it will "
            "be computed again; set KVACC_CACHE_DIR to a folder that you may write",
            file=sys.stderr,
        )
    return skewing


def fingerprint(model) -> str | None:
    """SHA-256 of a model's configuration and weights; None when weights lie on no device.

    Weights enter by name, shape, type, 64 evenly spaced values, and the sum of their bits as
    integers, which any single change moves and no order of summation does.
    """
    settings = model.config.to_dict()
    for where_not_what in ("_name_or_path", "_attn_implementation", "transformers_version"):
        settings.pop(where_not_what, None)
    hashed = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        if parameter.is_meta:  # kept on disk and loaded layer by layer
            return None
        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]
        bits = parameter.detach().reshape(-1).view(whole)
        count = bits.numel()
        places = [i * count // _SAMPLED for i in range(_SAMPLED)] if count else []
        sample = bits[torch.tensor(places, dtype=torch.long, device=bits.device)].tolist()
        known = [name, list(parameter.shape), str(parameter.dtype), int(bits.sum(dtype=torch.int64)), sample]
        hashed.update(json.dumps(known).encode())
    return hashed.hexdigest()


def _tensors(skewing: Skewing) -> dict[str, torch.Tensor]:
    """All tensors by ``part.layer``, in one order."""
    return {f"{part}.{layer}": x for part in _PARTS for layer, x in sorted(getattr(skewing, part).items())}


def _content(tensors: dict[str, torch.Tensor]) -> str:
    hashed = hashlib.sha256()
    for name, x in tensors.items():
        hashed.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        hashed.update(x.numpy().tobytes())
    return hashed.hexdigest()


def _write(path: Path, key: str, skewing: Skewing) -> None:
    """Write a cache file, whole or not at all, also beside other writers."""
    tensors = _tensors(skewing)
    content = save(tensors, metadata={"key": key, "content": _content(tensors)})
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}.", dir=path.parent) as temporary:
        made = Path(temporary) / path.name
        made.write_bytes(content)
        os.replace(made, path)


def _read(path: Path, key: str) -> Skewing | None:
    """A cache file's skewing; None when it is not there, damaged, or made from something else."""
    skewing = Skewing({}, {}, {})
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            for name in file.keys():
                part, _, layer = name.partition(".")
                getattr(skewing, part)[int(layer)] = file.get_tensor(name)
    except (OSError, SafetensorError, ValueError, AttributeError, TypeError):
        return None
    if metadata.get("key") != key or metadata.get("content") != _content(_tensors(skewing)):
        return None
    return skewing
