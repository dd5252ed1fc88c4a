"""Modules outside the experts that are written in specs of their own, as the model that is saved holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lancebill.checkpoint.load.projections import load_projection
from lancebill.checkpoint.read.slices import Reader
from lancebill.checkpoint.resolve.other_modules import OtherModule
from lancebill.checkpoint.write.variants import first_that_holds
from lancebill.errors import CannotEncode
from lancebill.formats.base import Format, Scheme
from lancebill.numbers.codec import keeps_codes, requantize
from lancebill.numbers.spec import DENSE_F32, QuantSpec
from lancebill.numbers.weight import FACTORS, LogicalWeight


@dataclass(frozen=True)
class RestModule:
    """A module outside the experts, and the spec that it has in the model.

    `module` has its name, and the tensors with its numbers: those of another module if it is `tied` to that one.
    Unquantised numbers were rounded to `dtype` before they were quantised.
    """

    module: OtherModule
    spec: QuantSpec
    dtype: torch.dtype
    tied: bool = False

    @property
    def as_stored(self) -> bool:
        return self.spec == self.module.scheme.spec

    @property
    def replaced(self) -> set[str]:
        """The stored tensors that are not copied."""
        return set() if self.tied else {source.tensor for source in self.module.sources.values()}

    def load(self, read: Reader) -> LogicalWeight:
        """The matrix as the model holds it."""
        weight = load_projection(read, self.module)
        if not weight.spec.quantized:
            weight = LogicalWeight(DENSE_F32, weight.codes.to(self.dtype).float(), bias=weight.bias)
        return requantize(weight, self.spec)[0]

    def check(self) -> None:
        """Raise if a checkpoint cannot hold what the model holds: inputs that are multiplied or reordered."""
        scheme, where = self.module.scheme, self.module.where
        if FACTORS in self.module.sources:
            raise CannotEncode("the scales of this module's inputs cannot be written", where=where)
        if scheme.act_order and (self.as_stored or keeps_codes(scheme.spec, self.spec)):
            raise CannotEncode("the order of this module's columns cannot be written", where=where)


@dataclass(frozen=True)
class WrittenModule:
    """A module of the rest and the scheme in which it is written."""

    rest: RestModule
    scheme: Scheme

    @property
    def module(self) -> OtherModule:
        return self.rest.module

    def encode(self, read: Reader) -> dict[str, Tensor]:
        """The tensors to write, by role."""
        weight = replace(self.rest.load(read), inputs={})
        return self.scheme.encode(requantize(weight, self.scheme.spec)[0])


def keeps_spec(format: Format, rest: RestModule) -> bool:
    """Whether the format can hold a module as it is stored."""
    try:
        rest.check()
        format.add_modules({}, rest.spec, [rest.module.module])
    except CannotEncode:
        return False
    return True


def add_rest(
    format: Format, config: Mapping[str, Any], experts: Scheme, rest: Iterable[RestModule]
) -> tuple[dict[str, Any], tuple[WrittenModule, ...]]:
    """The config with the specs of `rest`, and how each of its modules is written: like `experts` if the specs are
    the same."""
    by_spec: dict[QuantSpec, list[RestModule]] = {}
    for member in rest:
        member.check()
        by_spec.setdefault(member.spec, []).append(member)
    written, made = dict(config), []
    for spec, members in by_spec.items():
        scheme = experts
        if spec != experts.spec:
            add = partial(format.add_modules, written, modules=[member.module.module for member in members])
            written, scheme = first_that_holds(spec, add)[1]
        made += [WrittenModule(member, scheme) for member in members]
    return written, tuple(made)
