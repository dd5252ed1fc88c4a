"""`QuantizedLinear`: one matrix through the same backends as the experts."""

from __future__ import annotations

from pathlib import Path
from types import MethodType

import torch
from torch import Tensor, nn

from lancebill.backends import oracle, slow_choice
from lancebill.checkpoint.load.input_scales import PRE_SCALE, allocate_inputs, combine_input_scales
from lancebill.checkpoint.load.projections import load_projection
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve.other_modules import find_module
from lancebill.formats import detect
from lancebill.layer.check_tensors import check_dense
from lancebill.layer.compiled_op import quantized_linear
from lancebill.layer.module_hooks import has_hooks
from lancebill.layer.no_gradient import without_gradient
from lancebill.layer.packed_module import PackedModule
from lancebill.layer.recipe import unquantised_inputs
from lancebill.layer.rules import activation_specs, weight_targets
from lancebill.moe.layout import W13, MatrixShape
from lancebill.moe.problem import FAST, Problem
from lancebill.numbers.codec import dequantize, requantize
from lancebill.numbers.spec import ActivationSpec, QuantSpec
from lancebill.numbers.torch_defaults import default_device
from lancebill.numbers.weight import FACTORS, LogicalWeight


def is_watched(layer: nn.Module) -> bool:
    """Whether someone wants to see the layer's calls: by a hook, or by another `forward`."""
    return has_hooks(layer) or layer.forward != MethodType(_FORWARD, layer)


class QuantizedLinear(PackedModule):
    """y = x @ W.T + b."""

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path | Checkpoint,
        module: str,
        *,
        device: str | torch.device | None = None,
        backend: str = oracle.AUTO,
        weights: str | QuantSpec | None = None,
        activations: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> QuantizedLinear:
        """Any linear module of a checkpoint, by its name; on torch's default device unless another is given."""
        checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)
        stored = find_module(checkpoint.config, checkpoint.headers, checkpoint.read, module)
        weight = load_projection(checkpoint.read, stored)
        target = weight_targets(weights, 0).get(W13)
        if target is not None:
            weight, _ = requantize(weight, target)
        wide = unquantised_inputs(dtype)
        spec = activation_specs(activations, 0).get(W13, wide)
        if spec is None:
            header = stored.as_module(checkpoint.headers)
            spec = detect(checkpoint.config).activations(checkpoint.config, header) or wide
        return cls.from_weight(weight, device=device, backend=backend, activations=spec, dtype=dtype, where=module)

    @classmethod
    def from_weight(
        cls,
        weight: LogicalWeight,
        *,
        device: str | torch.device | None = None,
        backend: str = oracle.AUTO,
        activations: ActivationSpec | None = None,
        dtype: torch.dtype = torch.bfloat16,
        order: str = FAST,
        where: str = "linear",
        refuse_slow: bool = False,
    ) -> QuantizedLinear:
        """A matrix in memory. Its inputs are unquantised by default; `device` as in `from_checkpoint`.

        `refuse_slow`: raise where a plain tensor of the same numbers would be faster, unless `backend` names one.
        """
        wide = unquantised_inputs(dtype)
        problem = Problem(
            MatrixShape(W13, weight.n, weight.k, weight.spec, weight.bias is not None, weight.perm is not None),
            None,
            experts=1,
            global_experts=1,
            top_k=1,
            input=wide.spec.dtype,
            activations=activations or wide,
            pre_scale=FACTORS in weight.inputs,
            order=order,
        )
        choice = oracle.select(problem, default_device() if device is None else device, backend)
        if refuse_slow:
            slow_choice.refuse_slow(choice)
        at = choice.device.torch
        inputs = allocate_inputs(weight.inputs, problem.activations, weight.k, 1, at, where)
        made = cls(choice, {W13: {**choice.backend.layout(problem).allocate(problem.w13, 1, at), **inputs}})
        made.refit(weight)
        return made

    def refit(self, weight: LogicalWeight) -> None:
        """Replace the numbers in place; the new matrix must be like the old one."""
        rows = {name: tensor[0] for name, tensor in self.packed[W13].items()}
        self.layout.pack(self.problem.w13, weight, rows)
        combine_input_scales([weight.inputs]).write(rows)

    def __call__(self, x: Tensor) -> Tensor:
        """A call like an earlier one runs at once, unless someone watches: `nn.Module`'s own steps take the host a
        fifth of the time of such a call."""
        if not torch.compiler.is_compiling():  # asked first: a compiled graph shall not depend on what a layer holds
            result = None if is_watched(self) else self._repeat(x)
            if result is not None:
                return result
        out: Tensor = super().__call__(x)
        return out

    def _repeat(self, x: Tensor) -> Tensor | None:
        """The result, if this call is like an earlier one."""
        executor = self._executor
        call = None if executor is None or not isinstance(x, Tensor) else executor.fast_linears.get(x.numel())
        return None if call is None else call(x)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            made: Tensor = quantized_linear(x, self.problem.w13.n, self.tag)
            return without_gradient(made, x)
        result = self._repeat(x)
        if result is not None:
            return result
        check_dense(x=x)
        rows = x.detach().reshape(-1, x.shape[-1])
        self._check_input(rows)
        out = rows.new_empty(rows.shape[0], self.problem.w13.n)
        if rows.shape[0]:
            self.executor.run_linear(rows, out)
            self.executor.prepare_linear_call(x.detach())
        return without_gradient(out.view(*x.shape[:-1], self.problem.w13.n), x)

    # Attributes of `nn.Linear`, for code written for it.

    @property
    def in_features(self) -> int:
        return self.problem.w13.k

    @property
    def out_features(self) -> int:
        return self.problem.w13.n

    @property
    def stored(self) -> LogicalWeight:
        """The matrix in canonical form, unpacked."""
        rows = {name: tensor[0] for name, tensor in self.packed[W13].items()}
        return self.layout.unpack(self.problem.w13, rows)

    @property
    def weight(self) -> Tensor:
        """The matrix, dequantised anew in every access."""
        values, factors = dequantize(self.stored), self.packed[W13].get(PRE_SCALE)
        values = values if factors is None else values * factors.view(torch.float32)
        return values.to(self.problem.input.wide)

    @property
    def bias(self) -> Tensor | None:
        bias = self.stored.bias
        return None if bias is None else bias.to(self.problem.input.wide)


_FORWARD = QuantizedLinear.forward  # before anyone replaces it, or overrides it
