"""Unquantised checkpoints: bf16, fp16 or fp32 as stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lancebill.errors import CannotEncode
from lancebill.formats.base import Config, Example, Format, Loading, Module, Scheme, Stored, dense
from lancebill.numbers.spec import QuantSpec

_STORED = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_STATED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # as configs spell them


class Unquantized(Format):
    name = "dense"

    def matches(self, config: Config) -> bool:
        return config.method is None

    def scheme(self, config: Config, module: Module) -> Scheme:
        return dense(module)

    def export(self, spec: QuantSpec, dense_modules: Sequence[str]) -> tuple[dict[str, Any], Scheme]:
        if spec.quantized:
            raise CannotEncode("an unquantised checkpoint stores bf16, fp16 or fp32", got=spec)
        return {}, dense(Module("", {".weight": Stored(_STORED[spec.dtype.name], ())}))

    def in_transformers(self, spec: QuantSpec) -> Loading:
        return Loading.YES

    def expert_module(self, config: Config, name: str) -> Module:
        stated = config.model.get("dtype", config.model.get("torch_dtype"))
        stored = _STATED.get(stated) if isinstance(stated, str) else None
        return Module(name, {".weight": Stored(stored, ())} if stored else {})

    def examples(self) -> Iterator[Example]:
        for name, stored in _STORED.items():
            module = Module("", {".weight": Stored(stored, ())})
            yield Example(name, Config(), dense(module), bias=name == "fp16")


FORMAT = Unquantized()
