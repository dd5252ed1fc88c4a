"""Decode steps of a whole model in the native library: everything between the embedding and the logits in one call.

A model fits if its parts do: layers with one attention that `fused_modules` recognises, two norms, and a feed-forward
block of routed experts, dense matrices or both. How the parts are connected is assumed (residuals around each, norms
before each); whoever uses a decoder compares its logits with the model's own first, as `serving.choose_runner` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lancebill.backends.cpu.decode_program import DecodeHeads, DecodeProgram, DecodeRows
from lancebill.backends.cpu.executor import CpuExecutor
from lancebill.backends.cpu.native import library
from lancebill.errors import LancebillError, UnsupportedProblem
from lancebill.integrations.transformers import native_limit
from lancebill.integrations.transformers.compare_modules import UNSUITABLE, rotary_angles
from lancebill.integrations.transformers.fused_modules import (
    FusedAttention,
    FusedNorm,
    Joined,
    fused_attention,
)
from lancebill.integrations.transformers.packed_experts import PackedExperts, packed_experts
from lancebill.layer.quantized_linear import QuantizedLinear
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.activation import Activation
from lancebill.moe.router_tensors import RouterTensors

MOST_ROWS = 256  # tokens per call; each call reads and expands all weights
ALWAYS_NATIVE = 64  # tokens for which native steps never take longer
# Beside a native step torch computes on one thread only. Its other threads would spin for milliseconds afterwards, on
# cores that the native step needs.
ONE_THREAD = 1 << 14  # torch copies and converts this many numbers on one thread
FIRST_ANGLES = 256  # positions in the first table; doubled whenever it is used up
_KNOWN = {"dropout", "scaling", "sliding_window"}  # what an attention passes on that a native step follows
_GATED = ("gate_proj", "up_proj", "down_proj")
# Kinds of rotary positions with angles that depend on the position only, and not on the longest sequence.
_FIXED_ANGLES = {"default", "linear", "llama3", "yarn"}


@dataclass(frozen=True)
class CacheShape:
    """Keys or values of one layer."""

    layer: int
    heads: int
    dim: int


class NativeDecoder:
    """The steps of one model, and the modules that run before them: the embedding and the rotary angles."""

    def __init__(self, model: Any) -> None:
        """Raises UnsupportedProblem, with the reason, for a model that does not fit."""
        native = library()
        if native is None:
            raise UnsupportedProblem("the CPU kernels are not built")
        self.model, self.program = model, DecodeProgram(native, MOST_ROWS)
        self.most_tokens = ALWAYS_NATIVE  # of a call that takes less time than the model's own; `settle` finds more
        self._used: list[tuple[Callable[[], object], object]] = []  # what steps were made from, and where it was found
        self.layers, final = _backbone(model)
        angles = rotary_angles(model)
        if angles is None:
            raise UnsupportedProblem("a model without rotary positions")
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        self.angles, self._table = angles, (nothing, nothing)
        rotary = model.config.get_text_config().to_dict().get("rope_parameters") or {}
        self._fixed_angles = rotary.get("rope_type") in _FIXED_ANGLES
        if self._fixed_angles:
            self._used.append((lambda: angles.inv_freq, angles.inv_freq))
        self.embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        self.x, self.cache_type = self.program.buffer("x", final.weight.shape[0]), final.weight.dtype
        self._angles = int(self._rotation([0])[0].shape[-1])
        usual = next((p.experts.problem.activation for _, p in packed_experts(model) if p.experts is not None), None)
        self.caches = [self._layer(layer, usual or Activation()) for layer in self.layers]
        normed = self.program.buffer("normed", self.x.shape[1])
        self.program.pick(self.x, normed)
        self.program.norm(normed, final.weight, final.eps, normed)
        self.logits = self.program.buffer("logits", _width(head))
        self._linear(normed, [head], self.logits)

    @torch.inference_mode()
    def step(
        self, ids: Sequence[int], positions: Sequence[int], capacities: Sequence[int], caches: Sequence[int],
        picks: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """Logits after the tokens at `picks`, `[picks, vocabulary]`; keys and values are written into the caches.

        `picks` ascend. Tokens of one sequence are in their order.
        """
        found = []
        cos, sin = self._rotation(positions)  # of all at once: as the model's own, they may depend on the largest
        for first in range(0, len(ids), MOST_ROWS):
            part = slice(first, first + MOST_ROWS)
            own = [pick - first for pick in picks if first <= pick < first + MOST_ROWS]
            rows = DecodeRows(
                cos[part], sin[part], positions[part], capacities[part], caches[part], self.cache_type, own
            )
            found.append(self._rows(ids[part], rows))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _rows(self, ids: Sequence[int], rows: DecodeRows) -> Tensor:
        """The same for as many tokens as the buffers hold."""
        self._embed(torch.tensor(ids, dtype=torch.int64, device="cpu"))
        self.program.run(rows)
        return torch.from_numpy(self.logits[: len(rows.picks)].numpy().copy())  # torch would use its threads

    def _embed(self, ids: Tensor) -> None:
        few = max(1, ONE_THREAD // self.x.shape[1])
        for first in range(0, len(ids), few):
            part = ids[first : first + few]
            self.x[first : first + len(part)] = self.embedding(part)

    def current(self) -> bool:
        """Whether the weights are still where the steps read them, and computed with in the same way."""
        return self.program.current() and all(now() is before for now, before in self._used)

    def settle(self, own_seconds: float, small_seconds: float) -> None:
        """Find `most_tokens`, knowing how long a small step takes the model itself and takes this."""
        saved = own_seconds - small_seconds
        found = native_limit.most_tokens(self.program.native, self.layers, self.cache_type, saved)
        self.most_tokens = max(ALWAYS_NATIVE, found)

    def _rotation(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Cosines and sines, from a table where possible: torch computes those of a few rows on several threads."""
        if not self._fixed_angles:
            return self._computed_angles(torch.tensor(positions, dtype=torch.int64, device="cpu"))
        if max(positions) >= len(self._table[0]):
            end = max(FIRST_ANGLES, 1 << max(positions).bit_length())
            self._table = self._computed_angles(torch.arange(end, device="cpu"))
        rows = torch.tensor(positions, dtype=torch.int64, device="cpu")
        return self._table[0][rows], self._table[1][rows]

    def _computed_angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.angles(self.x, positions.unsqueeze(0))
        return cos[0].float().contiguous(), sin[0].float().contiguous()

    def _layer(self, layer: nn.Module, usual: Activation) -> CacheShape:
        children = list(layer.children())
        norms = [child for child in children if isinstance(child, FusedNorm)]
        recognised = {child: self._recognised(child) for child in children}
        attentions = [attention for attention in recognised.values() if attention is not None]
        rest = [child for child in children if child not in norms and recognised[child] is None]
        if len(norms) != 2 or len(attentions) != 1 or len(rest) != 1:
            raise UnsupportedProblem("a layer is not two norms, an attention and a feed-forward block")
        normed = self.program.buffer("normed", self.x.shape[1])
        self.program.norm(self.x, norms[0].weight, norms[0].eps, normed)
        shape = self._attention(attentions[0], normed)
        self.program.norm(self.x, norms[1].weight, norms[1].eps, normed)
        self._feed_forward(rest[0], normed, usual)
        return shape

    def _recognised(self, module: nn.Module) -> FusedAttention | None:
        return module if isinstance(module, FusedAttention) else fused_attention(self.model, module, self.cache_type)

    def _attention(self, attention: FusedAttention, normed: Tensor) -> CacheShape:
        how = attention.how
        unknown = [name for name, value in how.items() if name not in _KNOWN and value is not None]
        if unknown or how.get("scaling") is None:
            raise UnsupportedProblem("an attention with more than a scale and a window", got=", ".join(unknown))
        norms = [attention.q_norm, attention.k_norm]
        weights = [norm.weight for norm in norms if isinstance(norm, FusedNorm)]
        eps = {norm.eps for norm in norms if isinstance(norm, FusedNorm)}
        if len(weights) not in (0, 2) or len(eps) > 1 or any(len(w) != attention.head_dim for w in weights):
            raise UnsupportedProblem("norms of queries and keys that a decode step does not know")
        qkv = self.program.buffer("qkv", (attention.queries + 2 * attention.keys) * attention.head_dim)
        self._linear(normed, list(attention.qkv.parts) if isinstance(attention.qkv, Joined) else [attention.qkv], qkv)
        heads = DecodeHeads(
            attention.layer_idx,
            attention.queries,
            attention.keys,
            attention.head_dim,
            self._angles,
            how["scaling"],
            how.get("sliding_window"),
            query_norm=weights[0] if weights else None,
            key_norm=weights[1] if weights else None,
            eps=max(eps, default=0.0),
        )
        attended = self.program.buffer("attended", attention.queries * attention.head_dim)
        self.program.attention(qkv, heads, attended)
        projected = self.program.buffer("projected", self.x.shape[1])
        self._linear(attended, [attention.o_proj], projected)
        self.program.add(projected, self.x)
        return CacheShape(attention.layer_idx, attention.keys, attention.head_dim)

    def _feed_forward(self, block: nn.Module, normed: Tensor, usual: Activation) -> None:
        places = [place for _, place in packed_experts(block)]
        if not places:
            self._gated(block, normed, usual, None)
            return
        layer = places[0].experts
        if len(places) > 1 or layer is None:
            raise UnsupportedProblem("a feed-forward block with more than one set of experts")
        taken = {id(parameter) for parameter in places[0].parameters()}
        self._used.append((lambda: places[0].experts, layer))
        self._routed(layer, _only(block, taken, layer.problem.global_experts), normed)
        shared = [child for child in block.children() if _has(child, _GATED)]
        gates = [p for p in _dense(block, taken) if p.shape == (1, normed.shape[1])]
        if len(shared) > 1 or len(gates) > 1:
            raise UnsupportedProblem("a feed-forward block with more than one shared expert")
        for child in shared:
            self._gated(child, normed, usual, gates[0] if gates else None)

    def _routed(self, layer: RoutedExperts, router: Tensor, normed: Tensor) -> None:
        executor, routing = layer.executor, layer.routing
        if not isinstance(executor, CpuExecutor) or routing is None or layer.expert_map is not None:
            raise UnsupportedProblem("experts that the CPU kernels do not compute")
        self._used.append((lambda: layer.executor, executor))
        logits = self.program.buffer("router", router.shape[0])
        out = self.program.buffer("projected", normed.shape[1])
        tensors = RouterTensors(layer.router_bias, layer.router_correction, layer.router_table)
        self.program.dense(normed, [(router, None)], logits)
        self.program.experts(normed, logits, routing, tensors, executor, out)
        self.program.add(out, self.x, routing.routed_scaling_factor if routing.apply_scale_to_output else 1.0)

    def _gated(self, block: nn.Module, normed: Tensor, activation: Activation, gate: Tensor | None) -> None:
        if not _has(block, _GATED) or not activation.gated:
            raise UnsupportedProblem("a feed-forward block without gate, up and down")
        children = dict(block.named_children())
        first, up, down = (children[name] for name in _GATED)
        both, hidden = (
            self.program.buffer("up", _width(first) + _width(up)),
            self.program.buffer("hidden", _width(up)),
        )
        out = self.program.buffer("projected", normed.shape[1])
        self._linear(normed, [first, up], both)
        self.program.gate(both, activation, hidden)
        self._linear(hidden, [down], out)
        factor = None
        if gate is not None:
            factor = self.program.buffer("factor", 1)
            self.program.dense(normed, [(gate, None)], factor)
        self.program.add(out, self.x, gate=factor)

    def _linear(self, x: Tensor, parts: Sequence[nn.Module], out: Tensor) -> None:
        """The products of one input, side by side."""
        dense = [(part.weight, part.bias) for part in parts if isinstance(part, nn.Linear)]
        if len(dense) == len(parts):
            self.program.dense(x, dense, out)
            return
        first = 0
        for part in parts:
            own = out[:, first : first + _width(part)]
            first += _width(part)
            if isinstance(part, QuantizedLinear) and isinstance(part.executor, CpuExecutor):
                self.program.packed(x, part.executor, own)
            else:
                raise UnsupportedProblem("a matrix that the CPU kernels do not read")


def native_decoder(model: Any) -> NativeDecoder | str:
    """The decoder of a model on the CPU, or why it has none."""
    try:
        with torch.no_grad():
            return NativeDecoder(model)
    except LancebillError as error:
        return error.what
    except UNSUITABLE as error:
        return f"{type(error).__name__}: {error}"


def _backbone(model: Any) -> tuple[nn.ModuleList, FusedNorm]:
    """The list of layers with attention, and the norm after it: both are children of one module."""
    for module in model.modules():
        lists = [child for child in module.children() if isinstance(child, nn.ModuleList) and len(child)]
        norms = [child for child in module.children() if isinstance(child, FusedNorm)]
        if len(lists) == 1 and len(norms) == 1:
            return lists[0], norms[0]
    raise UnsupportedProblem("no list of layers with a norm after it")


def _has(block: nn.Module, names: Sequence[str]) -> bool:
    return set(names) <= {name for name, _ in block.named_children()} and not isinstance(block, PackedExperts)


def _only(block: nn.Module, taken: set[int], rows: int) -> Tensor:
    """The router's matrix: the only other one with a row for each expert."""
    found = [p for p in _dense(block, taken) if p.shape[0] == rows]
    if len(found) != 1:
        raise UnsupportedProblem("a feed-forward block without one router")
    return found[0]


def _dense(block: nn.Module, taken: set[int]) -> list[nn.Parameter]:
    """Matrices that are not packed: packed ones are integers."""
    return [p for p in block.parameters() if id(p) not in taken and p.dim() == 2 and p.is_floating_point()]


def _width(linear: Any) -> int:
    return int(linear.out_features)
