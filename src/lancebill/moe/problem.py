"""A layer to compute, as one value with everything a backend needs to choose a kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

from lancebill.errors import SpecError
from lancebill.moe.activation import Activation
from lancebill.moe.layout import W2, W13, MatrixShape
from lancebill.numbers.dtypes import BF16, DType
from lancebill.numbers.spec import TENSOR, ActivationSpec
from lancebill.numbers.spec_names import ACTIVATIONS

EXPERTS, LINEAR = "experts", "linear"
INDEXED, CONTIGUOUS, BATCHED = FORMS = ("indexed", "contiguous", "batched")
FAST, BATCH_INVARIANT = ORDERS = ("fast", "batch-invariant")


@dataclass(frozen=True)
class Problem:
    """A layer of routed experts, or a linear layer (`w13` is its matrix and `w2` is None).

    Sizes describe this rank's shard. `activations` is the number format of each GEMM's input:
    16-bit unquantised, or quantised with static scales (from the checkpoint) or one scale per row.
    """

    w13: MatrixShape
    w2: MatrixShape | None
    experts: int  # local slots; a part of a split layer may have none
    global_experts: int
    top_k: int  # may exceed the experts: choices may be zero experts, which only a `Routing` counts
    activation: Activation = field(default_factory=Activation)
    input: DType = BF16
    activations: ActivationSpec = ACTIVATIONS["bf16"]
    activations_w2: ActivationSpec | None = None  # None: the same as `activations`
    weight_on_input: bool = False
    pre_scale: bool = False  # inputs are multiplied by a stored vector first (AWQ-style exports)
    dispatch: str = INDEXED
    order: str = FAST

    def __post_init__(self) -> None:
        for what, value, legal in (("dispatch", self.dispatch, FORMS), ("order", self.order, ORDERS)):
            if value not in legal:
                raise SpecError(f"unknown {what} '{value}'", expected=f"one of {', '.join(legal)}")
        if self.weight_on_input and self.top_k != 1:
            raise SpecError("routing weights can scale the input only with top-1 routing", got=f"top_k {self.top_k}")
        self._check_activations()
        self._check_sizes()

    def _check_activations(self) -> None:
        for inputs in (self.activations, self.second_activations):
            if inputs.static and (inputs.spec.zero is not None or inputs.spec.scales[-1].block != TENSOR):
                raise SpecError(
                    "static activations must have one scale for the whole input and no zero point",
                    got=inputs,
                    hint="dynamic activations have no such limit, for example int8",
                )

    def _check_sizes(self) -> None:
        for name, shape in self.matrices.items():
            if shape.name != name:
                raise SpecError("a matrix has the wrong name", expected=name, got=shape.name)
            if shape.n < 1 or shape.k < 1:
                raise SpecError("a matrix needs rows and columns", where=name, got=f"{shape.n} x {shape.k}")
        counts = ("experts", self.experts, 0), ("global_experts", self.global_experts, 1), ("top_k", self.top_k, 1)
        for what, count, least in counts:
            if count < least:
                raise SpecError("a layer needs experts, and tokens need a choice", where=what, got=count)
        rows = self.intermediate * (2 if self.activation.gated else 1)
        if self.w2 is not None and self.w13.n != rows:
            what = "w13 and w2 disagree about the intermediate size"
            raise SpecError(what, expected=f"{rows} rows of w13", got=self.w13.n)

    @property
    def kind(self) -> str:
        return LINEAR if self.w2 is None else EXPERTS

    @property
    def hidden(self) -> int:
        return self.w13.k

    @property
    def intermediate(self) -> int:
        return self.w13.n if self.w2 is None else self.w2.k

    @property
    def second_activations(self) -> ActivationSpec:
        return self.activations_w2 or self.activations

    @property
    def matrices(self) -> dict[str, MatrixShape]:
        return {W13: self.w13} if self.w2 is None else {W13: self.w13, W2: self.w2}

    @property
    def rotated(self) -> bool:
        """Whether the inputs of a matrix are rotated."""
        return any(shape.spec.rotation for shape in self.matrices.values())

    def inputs_of(self, matrix: str) -> ActivationSpec:
        """The number format of this matrix's input."""
        return self.activations if matrix == W13 else self.second_activations

    def is_gated(self, matrix: str) -> bool:
        """Whether the rows of this matrix are gate rows over up rows."""
        return matrix == W13 and self.w2 is not None and self.activation.gated

    def describe(self) -> dict[str, object]:
        """Plain values for tables and JSON."""
        return {
            "kind": self.kind,
            "experts": self.experts,
            "global_experts": self.global_experts,
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "top_k": self.top_k,
            "activation": str(self.activation),
            "w13": str(self.w13.spec),
            "w2": None if self.w2 is None else str(self.w2.spec),
            "activations": str(self.activations),
            "activations_w2": str(self.second_activations),
            "input": str(self.input),
            "bias": self.w13.bias,
            "act_order": self.w13.act_order,
            "weight_on_input": self.weight_on_input,
            "dispatch": self.dispatch,
            "order": self.order,
        }
