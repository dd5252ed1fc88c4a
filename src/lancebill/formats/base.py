"""What every checkpoint format is made of: parts, schemes, and the format itself.

A `Format` reads a config; for each module it answers with a `Scheme`: the spec of the numbers, the
stored tensors (`Part`) and the two directions between them and a `LogicalWeight`. Nothing in a
format knows of files, experts, shards or kernels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lancebill.errors import BadValue, CannotEncode, UnsupportedFormat
from lancebill.formats import axes as ax
from lancebill.formats.stored import TORCH_DTYPES
from lancebill.formats.stored import Config as Config
from lancebill.formats.stored import Stored as Stored
from lancebill.numbers.dtypes import BF16, F16, F32, ZERO16, DType
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
        """The stored dtype of the first of `suffixes` that is present."""
        return next((self.stored[s].dtype for s in suffixes if s in self.stored), default)

    def has(self, suffix: str) -> bool:
        return suffix in self.stored


@dataclass(frozen=True)
class Part:
    """One stored tensor of a scheme.

    `suffix` lists the spellings after the module's name; `axes` the shapes that are in use. An
    optional part is all-or-none within a layer. `whole` parts cannot be cut in their stored form.
    """

    role: str
    suffix: tuple[str, ...]
    dtypes: tuple[str, ...]
    axes: tuple[str, ...]
    bits: int = 1  # of one packed code, where the axes have a `^`
    optional: bool = False
    whole: bool = False

    def ratio(self, dtype: str) -> tuple[int, int]:
        """(code bits, word bits) for the packed axis."""
        return self.bits, 8 * TORCH_DTYPES[dtype].itemsize

    def shapes(self, n: int, k: int, dtype: str) -> list[tuple[int, ...]]:
        return [ax.shape(axes, n, k, self.ratio(dtype)) for axes in self.axes]

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
    """A `Part` with single values allowed where a tuple has one entry."""

    def tup(value: str | tuple[str, ...]) -> tuple[str, ...]:
        return (value,) if isinstance(value, str) else value

    return Part(role, tup(suffix), tup(dtypes), tup(axes), bits, optional, whole)


SCALAR = ("", "1")
BIAS = part("bias", (".bias", "_bias"), FLOATS, "n", optional=True)


@dataclass(frozen=True)
class Scheme(ABC):
    """A format resolved for one module. Subclasses say `unpack` and its inverse `pack`.

    Bias and activation-side tensors are carried here, the same for all.
    """

    spec: QuantSpec
    parts: tuple[Part, ...]

    @abstractmethod
    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        """Stored tensors by role to the canonical form of an [n, k] matrix."""

    @abstractmethod
    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        """The inverse: tensors by role."""

    @property
    def zero_range(self) -> tuple[int, int]:
        """Integer zero points this scheme can store, inclusive."""
        return 0, (1 << self.spec.dtype.bits) - 1

    @property
    def act_order(self) -> bool:
        """Whether weights of this scheme carry a column permutation."""
        return False

    def stored_size(self, stored: Callable[[str], Tensor | None]) -> tuple[int, int] | None:
        """(n, k) where a stored tensor says them and shapes do not; `stored` reads a role's tensor."""
        return None

    def part(self, role: str) -> Part | None:
        return next((p for p in self.parts if p.role == role), None)

    def units(self) -> dict[str, int] | None:
        """The steps in n and k at which all parts can be cut; None where one must be read whole."""
        if not all(p.cuttable for p in self.parts):
            return None
        steps = {"n": 1, "k": 1}
        for p in self.parts:
            for axes in p.axes:
                for name, step in ax.units(axes, p.ratio(p.dtypes[0])).items():
                    steps[name] = math.lcm(steps[name], step)
        return steps

    def decode(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        """Stored tensors by role to a `LogicalWeight`, bias and activation side included."""
        weight = self.unpack(stored, n, k)
        if (found := _nan_scales(weight)) is not None:
            raise BadValue("scales that are NaN", got=found)
        inputs = {role: stored[role] for role in INPUT_ROLES if role in stored}
        return replace(weight, bias=stored.get("bias"), inputs=inputs)

    def encode(self, weight: LogicalWeight) -> dict[str, Tensor]:
        """The inverse of `decode`; refuses what this scheme has no form for."""
        self._check_holds(weight)
        stored = self.pack(weight)
        stored.update(weight.inputs)
        if weight.bias is not None:
            stored["bias"] = weight.bias
        return stored

    def _check_holds(self, weight: LogicalWeight) -> None:
        if weight.spec != self.spec:
            raise CannotEncode("this scheme holds another spec", expected=self.spec, got=weight.spec)
        if (found := _nan_scales(weight)) is not None:
            raise CannotEncode("scales that are NaN", got=found)
        if weight.perm is not None and not self.act_order:
            raise CannotEncode("this scheme has no place for an act-order permutation")
        for role in (*weight.inputs, *(["bias"] if weight.bias is not None else [])):
            if self.part(role) is None:
                raise CannotEncode(f"this scheme has no place for '{role}'")
        if weight.zero is not None and weight.spec.zero is not None and weight.spec.zero.dtype == ZERO16:
            low, high = self.zero_range
            smallest, largest = int(weight.zero.min()), int(weight.zero.max())
            if smallest < low or largest > high:
                raise CannotEncode(
                    "zero points outside what this scheme can store",
                    expected=f"{low} to {high}",
                    got=f"{smallest} to {largest}",
                )


def _nan_scales(weight: LogicalWeight) -> str | None:
    """How many mini-floats of a level are NaN, if any; wide floats are left to `lancebill verify --values`."""
    for level, codes in weight.levels():
        count = 0 if level.dtype.nan_code is None else int(level.dtype.decode(codes).isnan().sum())
        if count:
            return f"{count} of {codes.numel()} {level.dtype} numbers"
    return None


@dataclass(frozen=True)
class Dense(Scheme):
    """Unquantised: the tensor is the matrix."""

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        return LogicalWeight(self.spec, stored["codes"].reshape(n, k))

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        return {"codes": weight.codes}


_DENSE = {
    stored: Dense(spec, (part("codes", (".weight", ""), stored, "n k"), BIAS))
    for stored, spec in (("BF16", DENSE_BF16), ("F16", DENSE_F16), ("F32", DENSE_F32))
}


def dense(module: Module) -> Dense:
    """The scheme of a module a format leaves alone, in the dtype it is stored in."""
    return _DENSE.get(module.dtype(".weight", "", default="BF16"), _DENSE["BF16"])


@dataclass(frozen=True)
class Example:
    """A config this format reads and the scheme it must resolve to: what the shared tests run on.

    `n` and `k` are sizes that exercise it (partial blocks where it has them).
    """

    name: str
    config: Config
    scheme: Scheme
    n: int = 128
    k: int = 256
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # input roles present, and their shapes
    bias: bool = False


class Format(ABC):
    """A family of checkpoints. One file in this folder ends in `FORMAT = ...`; nothing else is edited."""

    name: ClassVar[str]
    used: ClassVar[frozenset[str]] = frozenset()  # config keys that are read
    ignored: ClassVar[frozenset[str]] = frozenset()  # keys known not to change the numbers
    model_keys: ClassVar[frozenset[str]] = frozenset()  # what it says in config.json outside its own section
    stacked: ClassVar[bool] = False  # checkpoints of this format hold all experts of a layer in one tensor

    @abstractmethod
    def matches(self, config: Config) -> bool:
        """Exactly one format says yes."""

    @abstractmethod
    def scheme(self, config: Config, module: Module) -> Scheme:
        """How `module` is stored: overrides, groups and ignore lists end here."""

    @abstractmethod
    def examples(self) -> Iterator[Example]:
        """Every variant, for the tests that run over the registry."""

    def activations(self, config: Config, module: Module) -> ActivationSpec | None:
        """How the checkpoint wants `module`'s input represented; None = 16-bit, as it comes."""
        return None

    def export(self, spec: QuantSpec, dense_modules: Sequence[str]) -> tuple[dict[str, Any], Scheme]:
        """The quantisation config and scheme with which this format holds `spec`.

        `dense_modules` are left unquantised and named in the config.
        """
        raise CannotEncode(f"lancebill does not write {self.name}", where=self.name)

    def unknown_keys(self, config: Config) -> list[str]:
        """Config keys that are neither read nor known to be harmless."""
        return sorted(set(config.quant) - self.used - self.ignored - {"quant_method"})


def require(config: Config, key: str, kind: type | tuple[type, ...], legal: Sequence[Any] = ()) -> Any:
    """A required config value of the right type, from a closed set if one is given."""
    value = config.quant.get(key)
    return checked(value, key, kind, legal, config.source)


def checked(value: Any, key: str, kind: type | tuple[type, ...], legal: Sequence[Any], source: str) -> Any:
    """`value` if it has the right type (a bool is no int) and is one of `legal`."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    names = " or ".join(k.__name__ for k in kinds)
    wrong = not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)
    if wrong or (legal and value not in legal):
        expected = ", ".join(map(str, legal)) if legal else names
        raise UnsupportedFormat(f"cannot use the value of '{key}'", where=source, expected=expected, got=repr(value))
    return value


def optional(config: Config, key: str, kind: type | tuple[type, ...], default: Any, legal: Sequence[Any] = ()) -> Any:
    """Like `require`, with a default for a missing or null key."""
    return default if config.quant.get(key) is None else require(config, key, kind, legal)


def codes_of(tensor: Tensor) -> Tensor:
    """One-byte storage of whatever torch dtype as codes: a view of the bytes, never a conversion."""
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


def scalar(tensor: Tensor) -> Tensor:
    """A stored scalar, spelled [] or [1], as the [1, 1] of a tensor-wide level."""
    if tensor.numel() != 1:
        raise BadValue("a per-tensor value has one element", got=list(tensor.shape))
    return tensor.reshape(1, 1)
