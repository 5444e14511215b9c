"""A model from its configuration alone: where to find it, and how many parameters it has.

Parameters are counted by building the model without memory for its weights (torch's meta
device), so the count is exact for every family that transformers builds.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Any

from kvacc.errors import KvaccError, nearest
from kvacc.layer_sizes import LayerSize, layer_sizes

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
_REPEATED = ("kv_a_proj", "q_a_proj", "mlp.gate.", "router", "block_sparse_moe.gate")
"""Matrices that every device of tensor parallelism holds whole: down-projections to a latent that
all heads share, and the choice of experts."""
_GATES = ("gate_proj", "gate_up_proj", ".w3.", ".linear_v.")
_FUSED = ("qkv_proj", "query_key_value", "c_attn")


@dataclass(frozen=True)
class Parameters:
    """Counts of numbers.

    Attributes:
        total: all of them, shared ones once.
        embedding: of the input embedding where it is not the output embedding too: of it only
            the rows of the tokens at hand are read.
        output: of the output embedding.
        experts: of the experts of all mixture layers.
        matrices: of everything that multiplies each token, the output embedding and the experts
            included.
        buffer_bytes: constants beside the parameters, in bytes.
        gated: feed-forward layers have a gate beside their first projection.
        sdpa: the family runs with transformers' sdpa kernel.
        shapes: (how it is divided, count) for the share of one of several devices.
    """

    total: int
    embedding: int
    output: int
    experts: int
    matrices: int
    buffer_bytes: int
    gated: bool
    sdpa: bool
    shapes: tuple[tuple[str, int], ...] = field(repr=False)


@dataclass(frozen=True)
class PlannedModel:
    """What a plan knows of a model.

    Attributes:
        name: as asked for; origin: where the configuration came from.
        positions: the longest text that the model was made for, or None.
        experts, experts_per_token: routed experts of a layer, and those that a token uses; 0
            without a mixture.
        inner: numbers of a token in a feed-forward layer at its widest.
        dtype: of the published weights, such as ``bfloat16``.
    """

    name: str
    origin: str
    note: str
    config: Any = field(repr=False)
    layers: tuple[LayerSize, ...] = field(repr=False)
    parameters: Parameters
    experts: int
    experts_per_token: int
    hidden: int
    inner: int
    vocabulary: int
    positions: int | None
    dtype: str | None

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with: of the experts its own, and no input
        embedding, of which a row is looked up."""
        parameters = self.parameters
        dense = parameters.total - parameters.embedding - parameters.experts
        return dense + int(parameters.experts * self.used)

    @property
    def used(self) -> Fraction:
        """Share of the experts that a token uses."""
        return Fraction(self.experts_per_token, self.experts) if self.experts else Fraction(1)


@functools.cache
def packaged_models() -> dict[str, dict[str, Any]]:
    """Well-known models whose configurations come with kvacc, by name."""
    import yaml

    text = resources.files("kvacc.planner").joinpath("models.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def find_model(name: str) -> PlannedModel:
    """A model by the name of a packaged configuration, a hub name, an alias of ``kvacc models``,
    a folder with a config.json, or such a file.

    Raises:
        KvaccError: nothing of that name, or a configuration that cannot be used.
    """
    from transformers import AutoConfig

    table = packaged_models()
    by_hub = {entry["hub"].lower(): key for key, entry in table.items()}
    key = by_hub.get(name.lower(), name.lower())
    if key in table:
        entry = table[key]
        settings = dict(entry["config"])
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        return planned_model(config, name, f"packaged with kvacc: {entry['hub']}", entry.get("note", ""))
    path = Path(name).expanduser()
    if path.suffix == ".json" or path.is_file():
        return planned_model(_from_file(path), name, "file")
    from kvacc.embedded_model import EMBEDDED

    if not path.exists() and "/" not in name and name not in EMBEDDED:
        known = [*table, *EMBEDDED]
        raise KvaccError(
            f"unknown model {name!r}{nearest(name, known)}; give a config.json, a folder with one, a hub "
            f"name like owner/name, or one of: {', '.join(known)}"
        )
    from kvacc.models import _explained, _source

    where, files = _source(name, None, False, None)
    with _explained(name, None):
        config = AutoConfig.from_pretrained(where, **files)
    return planned_model(config, name, "folder" if path.is_dir() else "hub" if "/" in name else "embedded")


def _from_file(path: Path) -> Any:
    from transformers import AutoConfig

    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise KvaccError(f"model {str(path)!r}: there is no such file; give a config.json") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise KvaccError(f"model {str(path)!r} is no JSON ({error}); give a config.json") from None
    family = settings.pop("model_type", None) if isinstance(settings, dict) else None
    if not isinstance(family, str):
        raise KvaccError(f"model {str(path)!r} has no model_type; give the config.json of a model")
    try:
        return AutoConfig.for_model(family, **settings)
    except Exception as error:  # each family checks its settings in its own way
        raise KvaccError(
            f"model {str(path)!r}: transformers cannot use this configuration: {_first_line(error)}"
        ) from error


def planned_model(config, name: str = "model", origin: str = "configuration", note: str = "") -> PlannedModel:
    """The facts of a configuration (a transformers ``PreTrainedConfig``)."""
    decoder = config.get_text_config(decoder=True)
    layers = tuple(layer_sizes(config))
    parameters = count_parameters(config, layers)
    experts = _first(decoder, _EXPERT_COUNTS) if parameters.experts else 0
    per_token = _first(decoder, _EXPERTS_PER_TOKEN) if parameters.experts else 0
    if parameters.experts and not (experts and per_token):
        raise KvaccError(
            f"the configuration of model family {decoder.model_type!r} does not say how many experts a token "
            f"uses (looked for {', '.join(_EXPERTS_PER_TOKEN)})"
        )
    dtype = getattr(config, "dtype", None) or getattr(decoder, "dtype", None)
    return PlannedModel(
        name,
        origin,
        note,
        config,
        layers,
        parameters,
        experts,
        per_token,
        decoder.hidden_size,
        _inner(decoder, per_token, parameters.gated),
        decoder.vocab_size,
        getattr(decoder, "max_position_embeddings", None),
        str(dtype).removeprefix("torch.") if dtype else None,
    )


def count_parameters(config, layers: tuple[LayerSize, ...]) -> Parameters:
    """Count the parameters of the model that transformers builds of ``config``.

    Raises:
        KvaccError: transformers builds no causal language model of it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # a family may fail in ways of its own
        raise KvaccError(
            f"transformers cannot build a language model of this configuration: {_first_line(error)}"
        ) from error
    heads = next((size for size in layers if size.kind != "none" and not size.latent), None)
    given, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is None or head.weight is given.weight
    named = list(model.named_parameters())
    shapes: dict[str, int] = {}
    for parameter, tensor in named:
        for how, count in _division(parameter, tensor, heads):
            shapes[how] = shapes.get(how, 0) + count
    output = given.weight.numel() if tied else head.weight.numel()
    embedding = 0 if tied else given.weight.numel()
    total = sum(tensor.numel() for _, tensor in named)
    return Parameters(
        total,
        embedding,
        output,
        sum(tensor.numel() for parameter, tensor in named if ".experts." in parameter),
        sum(tensor.numel() for _, tensor in named if tensor.dim() > 1) - embedding,
        sum(buffer.nbytes for buffer in model.buffers()),
        any(word in parameter for parameter, _ in named for word in _GATES),
        bool(getattr(model, "_supports_sdpa", True)),
        tuple(shapes.items()),
    )


def _division(name: str, tensor, heads: LayerSize | None) -> list[tuple[str, int]]:
    """How the numbers of a parameter are divided among devices: ``divided``, ``kv`` (by KV heads,
    which are repeated where there are too few) or ``repeated``."""
    count = tensor.numel()
    if tensor.dim() == 1 or any(word in name for word in _REPEATED):
        return [("repeated", count)]
    if name.endswith((".k_proj.weight", ".v_proj.weight")):
        return [("kv", count)]
    if heads is not None and any(word in name for word in _FUSED):
        query = heads.query_heads * heads.key_size
        kv = count * heads.numbers_per_token // (query + heads.numbers_per_token)
        return [("divided", count - kv), ("kv", kv)]
    return [("divided", count)]


def parameters_on_device(model: PlannedModel, devices: int) -> int:
    """Parameters on each of ``devices`` under tensor parallelism, the most if they differ."""
    if devices == 1:
        return model.parameters.total
    kv_heads = max((size.heads for size in model.layers if not size.latent), default=1)
    total = 0
    for how, count in model.parameters.shapes:
        if how == "divided":
            count = -(-count // devices)
        elif how == "kv":
            count = count * -(-kv_heads // devices) // kv_heads
        total += count
    return total


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _first(config, names: tuple[str, ...]) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 0


def _inner(config, experts_per_token: int, gated: bool) -> int:
    """Numbers of a token in a feed-forward layer at its widest: projection and activation, and
    with a gate their product; of each expert that it uses one more, and the token's own states."""
    dense = _first(config, ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"))
    inner = (3 if gated else 2) * (dense or 4 * config.hidden_size)
    each = 4 * _first(config, ("moe_intermediate_size", "intermediate_size")) + 2 * config.hidden_size
    return max(inner, experts_per_token * each)
