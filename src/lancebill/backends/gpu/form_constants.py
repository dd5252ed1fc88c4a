"""What a form of weights is to the compiler of a GEMM kernel."""

from __future__ import annotations

from lancebill.backends.gpu.kernels.weight_form import BF16, E4M3, F16, S8, WeightForm

ELEMENT = {BF16: "bf16", F16: "fp16", E4M3: "fp8e4nv", S8: "i8"}  # of input rows


def form_constants(form: WeightForm) -> dict[str, str | int | bool]:
    return {"CODE": form.code, "SCALE": form.scale, "GROUP": form.group, "ACT": form.activations, "ZERO": form.zero}
