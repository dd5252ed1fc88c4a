"""The format and spec in which a conversion stores the experts."""

from __future__ import annotations

from dataclasses import dataclass

from lancebill.checkpoint.write.variants import first_that_holds
from lancebill.errors import CannotEncode, UnsupportedFormat
from lancebill.formats import registry
from lancebill.formats.base import Format, Scheme
from lancebill.numbers.spec import QuantSpec

DEFAULT_FORMAT, DENSE_FORMAT = "compressed-tensors", "dense"
ALIASES = {"gpt-oss": "mxfp4"}


@dataclass(frozen=True)
class Target:
    """The output format, and the spec as this format stores it."""

    format: Format
    spec: QuantSpec

    def scheme(self) -> Scheme:
        return self.format.config_for(self.spec, ())[1]


def choose_target(spec: QuantSpec, name: str | None = None) -> Target:
    """The format called `name`, or the default one, with `spec` as it stores it."""
    name = ALIASES.get(name or "", name) or (DEFAULT_FORMAT if spec.quantized else DENSE_FORMAT)
    formats = registry()
    if name not in formats:
        raise UnsupportedFormat(f"unknown format '{name}'", expected=f"for {spec}: {_able(spec)}")
    try:
        return _hold(formats[name], spec)
    except CannotEncode as error:
        able = _able(spec)
        hint = f"formats that can store {spec}: {able}" if able else error.hint
        raise CannotEncode(error.what, where=name, expected=error.expected, got=spec, hint=hint) from error


def _able(spec: QuantSpec) -> str:
    """The formats that can store `spec`."""
    public_names = {format_name: alias for alias, format_name in ALIASES.items()}
    return ", ".join(public_names.get(name, name) for name, format in registry().items() if _can_hold(format, spec))


def _hold(format: Format, spec: QuantSpec) -> Target:
    return Target(format, first_that_holds(spec, lambda variant: format.config_for(variant, ()))[0])


def _can_hold(format: Format, spec: QuantSpec) -> bool:
    try:
        _hold(format, spec)
    except CannotEncode:
        return False
    return True
