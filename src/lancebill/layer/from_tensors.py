"""A layer from tensors that an engine already holds: all experts stacked, without a checkpoint.

w13 is split into views of gate and up. From there on they are a checkpoint like any other, read from memory: the same
checks, cuts, packing and report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lancebill.backends import oracle
from lancebill.checkpoint.load.staging import source_of
from lancebill.checkpoint.resolve.manifest import LayerIndex
from lancebill.checkpoint.resolve.naming import DOWN, GATE, UP, NameForm, Naming
from lancebill.errors import LancebillError, SpecError, WrongShape
from lancebill.formats._plain import level_roles, plain_scheme
from lancebill.formats.base import Config, Example, Format, Module, Scheme
from lancebill.layer.collect import header_of, reader_of
from lancebill.layer.parts import LayerParts, pull
from lancebill.layer.recipe import LoadOptions, Recipe
from lancebill.layer.rules import MATRICES, WeightRules, weight_targets
from lancebill.moe.activation import Activation
from lancebill.moe.layout import W2, W13
from lancebill.numbers.spec import QuantSpec
from lancebill.numbers.weight import FACTORS

GATE_UP, UP_GATE, INTERLEAVED = "gate_up", "up_gate", "interleaved"  # orders of the rows of w13
ROW_ORDERS = (GATE_UP, UP_GATE, INTERLEAVED)  # interleaved: gate, up, gate, up
_HOME = "layers.{layer}.experts"


@dataclass(frozen=True, eq=False)
class ExpertTensors:
    """One matrix (w13 or w2) of all experts. Every tensor has the expert dimension first.

    `codes` are [E, N, K], or packed along K in bytes or 32-bit words with the first code in the lowest bits. 8-bit
    integers without zero points may be signed (torch.int8). `scales`, `zero` and `minimum` have the spec's levels,
    innermost first, in the spec's dtypes: [E, N, K / group] for groups, [E, N / 128, K / 128] for blocks (gate and up
    have their own), [E, N] for channels, [E] for whole matrices (w13 also [E, 2]: gate and up).
    Columns must be in natural order. Views are fine: a transposed matrix is given as `t.transpose(1, 2)`.
    """

    codes: Tensor
    scales: tuple[Tensor, ...] = ()
    zero: Tensor | None = None
    minimum: tuple[Tensor, ...] = ()
    bias: Tensor | None = None  # [E, N]
    input_scale: Tensor | None = None  # [E]; divides a statically quantised input
    pre_quant_scale: Tensor | None = None  # [E, K]; multiplies the input

    def by_role(self) -> dict[str, Tensor]:
        tensors = {
            "codes": self.codes,
            **dict(zip(level_roles("scale"), self.scales)),
            "zero": self.zero,
            **dict(zip(level_roles("minimum"), self.minimum)),
            "bias": self.bias,
            "input_scale": self.input_scale,
            FACTORS: self.pre_quant_scale,
        }
        return {role: tensor for role, tensor in tensors.items() if tensor is not None}


class _EngineTensors(Format):
    """The format of tensors in memory: a scheme for each projection."""

    name = "tensors in memory"

    def __init__(self, schemes: Mapping[str, Scheme]) -> None:
        self.schemes = schemes  # by module

    def matches(self, config: Config) -> bool:
        return False

    def scheme(self, config: Config, module: Module) -> Scheme:
        return self.schemes[module.name]

    def examples(self) -> Sequence[Example]:  # type: ignore[override]
        return ()


def parts_from_tensors(
    w13: ExpertTensors,
    w2: ExpertTensors,
    spec: WeightRules,
    *,
    rows: str,
    layer: int,
    expert_map: Sequence[int] | Tensor | None,
    options: LoadOptions,
) -> LayerParts:
    """Pack the tensors for the backend that the oracle chooses; see `RoutedExperts.from_tensors`."""
    try:
        tensors, index = _as_checkpoint(w13, w2, spec, rows, layer, options)
        recipe = Recipe.resolve(index, layer, options, where="tensors")
    except LancebillError as error:
        raise error.within("from_tensors") from error
    if expert_map is not None:
        recipe = _with_map(recipe, expert_map)
    problem = recipe.choice.problem
    if problem.top_k > problem.global_experts:
        expected = f"at most {problem.global_experts}"
        raise SpecError("a token has more experts than there are", where="top_k", expected=expected, got=problem.top_k)
    device = recipe.choice.device.torch
    parts = pull(recipe, reader_of(tensors, device), source=source_of(tensors.values(), device))
    if expert_map is None:
        return parts
    return replace(parts, expert_map=torch.as_tensor(expert_map, dtype=torch.int32, device=device))


def _as_checkpoint(
    w13: ExpertTensors, w2: ExpertTensors, rules: WeightRules, rows: str, layer: int, options: LoadOptions
) -> tuple[dict[str, Tensor], LayerIndex]:
    """The tensors by name, and the index of the checkpoint that would hold them."""
    specs = weight_targets(rules, layer)
    if set(specs) != set(MATRICES):
        raise SpecError("a spec is needed for each matrix", expected=" and ".join(MATRICES), got=", ".join(specs))
    if w13.codes.dim() != 3 or w2.codes.dim() != 3:
        got = f"{list(w13.codes.shape)} and {list(w2.codes.shape)}"
        raise WrongShape("codes need an expert dimension", expected="[E, N, K]", got=got)
    activation = options.activation
    gated = (Activation(activation) if isinstance(activation, str) else activation or Activation()).gated
    experts, hidden, inner = w2.codes.shape[0], w2.codes.shape[1], w13.codes.shape[1] // (2 if gated else 1)
    split = _split(w13, specs[W13], rows) if gated else {GATE: w13.by_role()}
    names = {projection: f".{projection}" for projection in (*split, DOWN)}
    form = NameForm(_HOME, names, prefixes=("",))
    tensors: dict[str, Tensor] = {}
    schemes: dict[str, Scheme] = {}
    for projection, held in {**split, DOWN: w2.by_role()}.items():
        module = form.module("", layer, 0, projection)
        matrix, k = (W2, inner) if projection == DOWN else (W13, hidden)
        schemes[module] = plain_scheme(specs[matrix], packed=held["codes"].shape[-1] != k)
        tensors |= {f"{module}.{role}": tensor for role, tensor in held.items()}
    config = Config(
        {"num_experts": experts, "hidden_size": hidden, "moe_intermediate_size": inner}, source="the given tensors"
    )
    headers = {name: header_of(name, tensor) for name, tensor in tensors.items()}
    naming = Naming("an engine", (), (form,), described=False)
    return tensors, LayerIndex(config, headers, naming, _EngineTensors(schemes))


def _split(w13: ExpertTensors, spec: QuantSpec, rows: str) -> dict[str, dict[str, Tensor]]:
    """Views of gate and up."""
    if rows not in ROW_ORDERS:
        raise SpecError("unknown order of the rows of w13", expected=" or ".join(ROW_ORDERS), got=rows)
    if rows == INTERLEAVED and any(level.block[0] > 1 for level in spec.levels):
        raise SpecError("gate and up would share blocks of scales", expected=f"{GATE_UP} or {UP_GATE}", got=rows)
    halves: dict[str, dict[str, Tensor]] = {GATE: {}, UP: {}}
    for role, tensor in w13.by_role().items():
        for projection, view in zip((GATE, UP), _halves(role, tensor, rows)):
            halves[projection][role] = view
    return halves


def _halves(role: str, tensor: Tensor, rows: str) -> tuple[Tensor, Tensor]:
    """Gate's and up's part of one tensor. One number for both, and what belongs to their input, is shared."""
    if role == FACTORS or tensor.dim() < 2 or tensor.shape[1] == 1:
        return tensor, tensor
    if rows == INTERLEAVED and tensor.shape[1:] != (2,):
        return tensor[:, 0::2], tensor[:, 1::2]
    half = tensor.shape[1] // 2
    first, second = tensor[:, :half], tensor[:, half:]
    if tensor.shape[1:] == (2,):  # a number for each of the two matrices
        first, second = (column.clone() for column in tensor.unbind(1))
    return (second, first) if rows == UP_GATE else (first, second)


def _with_map(recipe: Recipe, expert_map: Sequence[int] | Tensor) -> Recipe:
    """The recipe for one rank's tensors; `expert_map` has the slot of every global expert, or -1."""
    if recipe.host is not None:
        raise SpecError("a layer with an expert map cannot be split", hint="give placement=, or no gpu_experts")
    slots = [int(slot) for slot in expert_map]
    local = len(recipe.plan.experts)
    if set(slots) - {-1} != set(range(local)):
        expected = f"each slot 0 to {local - 1}, and -1 for experts of other ranks"
        raise SpecError("the expert map does not fit the tensors", expected=expected, got=slots)
    problem = replace(recipe.choice.problem, global_experts=len(slots))
    return replace(recipe, choice=oracle.select(problem, recipe.options.device, recipe.options.backend))
