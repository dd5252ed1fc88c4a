"""The types of tensors in GGUF files: those that can be read, and the names of those that cannot."""

from __future__ import annotations

from dataclasses import dataclass

from lancebill.formats.stored import TORCH_DTYPES


@dataclass(frozen=True)
class GgmlType:
    """A block of `size` bytes holds `elements` numbers; `dtype` is set for unquantised types."""

    name: str
    elements: int
    size: int
    dtype: str | None = None


def _types() -> dict[int, GgmlType]:
    plain = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
    blocks = {
        2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
        10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
    }  # fmt: skip
    types = {i: GgmlType(*block) for i, block in blocks.items()}
    return types | {i: GgmlType(name, 1, TORCH_DTYPES[name].itemsize, name) for i, name in plain.items()}


TYPES = _types()
TYPE_IDS = {kind.name: i for i, kind in TYPES.items()}

# Types of ik_llama.cpp, whose files other programs cannot read; the last row has interleaved rows.
IK_TYPES = {
    97: "Q8_0_X4", 98: "Q8_1_X4", 99: "Q8_2_X4", 133: "Q6_0", 134: "IQ1_BN", 135: "IQ2_BN", 136: "Q8_K64",
    137: "IQ2_K", 138: "IQ3_K", 139: "IQ4_K", 140: "IQ5_K", 141: "IQ6_K", 142: "IQ2_TN", 143: "IQ1_TN", 144: "IQ4_KS",
    145: "IQ2_KS", 146: "IQ4_KSS", 147: "Q8_K16", 148: "Q8_K32", 149: "Q8_KR8", 150: "Q8_K128", 151: "Q8_KV",
    152: "IQ5_KS", 153: "IQ2_KT", 154: "IQ3_KT", 155: "IQ4_KT", 156: "IQ3_KS", 157: "IQ2_KL", 158: "IQ1_KT",
    202: "Q4_0_R8", 206: "Q5_0_R4", 208: "Q8_0_R8", 210: "Q2_K_R4", 211: "Q3_K_R4", 212: "Q4_K_R4", 213: "Q5_K_R4",
    214: "Q6_K_R4", 216: "IQ2_XXS_R4", 217: "IQ2_XS_R4", 218: "IQ3_XXS_R4", 219: "IQ1_S_R4", 220: "IQ4_NL_R4",
    221: "IQ3_S_R4", 222: "IQ2_S_R4", 223: "IQ4_XS_R8", 229: "IQ1_M_R4", 230: "BF16_R16", 233: "Q6_0_R4",
    335: "IQ2_BN_R4", 337: "IQ2_K_R4", 338: "IQ3_K_R4", 339: "IQ4_K_R4", 340: "IQ5_K_R4", 344: "IQ4_KS_R4",
    352: "IQ5_KS_R4", 353: "MXFP4_R8", 397: "Q8_K_R16", 398: "Q8_KV_R8", 399: "Q8_K_R8",
}  # fmt: skip
# Types of llama.cpp that files no longer have, that it only computes with, or that are too new.
OTHER_TYPES = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 42: "Q2_0",
}  # fmt: skip
HINT = "use a file of another type, such as Q4_K_M or IQ4_XS"


def why_unreadable(number: int) -> tuple[str, str | None]:
    """The name of a type that is not in `TYPES`, and what to do instead."""
    if number in IK_TYPES:
        return f"{IK_TYPES[number]}, of ik_llama.cpp", HINT
    return (OTHER_TYPES[number], HINT) if number in OTHER_TYPES else (f"type {number}", None)
