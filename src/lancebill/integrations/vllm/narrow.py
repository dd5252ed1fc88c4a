"""vLLM's plain dense layers on a CPU that computes in fp32: matrices whose numbers 16 bits hold exactly keep 16 bits.

A step of one sequence reads every dense matrix once, so it takes as long as that. Models are published in 16 bits, and
vLLM stores them in fp32 there. Everything until a layer is loaded stays vLLM's: parameters, loaders, ranks, reloads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from lancebill.backends.cpu.narrow_linear import NARROW, is_supported
from lancebill.layer.narrow_op import narrow_linear, narrow_rows

FEWEST = 1 << 15  # numbers of a matrix; calling an operator takes as long as reading fewer
WIDE = torch.float32


class Kept:
    """The matrices of a model that are in 16 bits, by the name of their layer."""

    def __init__(self) -> None:
        self.dtypes: dict[str, str] = {}
        self.saved = 0  # bytes

    def __str__(self) -> str:
        kinds = " and ".join(sorted(set(self.dtypes.values())))
        return f"{len(self.dtypes)} matrices stay in {kinds} ({self.saved / 2**20:.0f} MiB less than in fp32)"


def narrowed(values: Tensor) -> Tensor | None:
    """The same numbers in 16 bits; None if these do not hold them."""
    for dtype in NARROW:
        made = values.to(dtype)
        if torch.equal(made.to(values.dtype), values):
            return made
    return None


class NarrowWeight:
    """One layer's matrix. The first load decides whether this layer multiplies 16-bit matrices: a compiled graph does
    the same ever after. Later numbers that need fp32 are stored in fp32."""

    def __init__(self, name: str, kept: Kept) -> None:
        self.name, self.kept = name, kept
        self.weight: nn.Parameter | None = None  # that vLLM computes with, once it is in 16 bits

    def take(self, layer: nn.Module) -> bool:
        """After a load: whether the layer's matrix is ours to multiply."""
        loaded: Any = layer.weight
        found = narrowed(loaded.data) if loaded.dtype == WIDE else loaded.data  # tied to one that was taken
        if self.weight is None and found is None:
            return False
        if found is not None and loaded.dtype == WIDE:
            loaded.data = found
            self.kept.saved += found.nbytes if self.weight is None else 0
        if self.weight is None:
            self.weight = loaded
            self.kept.dtypes[self.name] = str(loaded.dtype).removeprefix("torch.")
        elif self.weight.dtype != loaded.dtype:
            # vLLM copies a reload into the parameter of the first load.
            self.weight.data = torch.empty_like(loaded.data)
        return True


class Narrow:
    """Mixed into vLLM's methods: layers whose matrix is in 16 bits are multiplied by our operator."""

    def __init__(self, name: str, kept: Kept) -> None:
        super().__init__()
        self.narrow = NarrowWeight(name, kept)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if not self.narrow.take(layer):
            super().process_weights_after_loading(layer)  # type: ignore[misc]

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.narrow.weight is None:
            vllms: Tensor = super().apply(layer, x, bias)  # type: ignore[misc]
            return vllms
        made: Tensor = narrow_linear(x, layer.weight, bias)
        return made


class NarrowLinearMethod(Narrow, UnquantizedLinearMethod):
    """A dense layer."""


class NarrowEmbeddingMethod(Narrow, UnquantizedEmbeddingMethod):
    """A table of embeddings, the matrix of the logits, or both in one."""

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        if self.narrow.weight is None:
            return super().embedding(layer, input_)
        made: Tensor = narrow_rows(input_, layer.weight)
        return made


_LAYERS = (LinearBase, VocabParallelEmbedding)
_METHODS: dict[type[Any], type[NarrowLinearMethod | NarrowEmbeddingMethod]] = {
    UnquantizedLinearMethod: NarrowLinearMethod,
    UnquantizedEmbeddingMethod: NarrowEmbeddingMethod,
}


def keep_narrow(model: nn.Module) -> Kept:
    """Let the plain dense layers of a model keep 16 bits; what they kept is known once they are loaded."""
    kept = Kept()
    for name, module in model.named_modules() if is_supported() else ():
        made = _METHODS.get(type(module.quant_method)) if isinstance(module, _LAYERS) else None
        weight = module._parameters.get("weight")
        if made is not None and weight is not None and _is_offered(module, weight):
            module.quant_method = made(name, kept)
    return kept


def _is_offered(module: nn.Module, weight: nn.Parameter) -> bool:
    on_cpu = weight.device.type == "cpu" and weight.dtype == WIDE and weight.dim() == 2
    # vLLM's latent attention marks a layer whose matrix it reads itself.
    return on_cpu and weight.numel() >= FEWEST and "_cpu_skip_gemm_dispatch" not in dir(module)
