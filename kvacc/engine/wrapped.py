"""A transformers model whose attention kvacc answers, checked against the model's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace

import torch

from kvacc.engine import attention
from kvacc.engine.layers import LayerKind, layer_kinds, shares_latent
from kvacc.engine.packing import packing_of
from kvacc.engine.parallel import ParallelSession
from kvacc.engine.plan import Plan, Request, build_rows, make_plan
from kvacc.engine.prefix import Prefix
from kvacc.engine.prepacked import PrepackedWeights
from kvacc.engine.rotary import Rotation, find_rotation, has_rotary_positions
from kvacc.engine.skewing import skewing_for
from kvacc.engine.speculation import Inputs, Speculation, token_mixers
from kvacc.engine.stepping import RowReading, StepSession
from kvacc.errors import KvaccError
from kvacc.select_strategy import SelectStrategy, SpeculationSettings
from kvacc.strategy import EvictStrategy, Strategy, make_strategy

PARALLEL_PATH: ContextVar[bool] = ContextVar("kvacc_parallel_path", default=True)
"""False while latency or memory is measured: then :meth:`WrappedModel.parallel` refuses to run."""


class WrappedModel:
    """A causal language model under kvacc's attention function.

    Args:
        model: any decoder that calls attention through transformers' interface.
        check: compare with the model's own attention on a few tokens, so that a family
            that is wired in another way is refused instead of being scored wrongly.
        calibration: source (a strategy's ``calibration`` option) -> tokens of that text, for
            strategies that prepare themselves on some plain text; the caller has the tokenizer.

    Attributes:
        shares_trees: options of a document may share a row, and a batch is read without its
            padding. False for models with recurrent layers, or without explicit positions.

    Raises:
        KvaccError: the family does not call the interface, or computes something else.
    """

    def __init__(self, model, check: bool = True, calibration: Callable[[str], list[int]] | None = None):
        self.model = model.eval()
        self.calibration = calibration
        self.config = model.config.get_text_config(decoder=True)
        self.family = self.config.model_type
        if not model._can_set_attn_implementation():
            raise KvaccError(
                f"model family {self.family!r} does not call attention through transformers' interface, "
                "so no strategy can act in it; use another family (README, 'Models')"
            )
        attention.register()
        self.kinds = layer_kinds(model.config)
        if all(kind.name == "other" for kind in self.kinds):
            raise KvaccError(
                f"model family {self.family!r} has no attention layer, so there are no entries for a "
                "strategy to manage; use another family (README, 'Models')"
            )
        self.latent = shares_latent(model.config)
        self._rotation: Rotation | None = None
        self._modules: dict[int, torch.nn.Module] = {}
        self._speculations: dict[SpeculationSettings, Speculation] = {}
        self._head_only: bool | None = None
        self.prepacked = PrepackedWeights(model)
        accepts = inspect.signature(model.forward).parameters
        recurrent = any(kind.name == "other" for kind in self.kinds)
        self.shares_trees = "position_ids" in accepts and not recurrent
        self.takes_positions = "position_ids" in accepts
        own = self._own_logits() if check else None
        model.set_attn_implementation(attention.NAME)
        if check:
            self._check(own)

    def kinds_for(self, strategy: Strategy) -> list[LayerKind]:
        """Layer kinds under ``strategy``.

        Strategies act in full-attention layers. A model whose every layer slides with one
        window (Mistral 7B v0.1) attends fully as long as nothing is older than the
        window, so its layers are treated as full up to that length.

        Raises:
            KvaccError: there is no layer in which the strategy could act.
        """
        attending = {kind for kind in self.kinds if kind.name != "other"}
        acts = isinstance(strategy, (EvictStrategy, SelectStrategy))
        if not acts or any(kind.name == "full" for kind in attending):
            return self.kinds
        if len(attending) == 1 and next(iter(attending)).name == "sliding":
            return [kind if kind.name == "other" else LayerKind("full", kind.window) for kind in self.kinds]
        raise KvaccError(
            f"model family {self.family!r} has no full-attention layer here, so strategy {strategy.name!r} "
            "could not act; use strategy=full"
        )

    @property
    def layers(self) -> int:
        """Number of layers, recurrent ones included."""
        return len(self.kinds)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def rotation_for(self, strategy: Strategy) -> Rotation | None:
        """The model's rotary convention, found once, if ``strategy`` needs it."""
        if not strategy.needs_rotation:
            return None
        if self._rotation is None:
            full = [i for i, kind in enumerate(self.kinds_for(strategy)) if kind.name == "full"]
            self._rotation = find_rotation(self.model, full, self.latent)
        return self._rotation

    def speculation_for(self, strategy: Strategy) -> Speculation | None:
        """Skewed partial queries and keys, prepared once per model and calibration text."""
        settings = strategy.speculation if isinstance(strategy, SelectStrategy) else None
        if settings is None:
            return None
        if self.calibration is None:
            raise KvaccError(
                f"{strategy!r} prepares itself on a text: give WrappedModel calibration=, a function "
                "that returns the text's tokens"
            )
        if settings not in self._speculations:
            tokens = self.calibration(settings.calibration)
            skewing = skewing_for(self, tokens, settings.calibration_digest, skew=settings.skew)
            recurrent = {layer for layer, kind in enumerate(self.kinds) if kind.name == "other"}
            self._speculations[settings] = Speculation(
                Inputs(self.attention_modules(), token_mixers(self.model, recurrent)),
                skewing,
                settings,
                foldable=not has_rotary_positions(self.model),
            )
        return self._speculations[settings]

    def attention_modules(self) -> dict[int, torch.nn.Module]:
        """layer -> the module whose attention kvacc answers, as seen in a forward pass."""
        if not self._modules:
            rows = build_rows(self._probe_requests()[:1], share=False)
            full = make_strategy("full")
            self._modules = self.parallel(make_plan(rows, full), full)[1].modules
        return self._modules

    def read_prefix(
        self, request: Request, tokens: int, strategy: Strategy, reference: bool = False
    ) -> Prefix:
        """Read the first ``tokens`` tokens of a request, once for all that begin like it."""
        beginning = replace(request, tokens=request.tokens[:tokens], targets=())
        plan = make_plan(build_rows([(0, beginning)]), strategy)
        _, session = self.parallel(plan, strategy, reference=reference, store=True)
        return Prefix(tokens, session.stored)

    def parallel(
        self,
        plan: Plan,
        strategy: Strategy,
        record: bool = False,
        reference: bool = False,
        weigh: bool = False,
        keep_hidden: bool = False,
        whole_logits: bool = True,
        prefix: Prefix | None = None,
        store: bool = False,
    ) -> tuple[torch.Tensor | ProjectedLogits, ParallelSession]:
        """One forward pass over a plan, which may continue a ``prefix``.

        Args:
            weigh: also measure the attention mass of each head, see :class:`ParallelSession`.
            keep_hidden: keep ``session.hidden_states``.
            whole_logits: False computes the logits in the blocks of rows in which they are
                asked for, so that they never exist at once.
            store: keep ``session.stored``, what later tokens read of the plan.

        Returns:
            logits [N, vocabulary] of the N counted queries in row order, and the session.

        Raises:
            KvaccError: latency or memory is being measured, which the parallel path cannot give.
        """
        if not PARALLEL_PATH.get():
            raise KvaccError(
                "the parallel path frees nothing and reads everything at once, so no latency or memory "
                "figure may come from it; use the step path"
            )
        plan = plan.to(self.device)
        packing = packing_of(plan.segment >= 0) if self.shares_trees else None
        rotation = self.rotation_for(strategy)
        session = ParallelSession(
            plan,
            strategy,
            self.kinds_for(strategy),
            rotation,
            self.latent,
            record,
            reference,
            self.speculation_for(strategy),
            weigh,
            prefix,
            store,
            packing,
        )
        tokens, position, counted = plan.tokens, plan.position, plan.counted
        if packing:
            tokens, position, counted = map(packing.pack, (tokens, position, counted))
        arguments = {"position_ids": position} if self.takes_positions else {}
        head = _only(self.model, counted, whole_logits)
        with attention.active(session), head, torch.inference_mode():
            out = self.model(input_ids=tokens, use_cache=False, **arguments)
        self._require_calls(session.layers)
        if keep_hidden:
            session.hidden_states = head.hidden_states
        logits = out.logits[0] if whole_logits else ProjectedLogits(self, head.hidden_states)
        return logits, session

    @property
    def vocabulary(self) -> int:
        """Number of logits, padding of the vocabulary included."""
        head = self.model.get_output_embeddings()
        return getattr(head, "out_features", None) or head.weight.shape[0]

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocabulary] from what the output embedding is given, [n, D].

        Everything that the model does behind its output embedding (Cohere and Granite scale
        logits, Gemma 2 caps them) is done by the model itself: it reads one token, and the
        embedding is given these states in place of that token's. Where the first call shows
        that the embedding alone gives the same bits, it is called alone from then on.
        """
        head = self.model.get_output_embeddings()
        if self._head_only:
            with torch.inference_mode():
                return head(hidden_states[None])[0]
        full = make_strategy("full")
        plan = make_plan(build_rows([(0, Request((2,), (2,), dense=0, compressed=1))]), full).to(self.device)
        session = ParallelSession(plan, full, self.kinds, latent=self.latent)
        arguments = {"position_ids": plan.position} if self.takes_positions else {}
        with attention.active(session), _instead(head, hidden_states), torch.inference_mode():
            logits = self.model(input_ids=plan.tokens, use_cache=False, **arguments).logits[0]
        if self._head_only is None:
            with torch.inference_mode():
                alone = head(hidden_states[None])[0]
            same = alone.dtype == logits.dtype and alone.shape == logits.shape
            self._head_only = same and torch.equal(alone, logits)
        return logits

    def step(self, strategy: Strategy, rows: Sequence[RowReading], record: bool = False) -> StepSession:
        """A fresh session for decoding, with a cache of its own. With ``record`` it notes what
        every query reads."""
        return StepSession(
            self.model.config,
            strategy,
            self.kinds_for(strategy),
            rows,
            self.rotation_for(strategy),
            self.latent,
            self.device,
            self.speculation_for(strategy),
            record,
        )

    def _require_calls(self, layers: int) -> None:
        expected = sum(kind.name != "other" for kind in self.kinds)
        if layers != expected:
            raise KvaccError(
                f"model family {self.family!r} called attention {layers} times where {expected} layers "
                "attend; its results cannot be trusted with any strategy"
            )

    def _probe_requests(self) -> list[tuple[int, Request]]:
        """Two continuations of one prefix, long enough for small sliding windows."""
        size = min(self.config.vocab_size - 1, 97)
        prefix = [2 + (5 * i) % (size - 2) for i in range(12)]
        tails = [[3, 4, 5], [6, 7, 8]]
        return [
            (i, Request((*prefix, *tail), tuple(tail), dense=0, compressed=len(prefix)))
            for i, tail in enumerate(tails)
        ]

    def _own_logits(self) -> torch.Tensor:
        """Logits [2, 3, vocabulary] of the probe by the model's own eager attention."""
        self.model.set_attn_implementation("eager")
        tokens = torch.tensor([r.tokens for _, r in self._probe_requests()], device=self.device)
        with torch.inference_mode():
            return self.model(input_ids=tokens, use_cache=False).logits[:, -3:].float()

    def _check(self, own: torch.Tensor) -> None:
        full = make_strategy("full")
        exact = self.model.dtype == torch.float32
        # Half precision: another order of sums moves single logits by a good share of their
        # spread, so their typical difference is compared. Another function is off by all of it.
        allowed = 1e-3 if exact else 0.2 * float(own.std()) + 1e-3
        probe = self._probe_requests()
        for share in (True, False) if self.shares_trees else (False,):
            self.shares_trees = share
            rows, expected = build_rows(probe, share), own
            if share:
                # A tree and a shorter row: branches and packed tokens at once.
                rows, expected = rows + build_rows(probe[:1]), torch.cat([own, own[:1]])
            logits, _ = self.parallel(make_plan(rows, full), full)
            off = (logits.float().view_as(expected) - expected).abs()
            difference = float(off.max() if exact else off.square().mean().sqrt())
            if difference <= allowed:
                return
        raise KvaccError(
            f"model family {self.family!r} computes something else through kvacc's attention than by itself "
            f"(logit difference {difference:.3g}, allowed {allowed:.3g}); it is not supported"
        )


class _only:
    """Let the output embedding see the counted positions only: [B, T, D] -> [1, N, D].

    The vocabulary projection is a large share of a small model's work, and models that
    scale or cap their logits afterwards do so elementwise, so nothing else changes.

    Args:
        whole: False lets it see one of them only.

    Attributes:
        hidden_states: [N, D] of all counted positions, after the pass.
    """

    def __init__(self, model, counted: torch.Tensor, whole: bool = True):
        self.head = model.get_output_embeddings()
        self.counted = counted
        self.whole = whole
        self.hidden_states: torch.Tensor | None = None

    def __enter__(self) -> None:
        self.handle = self.head.register_forward_pre_hook(self._gather)

    def __exit__(self, *exc) -> None:
        self.handle.remove()

    def _gather(self, module, arguments):
        hidden = arguments[0]
        self.counted = self.counted.to(hidden.device)  # the last of a model's devices
        if hidden.shape[:2] != self.counted.shape:
            raise RuntimeError(
                f"output embedding got {tuple(hidden.shape)}, expected {tuple(self.counted.shape)}"
            )
        self.hidden_states = hidden[self.counted]
        seen = self.hidden_states if self.whole else self.hidden_states[:1]
        return (seen[None], *arguments[1:])


class _instead:
    """Give the output embedding other hidden states [n, D] than the model computed."""

    def __init__(self, head: torch.nn.Module, hidden_states: torch.Tensor):
        self.head = head
        self.hidden_states = hidden_states

    def __enter__(self) -> None:
        self.handle = self.head.register_forward_pre_hook(self._replace)

    def __exit__(self, *exc) -> None:
        self.handle.remove()

    def _replace(self, module, arguments):
        own = arguments[0]
        return (self.hidden_states[None].to(device=own.device, dtype=own.dtype), *arguments[1:])


class ProjectedLogits:
    """Logits [N, vocabulary] computed when a block of their rows is asked for."""

    def __init__(self, wrapped: WrappedModel, hidden_states: torch.Tensor):
        self.wrapped = wrapped
        self.hidden_states = hidden_states

    @property
    def shape(self) -> tuple[int, int]:
        """(N, vocabulary)."""
        return len(self.hidden_states), self.wrapped.vocabulary

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return self.wrapped.project(self.hidden_states[rows])
