"""`RoutedExperts`: the routed experts of one layer, as users hold them.

A layer that exists is complete: it is built once, from `LayerParts`. Later only whole experts are replaced, by pushing
tensors and calling `finish` (a refit); until then it refuses to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lancebill.backends.base import Executor
from lancebill.checkpoint.read.config import config_of_model
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve.manifest import LayerIndex
from lancebill.checkpoint.resolve.naming import Claim
from lancebill.errors import LaunchError, MissingTensor
from lancebill.formats.stored import Config, Stored
from lancebill.layer import compiled_op
from lancebill.layer.check_tensors import (
    check_dense,
    check_logits,
    check_output,
    check_routing,
    check_stored,
)
from lancebill.layer.collect import ExpertCollector, forget_refused, raise_missing
from lancebill.layer.from_tensors import GATE_UP, ExpertTensors, parts_from_tensors
from lancebill.layer.movable_experts import MovableExperts
from lancebill.layer.no_gradient import without_gradient
from lancebill.layer.parts import LayerParts, pull
from lancebill.layer.push import PushedLayer, push_claimed
from lancebill.layer.random_layer import random_parts
from lancebill.layer.recipe import LoadOptions, Recipe
from lancebill.layer.reserve import reserve
from lancebill.layer.rules import WeightRules
from lancebill.moe.activation import Activation
from lancebill.moe.dispatch import Dispatch, Indexed, localize
from lancebill.moe.router_tensors import RouterTensors, route_as_defined
from lancebill.moe.routing import Routed
from lancebill.split.executor import SplitExecutor
from lancebill.split.host_calls import HostCalls
from lancebill.split.mover import MOVER

ROUTER_ROLES = ("bias", "correction", "table", "scale")


class RoutedExperts(MovableExperts):
    """The routed experts of one layer on this rank; those that do not fit the device are in `host_experts`."""

    router_bias: Tensor | None
    router_correction: Tensor | None
    router_table: Tensor | None
    router_scale: Tensor | None

    def __init__(self, parts: LayerParts) -> None:
        super().__init__(parts.choice, parts.packed)
        self.routing, self.report = parts.routing, parts.report
        self.refit = None if parts.recipe is None else ExpertCollector(parts.recipe)
        self.shared_experts: nn.Module | None = None
        self.host_experts: HostExperts | None = None if parts.host is None else HostExperts(parts.host)
        self.is_split = parts.host is not None
        self.let_move(parts.moves)
        self.register_buffer("expert_map", parts.expert_map, persistent=False)
        for role in ROUTER_ROLES:
            self.register_buffer(f"router_{role}", None, persistent=False)
        for role, tensor in parts.router.items():
            self.take_router(role, tensor)

    def _make_executor(self) -> Executor:
        own, host = super()._make_executor(), self.host_experts
        if host is None:
            return own
        if self.moves is not None:
            assert self.expert_map is not None
            self.moves.attach(own, host, self.expert_map)
            MOVER.add(self.moves)
        return SplitExecutor(own, host, self.moves)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RoutedExperts:
        """Moves all tensors, but keeps the router's in fp32: rounding them would change which experts are selected."""
        before = {name: buffer for name, buffer in self.named_buffers(recurse=False) if buffer.is_floating_point()}
        super()._apply(fn, recurse)
        for name, now in list(self.named_buffers(recurse=False)):
            if name in before and now.dtype != before[name].dtype:
                self.register_buffer(name, before[name].to(now.device), persistent=False)
        return self

    @classmethod
    def from_checkpoint(cls, path: str | Path | Checkpoint, layer: int, **options: Any) -> RoutedExperts:
        """The routed experts of `layer`, with the router's bias, correction bias and hash table.

        `ModelExperts` reads the headers once for all layers. Options are the fields of `LoadOptions`: device,
        placement, backend, weights, activations, dtype (of the inputs), order, naming, routing, top_k, activation,
        progress, mixture (where layers have several: "text" or "vision"), router (False: the engine routes).
        `weights` and `activations` take a spec, a spec for each matrix, or rules by layer; activations="checkpoint"
        follows what the checkpoint declares.
        """
        load_options = LoadOptions(**options)
        checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)
        index = LayerIndex(checkpoint.config, checkpoint.headers, load_options.family(checkpoint.config.model))
        recipe = Recipe.resolve(index, layer, load_options, where=str(checkpoint.path))
        return cls(pull(recipe, checkpoint.read))

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any] | Config,
        layer: int,
        *,
        tensors: Mapping[str, Stored] | None = None,
        **options: Any,
    ) -> PushedLayer[RoutedExperts]:
        """For engines that own the files: push tensors into what this returns; its `finish()` gives the layer.

        `config` is the model's config.json as a dict; `tensors` are names and headers of the checkpoint, if known.
        Options as in `from_checkpoint`. `ModelExperts` does this for all layers of a model.
        """
        load_options = LoadOptions(**options)
        model = config if isinstance(config, Config) else config_of_model(config)
        if tensors is None:
            return PushedLayer(cls, model, layer, load_options)
        index = LayerIndex(model, tensors, load_options.family(model.model))
        return PushedLayer(cls, Recipe.resolve(index, layer, load_options, where=model.source), layer, load_options)

    @classmethod
    def from_tensors(
        cls,
        w13: ExpertTensors,
        w2: ExpertTensors,
        spec: WeightRules,
        *,
        top_k: int,
        activation: Activation | str = "silu",
        rows: str = GATE_UP,
        layer: int = 0,
        expert_map: Sequence[int] | Tensor | None = None,
        **options: Any,
    ) -> RoutedExperts:
        """A layer from tensors that an engine holds, packed on their device unless `device` says another.

        `spec` says what the codes mean: "mxfp4", "int4-g128:fp16", or one for each matrix. `rows` is the order of w13's
        rows: "gate_up", "up_gate" or "interleaved". The tensors are whole, and `placement` cuts this rank's share; or
        they are this rank's own, and `expert_map` has the slot of every global expert. Other options are those of
        `from_checkpoint`; the tensors are not used after the call.
        """
        given = {"device": str(w13.codes.device), **options, "top_k": top_k, "activation": activation}
        load_options = LoadOptions(**given)
        parts = parts_from_tensors(w13, w2, spec, rows=rows, layer=layer, expert_map=expert_map, options=load_options)
        return cls(parts)

    @classmethod
    def random(
        cls,
        config: Mapping[str, Any] | Config,
        layer: int,
        *,
        seed: int = 0,
        tensors: Mapping[str, Stored] | None = None,
        **options: Any,
    ) -> RoutedExperts:
        """A layer as `config` describes it with random weights, for engines that start without a checkpoint.

        Values have variance 1 / K and depend on the seed, the layer and the expert. `tensors` are the checkpoint's
        headers, where a config alone does not say how weights are stored (GGUF). Options as in `from_checkpoint`.
        """
        load_options = LoadOptions(**options)
        model = config if isinstance(config, Config) else config_of_model(config)
        return cls(random_parts(Recipe.expected(model, layer, load_options, tensors), seed))

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, out: Tensor | None = None) -> Tensor:
        """x [M, H] through the experts each row is routed to: [M, H], weighted and summed.

        Ids are global. Ids of other ranks and -1 are skipped.
        """
        if torch.compiler.is_compiling():
            made: Tensor = compiled_op.routed_experts(x, topk_ids, topk_weights, self.tag)
            made = without_gradient(made, x, topk_weights)
            return made if out is None else out.copy_(made)
        try:
            if not x.requires_grad and not topk_weights.requires_grad:
                return self._forward(x, topk_ids, topk_weights, out)
            with torch.no_grad():
                result = self._forward(x, topk_ids, topk_weights, out)
        except (AttributeError, RuntimeError):
            check_dense(x=x, topk_ids=topk_ids, topk_weights=topk_weights, out=x if out is None else out)
            raise
        return without_gradient(result, x, topk_weights)

    def _forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor | None) -> Tensor:
        settled = self.refit is None or self.refit.settled
        if settled and self._executor is not None:
            fast_call = self._executor.fast_calls.get(x.numel())
            if fast_call is not None:
                result, places = torch.empty_like(x) if out is None else out, self._buffers["expert_map"]
                given = (x, topk_ids, topk_weights, result)
                if fast_call(*given) if places is None else fast_call(*given, places):
                    return result
        self.check(x, topk_ids, topk_weights)
        if out is not None:
            check_output(out, x)
        result = self.compute(x, topk_ids, topk_weights, torch.empty_like(x) if out is None else out)
        if self.executor.accepts_any_ids:
            self.executor.prepare_fast_call(x, self._buffers["expert_map"] is not None)
        return result

    def compute(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor) -> Tensor:
        """`forward` without the checks of the layer. Executors refuse tensors of other devices."""
        if x.numel() == 0:
            return out
        places = self._buffers["expert_map"]
        if self.executor.accepts_any_ids:
            return self.executor.run(x, Indexed(topk_ids, topk_weights, places), out)
        self._check_place(x=x, topk_ids=topk_ids, topk_weights=topk_weights, out=out)
        ids, weights = localize(topk_ids, places, self.problem.global_experts), topk_weights.float()
        return self.executor.run(x, Indexed(ids.contiguous(), weights.contiguous()), out)

    def reserve(self, max_tokens: int) -> int:
        """`lancebill.reserve` for this layer alone."""
        return reserve(self, max_tokens)

    def run_local(self, x: Tensor, dispatch: Dispatch, out: Tensor) -> Tensor:
        """Run rows that the caller has already dispatched, with local ids."""
        self._refuse_split()
        return self.executor.run(x, dispatch, out)

    def forward_routed(self, x: Tensor, router_logits: Tensor, *, input_ids: Tensor | None = None) -> Tensor:
        """Routing inside: from the gate's logits [M, E] to the output, shared experts added."""
        if torch.compiler.is_compiling():
            out: Tensor = compiled_op.routed_forward(x, router_logits, input_ids, self.tag)
            out = without_gradient(out, x, router_logits)
        else:
            out = self.route_and_run(x, router_logits, input_ids)
        return self._add_shared(x, out)

    def route_and_run(self, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """`forward_routed` without shared experts."""
        try:
            routed = self.route(x, router_logits, input_ids)
        except (AttributeError, RuntimeError):
            check_dense(x=x, router_logits=router_logits)
            raise
        out = self._scaled(x, self.forward(x, topk_ids=routed.ids, topk_weights=routed.weights), routed)
        return without_gradient(out, router_logits)

    def route(self, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None) -> Routed:
        """The experts and weights of each row, with the router's own bias, correction, table and scale."""
        routed = self._routed(x, router_logits, input_ids)
        if self.routing is None or not self.routing.expert_scale:
            return routed
        scale = self._buffers["router_scale"]
        if scale is None:
            raise LaunchError("this routing needs a scale for each expert")
        return replace(routed, weights=routed.weights * scale[routed.ids.long().clamp(min=0)])

    def _routed(self, x: Tensor, router_logits: Tensor, input_ids: Tensor | None) -> Routed:
        held, compiling = self._buffers, torch.compiler.is_compiling()  # attributes take ten times as long to find
        router = RouterTensors(held["router_bias"], held["router_correction"], held["router_table"])
        if not compiling and self._executor is not None and (self.refit is None or self.refit.settled):
            fast_route = self._executor.fast_routes.get(router_logits.numel())
            routed = (
                None
                if fast_route is None or self.routing is None
                else fast_route(self.routing, router_logits, router, x)
            )
            if routed is not None:
                return routed
        self._check_ready()
        if self.routing is None:
            hint = "load it from a checkpoint without router=False, or pass routing="
            raise LaunchError("this layer has no routing", hint=hint)
        most = self.problem.global_experts + self.routing.zero_experts
        # Redundant copies of experts have no column.
        check_logits(router_logits, most, fewer=held["expert_map"] is not None, bias=held["router_bias"])
        if compiling:  # the definition can be traced, a launch cannot
            return route_as_defined(self.routing, router_logits, router, x, input_ids)
        self._check_place(router_logits=router_logits, input_ids=input_ids if self.routing.hashed else None)
        return self.executor.route(self.routing, router_logits, router, x, input_ids)

    def complete(self, x: Tensor, out: Tensor, routed: Routed) -> Tensor:
        """Add what routed experts do not compute: zero experts, the scale of the whole output, shared experts.

        Each is one operation, and most layers need none. `out` is overwritten.
        """
        return self._add_shared(x, self._scaled(x, out, routed))

    def _scaled(self, x: Tensor, out: Tensor, routed: Routed) -> Tensor:
        if routed.identity_weight is not None:  # computed in fp32, the type of the weight, and rounded once
            out = torch.addcmul(out, x, routed.identity_weight.unsqueeze(-1), out=out)
        if self.routing is not None and self.routing.apply_scale_to_output:
            out = out.mul_(self.routing.routed_scaling_factor)
        return out

    def _add_shared(self, x: Tensor, out: Tensor) -> Tensor:
        return out if self.shared_experts is None else out + self.shared_experts(x)

    def take_router(self, role: str, tensor: Tensor) -> None:
        """A copy of the router's hash table, or of one number for each expert (kept in fp32: rounding would change
        selections)."""
        own = tensor.clone() if role == "table" else tensor.to(torch.float32, copy=True).reshape(-1)
        held = self._buffers.get(f"router_{role}")
        if held is None or (held.shape, held.dtype, held.device) != (own.shape, own.dtype, own.device):
            self.register_buffer(f"router_{role}", own, persistent=False)
        else:
            with torch.inference_mode():  # which may write to tensors that were made in it, and to others
                held.copy_(own)  # in place: captured graphs read it there

    def claim(self, name: str) -> Claim | None:
        """What the tensor with this name is to this layer; None if it is another's."""
        recipe = self._require_refit().recipe
        claim = recipe.manifest.naming.claim(name)
        return claim if claim is not None and claim.layer == recipe.plan.layer.index else None

    def push(self, claim: Claim, name: str, tensor: Tensor) -> None:
        """Take a tensor that `claim` says is this layer's."""
        if claim.router is None:
            refit, host = self._require_refit(), self.host_experts
            with self.standing_still(host, self.settled), ExitStack() as after:
                if host is not None:  # also after an error: it may be about other experts of the batch
                    after.callback(forget_refused, refit, host._require_refit())
                    after.callback(host.push, claim, name, tensor)
                refit.push(claim, name, tensor, self.packed, self.layout)
        else:
            check_stored(name, tensor)
            own = self._require_refit().recipe.manifest.naming.router.own(name, tensor)
            self.take_router(claim.router, own.to(next(self.parameters()).device))

    def load_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Refit: push checkpoint tensors in any order; returns the names of the experts' tensors.

        The router's tensors are taken too, but are not in the set: the engine may need them. Tensors are held, not
        copied, until all tensors of their expert have come: do not overwrite them before.
        """
        return push_claimed(self.claim, self.push, pairs)

    def finish(self) -> RoutedExperts:
        """End a refit: everything pushed is packed; raises naming whatever never came."""
        refit = self._require_refit()
        raise_missing(self.missing(), refit.recipe.plan.layer.index)
        if self.host_experts is not None:
            self.host_experts.finish()
        with self.standing_still(self.host_experts, settled=False):
            report = refit.finish(self.packed, self.layout)
        if report is not None:  # the recipe's choice is that of the first load: the layer may have moved since
            host = None if self.host_experts is None else self.host_experts.report
            self.report = replace(report, choice=self.choice, host=host)
        return self

    def drop_refit(self) -> None:
        """Forget the tensors of a refit that are not packed yet, so that another may start."""
        with self.standing_still(self.host_experts, settled=False):
            self._require_refit().drop()
            if self.host_experts is not None:
                self.host_experts.drop_refit()

    def missing(self) -> list[MissingTensor]:
        """Every tensor that a refit still needs."""
        host = [] if self.host_experts is None else self.host_experts.missing()
        return [*self._require_refit().missing(), *host]

    @property
    def settled(self) -> bool:
        """Whether no refit is under way, so that the layer may compute."""
        return super().settled and (self.host_experts is None or self.host_experts.settled)

    def _check_ready(self) -> None:
        if not self.settled:
            raise MissingTensor("tensors were pushed but not finished", hint="call finish() after load_weights()")

    def check(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        """Raise where the layer is incomplete or arguments of `forward` do not fit it."""
        self._check_ready()
        check_dense(x=x, topk_ids=topk_ids, topk_weights=topk_weights)
        self._check_input(x)
        check_routing(x, topk_ids, topk_weights, self.problem.top_k)


class HostExperts(RoutedExperts):
    """The experts of a split layer that stay in host memory, wherever the layer is moved."""

    def __init__(self, parts: LayerParts) -> None:
        super().__init__(parts)
        self.calls = HostCalls()

    def __getstate__(self) -> dict[str, Any]:
        """Without the calls, which hold addresses of this object's weights."""
        return {**super().__getstate__(), "calls": HostCalls()}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HostExperts:
        return self
