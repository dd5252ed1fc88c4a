"""The base classes of checkpoint formats: parts, schemes, and the format itself.

A `Format` reads a config and returns a `Scheme` for each module: the spec of the numbers, the stored
tensors (`Part`), and the conversion between them and a `LogicalWeight` in both directions. Formats
are independent of files, experts, shards and kernels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from lancebill.errors import BadValue, CannotEncode, UnsupportedFormat
from lancebill.formats import axes as ax
from lancebill.formats.stored import TORCH_DTYPES
from lancebill.formats.stored import Config as Config
from lancebill.formats.stored import Stored as Stored
from lancebill.numbers.dtypes import BF16, F16, F32, ZERO16, DType
from lancebill.numbers.scan import contains_any
from lancebill.numbers.spec import DENSE_BF16, DENSE_F16, DENSE_F32, ActivationSpec, QuantSpec
from lancebill.numbers.weight import INPUT_ROLES, LogicalWeight

FLOATS = ("BF16", "F16", "F32")
FLOAT_TYPES: dict[str, DType] = {"BF16": BF16, "F16": F16, "F32": F32}
FLOAT_NAMES = {dtype: name for name, dtype in FLOAT_TYPES.items()}


@dataclass(frozen=True)
class Module:
    """A module's name and the tensors stored under it, by suffix (`.weight_packed`)."""

    name: str
    stored: Mapping[str, Stored] = field(default_factory=dict)

    def dtype(self, *suffixes: str, default: str = "BF16") -> str:
        """The stored dtype of the first suffix that is present."""
        return next((self.stored[s].dtype for s in suffixes if s in self.stored), default)

    def has(self, suffix: str) -> bool:
        return suffix in self.stored


@dataclass(frozen=True)
class Part:
    """One stored tensor of a scheme.

    `suffix` lists the possible suffixes of the module's name, `axes` the possible shapes. All experts
    of a layer have an optional part, or none has. `whole` parts cannot be sliced in their stored form.
    """

    role: str
    suffix: tuple[str, ...]
    dtypes: tuple[str, ...]
    axes: tuple[str, ...]
    bits: int = 1  # of one packed code, if the axes have a `^`
    optional: bool = False
    whole: bool = False

    def ratio(self, dtype: str) -> tuple[int, int]:
        """(code bits, word bits) of the packed axis."""
        return self.bits, 8 * TORCH_DTYPES[dtype].itemsize

    def shapes(self, n: int, k: int, dtype: str) -> list[tuple[int, ...]]:
        return [ax.shape(axes, n, k, self.ratio(dtype)) for axes in self.axes]

    def usual_suffix(self, parameter: bool) -> str:
        """The suffix to write: of a module the first, of a parameter with all experts (`gate_up_proj`) the last."""
        return self.suffix[-1 if parameter else 0]

    @property
    def cuttable(self) -> bool:
        return not self.whole and all(ax.cuttable(axes) for axes in self.axes)


def part(
    role: str,
    suffix: str | tuple[str, ...],
    dtypes: str | tuple[str, ...],
    axes: str | tuple[str, ...],
    *,
    bits: int = 1,
    optional: bool = False,
    whole: bool = False,
) -> Part:
    """A `Part`; a string stands for a tuple with one entry."""

    def tup(value: str | tuple[str, ...]) -> tuple[str, ...]:
        return (value,) if isinstance(value, str) else value

    return Part(role, tup(suffix), tup(dtypes), tup(axes), bits, optional, whole)


SCALAR = ("", "1")
BIAS = part("bias", (".bias", "_bias"), FLOATS, "n", optional=True)


@dataclass(frozen=True)
class Scheme(ABC):
    """A format resolved for one module. Subclasses implement `unpack` and its inverse `pack`.

    `decode` and `encode` add the bias and activation-side tensors, which all formats store alike. If a scheme is
    `batched`, its `unpack` also takes the tensors of several experts, with a leading expert dimension on each.
    """

    batched: ClassVar[bool] = False

    spec: QuantSpec
    parts: tuple[Part, ...]
    # Suffixes of redundant tensors.
    unread: tuple[str, ...] = field(default=(), kw_only=True, compare=False)

    @abstractmethod
    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        """Stored tensors by role to the canonical form of an [n, k] matrix."""

    @abstractmethod
    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        """The inverse: tensors by role."""

    @property
    def zero_range(self) -> tuple[int, int]:
        """The smallest and largest integer zero point that this scheme can store."""
        return 0, (1 << self.spec.dtype.bits) - 1

    def zeros_beyond(self, weight: LogicalWeight) -> tuple[int, int] | None:
        """The smallest and largest integer zero point of a weight, if this scheme cannot store them."""
        if weight.zero is None or weight.spec.zero is None or weight.spec.zero.dtype != ZERO16:
            return None
        (low, high), smallest, largest = self.zero_range, int(weight.zero.min()), int(weight.zero.max())
        return None if low <= smallest and largest <= high else (smallest, largest)

    def rotated(self, block: int) -> Scheme:
        """This scheme for a matrix that was rotated in blocks of so many columns (0: not rotated)."""
        return replace(self, spec=replace(self.spec, rotation=block))

    @property
    def views_codes(self) -> bool:
        """Whether `unpack` only views the codes, as `Nibbles`, wherever it can: it does not look at them."""
        return False

    @property
    def act_order(self) -> bool:
        """Whether weights of this scheme carry a column permutation."""
        return False

    def stored_size(self, stored: Callable[[str], Tensor | None]) -> tuple[int, int] | None:
        """(n, k) if a stored tensor contains them; `stored` reads the tensor of a role, if there is one."""
        shape = stored("shape")
        return (int(shape[0]), int(shape[1])) if shape is not None and shape.numel() == 2 else None

    def random_stored(self, n: int, k: int, generator: torch.Generator) -> dict[str, Tensor] | None:
        """Random tensors, if the scheme cannot store every weight of its spec; None if it can."""
        return None

    def part(self, role: str) -> Part | None:
        return next((p for p in self.parts if p.role == role), None)

    def lead(self, stored: Mapping[str, Tensor]) -> tuple[int, ...]:
        """The expert dimension in front of stored tensors: () for one expert's."""
        codes, described = stored["codes"], self.part("codes")
        assert described is not None
        return tuple(codes.shape[: codes.dim() - len(described.axes[0].split())])

    @cached_property
    def units(self) -> dict[str, int] | None:
        """The steps in n and k at which all parts can be sliced; None if a part must be read whole."""
        if not all(p.cuttable for p in self.parts):
            return None
        steps = {"n": 1, "k": self.spec.rotation or 1}
        for p in self.parts:
            for axes in p.axes:
                for name, step in ax.units(axes, p.ratio(p.dtypes[0])).items():
                    steps[name] = math.lcm(steps[name], step)
        return steps

    def decode(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        """Stored tensors by role to a `LogicalWeight`, including bias and activation-side tensors."""
        weight = self.unpack(stored, n, k)
        if (nans := _nan_scales(weight)) is not None:
            raise BadValue("some scales are NaN", got=nans)
        inputs = {role: stored[role] for role in INPUT_ROLES if role in stored}
        return replace(weight, bias=stored.get("bias"), inputs=inputs)

    def encode(self, weight: LogicalWeight) -> dict[str, Tensor]:
        """The inverse of `decode`; raises for a weight that this scheme cannot store."""
        self._check_holds(weight)
        stored = self.pack(weight)
        stored.update(weight.inputs)
        if weight.bias is not None:
            stored["bias"] = weight.bias
        return stored

    def _check_holds(self, weight: LogicalWeight) -> None:
        if weight.spec != self.spec:
            raise CannotEncode("this scheme stores another spec", expected=self.spec, got=weight.spec)
        if (nans := _nan_scales(weight)) is not None:
            raise CannotEncode("some scales are NaN", got=nans)
        if weight.perm is not None and not self.act_order:
            raise CannotEncode("this scheme cannot store an act-order permutation")
        for role in (*weight.inputs, *(["bias"] if weight.bias is not None else [])):
            if self.part(role) is None:
                raise CannotEncode(f"this scheme cannot store '{role}'")
        if (beyond := self.zeros_beyond(weight)) is not None:
            low, high = self.zero_range
            raise CannotEncode(
                "zero points outside the range of this scheme",
                expected=f"{low} to {high}",
                got=f"{beyond[0]} to {beyond[1]}",
            )


def _nan_scales(weight: LogicalWeight) -> str | None:
    """How many mini-float scales are NaN, if any. `lancebill verify --values` checks 16- and 32-bit scales."""
    for level, codes in weight.levels():
        if contains_any(codes, level.dtype.nan_codes):
            count = sum(int((codes == nan).sum()) for nan in level.dtype.nan_codes)
            return f"{count} of {codes.numel()} {level.dtype} numbers"
    return None


@dataclass(frozen=True)
class Dense(Scheme):
    """Unquantised: the stored tensor is the matrix."""

    batched = True

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        return LogicalWeight(self.spec, stored["codes"].reshape(*self.lead(stored), n, k))

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        return {"codes": weight.codes}


_DENSE = {
    stored: Dense(spec, (part("codes", (".weight", ""), stored, "n k"), BIAS))
    for stored, spec in (("BF16", DENSE_BF16), ("F16", DENSE_F16), ("F32", DENSE_F32))
}


def dense(module: Module) -> Dense:
    """The scheme of an unquantised module, in its stored dtype."""
    return _DENSE.get(module.dtype(".weight", "", default="BF16"), _DENSE["BF16"])


@dataclass(frozen=True)
class Example:
    """A config of a format and the scheme it must resolve to; the shared tests run on examples.

    `n` and `k` are the matrix size to test with (with partial blocks if the format has them).
    """

    name: str
    config: Config
    scheme: Scheme
    n: int = 128
    k: int = 256
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # stored input roles and their shapes
    bias: bool = False


class Loading(Enum):
    """What transformers does with experts of a spec in a format, if it knows their names."""

    NO = "it does not load them"
    ALONE = "it loads them, but beside them cannot merge other tensors"
    YES = "it loads them"


class Format(ABC):
    """A checkpoint format. A module of this package that defines `FORMAT = ...` is registered automatically."""

    name: ClassVar[str]
    used: ClassVar[frozenset[str]] = frozenset()  # config keys that are read
    ignored: ClassVar[frozenset[str]] = frozenset()  # config keys that do not affect the numbers
    model_keys: ClassVar[frozenset[str]] = frozenset()  # keys of config.json outside the quantisation section
    stacked: ClassVar[bool] = False  # one tensor has all experts of a layer
    lists_dense: ClassVar[bool] = True  # the config says which modules are unquantised; else only their tensors do
    stores_rotations: ClassVar[bool] = False  # `export` takes specs with a rotation

    @abstractmethod
    def matches(self, config: Config) -> bool:
        """Whether this format reads the config. Exactly one format must match."""

    @abstractmethod
    def scheme(self, config: Config, module: Module) -> Scheme:
        """How `module` is stored, with overrides, groups and ignore lists resolved."""

    @abstractmethod
    def examples(self) -> Iterator[Example]:
        """Every variant, for the tests that run on all formats."""

    def activations(self, config: Config, module: Module) -> ActivationSpec | None:
        """The number format that the checkpoint declares for `module`'s input; None: 16-bit, unquantised."""
        return None

    def expert_module(self, config: Config, name: str) -> Module:
        """An expert's module in a checkpoint that does not exist yet, with the headers that `scheme` needs."""
        return Module(name)

    def export(self, spec: QuantSpec, dense_modules: Sequence[str]) -> tuple[dict[str, Any], Scheme]:
        """The quantisation config and scheme with which this format stores `spec`.

        The config lists `dense_modules` as unquantised.
        """
        raise CannotEncode(f"lancebill cannot write {self.name}", where=self.name)

    def add_modules(
        self, config: Mapping[str, Any], spec: QuantSpec, modules: Sequence[str]
    ) -> tuple[dict[str, Any], Scheme]:
        """A config of `export`, or an empty one, in which `modules` have a spec of their own; and its scheme."""
        hint = "compressed-tensors stores matrices of several specs"
        raise CannotEncode(f"{self.name} stores all matrices with one spec", where=modules[0], got=spec, hint=hint)

    def config_for(self, spec: QuantSpec, dense_modules: Sequence[str]) -> tuple[dict[str, Any], Scheme]:
        """`export`, unless the format cannot say that a matrix is rotated: readers would not rotate the inputs."""
        if spec.rotation and not self.stores_rotations:
            hint = "compressed-tensors stores rotated matrices"
            raise CannotEncode(f"{self.name} cannot store a rotation", where=self.name, got=spec, hint=hint)
        return self.export(spec, dense_modules)

    def in_transformers(self, spec: QuantSpec) -> Loading:
        """Whether plain transformers loads experts that `export` stores with this spec."""
        return Loading.NO

    def leave_rest(self, config: Mapping[str, Any], experts: str, dense: Sequence[str]) -> dict[str, Any]:
        """A config of `export` that leaves out all modules but those called `experts` and below, however engines spell
        them, and of those the `dense` ones.

        Engines have names of their own for many modules, fuse some, and have some that no file stores (tied ones).
        """
        return dict(config)

    def unknown_keys(self, config: Config) -> list[str]:
        """Config keys with a value that are neither in `used` nor in `ignored`."""
        stated = {key for key, value in config.quant.items() if value is not None}
        return sorted(stated - self.used - self.ignored - {"quant_method"})


def outside(module: str) -> str:
    """A regular expression for the names of modules that are not called `module`, nor below one that is."""
    return rf"^(?!.*\.{module}(\.|$)).*"


def require(config: Config, key: str, kind: type | tuple[type, ...], legal: Sequence[Any] = ()) -> Any:
    """A required config value of the right type, and one of `legal` if given."""
    value = config.quant.get(key)
    return checked(value, key, kind, legal, config.source)


def checked(value: Any, key: str, kind: type | tuple[type, ...], legal: Sequence[Any], source: str) -> Any:
    """`value` if it has the right type (a bool is not an int) and is one of `legal`; raises otherwise."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    names = " or ".join(k.__name__ for k in kinds)
    wrong = not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)
    if wrong or (legal and value not in legal):
        expected = ", ".join(map(str, legal)) if legal else names
        raise UnsupportedFormat(f"unsupported value of '{key}'", where=source, expected=expected, got=repr(value))
    return value


def optional(config: Config, key: str, kind: type | tuple[type, ...], default: Any, legal: Sequence[Any] = ()) -> Any:
    """Like `require`, with a default for a missing or null key."""
    return default if config.quant.get(key) is None else require(config, key, kind, legal)


def codes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor of any one-byte dtype, as codes: a view, never a conversion."""
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


def scalar(tensor: Tensor, lead: tuple[int, ...] = ()) -> Tensor:
    """A stored scalar of shape [] or [1] for each expert as the [1, 1] of a per-tensor level."""
    if tensor.numel() != math.prod(lead):
        raise BadValue("a per-tensor value must have one element", got=list(tensor.shape[len(lead) :]))
    return tensor.reshape(*lead, 1, 1)
