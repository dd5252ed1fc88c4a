"""ctypes mirror of lancebill.h, with the same names and numbers. A test compares the two."""

from __future__ import annotations

from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_uint32, c_void_p
from enum import IntEnum

ABI = 16
MOST_EXPERTS = 2048  # columns of the logits that `lancebill_route` takes
BAD_TOKEN = 6  # the status of a token id outside the hash table


class Codes(IntEnum):
    """How codes decode to values."""

    TABLE4 = 0
    BYTE = 1
    FLOAT8 = 2
    BITS6 = 3


class ScaleKind(IntEnum):
    """The type of a group's scale."""

    NONE = 0
    BF16 = 1
    F16 = 2
    F32 = 3
    E8M0 = 4
    E4M3 = 5
    I8 = 6


class ZeroKind(IntEnum):
    """Type of the zero point: a byte subtracted before scaling, or an offset subtracted after it."""

    NONE = 0
    U8 = 1
    OFFSET_F32 = 2
    OFFSET_I8 = 3


class Input(IntEnum):
    """How the input of a GEMM is rounded or quantised."""

    BF16 = 0
    F16 = 1
    F32 = 2
    INT8 = 3
    E4M3 = 4


class Float(IntEnum):
    """The dtype of x, out and routing weights."""

    BF16 = 0
    F16 = 1
    F32 = 2


class ActivationKind(IntEnum):
    """The functions of `lancebill.moe.activation`."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    SWIGLUOAI = 3
    SWIGLUSTEP = 4
    SITU = 5
    RELU2_NO_MUL = 16
    SILU_NO_MUL = 17
    GELU_NO_MUL = 18
    GELU_TANH_NO_MUL = 19


class Scoring(IntEnum):
    """The scoring functions of `lancebill.moe.routing`."""

    SOFTMAX = 0
    SIGMOID = 1
    SQRTSOFTPLUS = 2
    NONE = 3


class IsaLevel(IntEnum):
    """Instruction sets; each has its own kernels."""

    PORTABLE = 0
    NEON = 1
    AVX2 = 2
    AVXVNNI = 3
    AVX512BW = 4
    AVX512VNNI = 5
    AVX512 = 6
    AMX = 7

    def __str__(self) -> str:
        return self.name.lower()


class DecodeStep(IntEnum):
    """The small steps of a decode step."""

    NORM = 0
    DENSE = 1
    PACKED = 2
    EXPERTS = 3
    ROUTE = 4
    ATTENTION = 5
    ADD = 6
    GATE = 7
    PICK = 8


class MatrixStruct(Structure):
    """One matrix of all experts."""

    _fields_ = [
        ("rows", c_int32),
        ("columns", c_int32),
        ("group", c_int32),
        ("factor", c_int32),
        ("codes", c_int32),
        ("scale", c_int32),
        ("zero", c_int32),
        ("center", c_int32),
        ("mantissa", c_int32),
        ("step", c_float),
        ("table", c_int32 * 16),
        ("code_bytes", c_void_p),
        ("scale_bytes", c_void_p),
        ("zero_bytes", c_void_p),
        ("row_scale", c_void_p),
        ("bias", c_void_p),
        ("perm", c_void_p),
        ("pre_scale", c_void_p),
        ("input_scale", c_void_p),
        ("input", c_int32),
        ("input_group", c_int32),
        ("rotation", c_int32),
    ]


class LayerStruct(Structure):
    """A layer of experts, or a linear."""

    _fields_ = [
        ("experts", c_int32),
        ("activation", c_int32),
        ("limit", c_float),
        ("alpha", c_float),
        ("beta", c_float),
        ("w13", c_void_p),
        ("w2", c_void_p),
    ]


class WorkStruct(Structure):
    """Input and output rows, dispatch, threads and level of one call."""

    _fields_ = [
        ("x", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
        ("x_type", c_int32),
        ("out_type", c_int32),
        ("tokens", c_int32),
        ("top_k", c_int32),
        ("ids", c_void_p),
        ("id_words", c_int32),
        ("id_row", c_int64),
        ("id_column", c_int64),
        ("expert_map", c_void_p),
        ("mapped", c_int32),
        ("weights", c_void_p),
        ("weight_type", c_int32),
        ("weight_row", c_int64),
        ("weight_column", c_int64),
        ("weight_on_input", c_int32),
        ("offsets", c_void_p),
        ("rows", c_void_p),
        ("threads", c_int32),
        ("level", c_int32),
        ("tile_rows", c_int32),
        ("scratch", c_void_p),
    ]


class CallStruct(Structure):
    """A call that CUDA makes."""

    _fields_ = [
        ("layer", c_void_p),
        ("work", c_void_p),
        ("status", c_int32),
        ("count", c_int64),
        ("nanoseconds", c_int64),
    ]


class MailboxStruct(Structure):
    """Where a GPU asks for calls."""

    _fields_ = [
        ("request", c_void_p),
        ("asked", c_uint32),
        ("done", c_uint32),
        ("late", c_uint32),
        ("spoiled", c_uint32),
    ]


class SlotsStruct(Structure):
    """The slots of a batch."""

    _fields_ = [
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("tokens", c_int64),
        ("top_k", c_int64),
        ("expert_map", c_void_p),
        ("mapped", c_int32),
    ]


class BatchCostsStruct(Structure):
    """What a large batch costs on either way."""

    _fields_ = [
        *((name, c_double) for name in ("tokens", "call", "begin", "row", "wait", "copy", "run", "sums")),
        *((name, c_double) for name in ("most_rows", "most_chosen", "late")),
        ("at", c_void_p),
        ("taken", c_void_p),
        ("points", c_int32),
    ]


class DivisionStruct(Structure):
    """How a large batch is divided."""

    _fields_ = [
        ("used", c_int32),
        *((name, c_double) for name in ("cpu_us", "stream_us", "cpu_alone_us", "copied_us", "rows")),
    ]


class RoutingStruct(Structure):
    """From logits to ids and weights."""

    _fields_ = [
        ("experts", c_int32),
        ("top_k", c_int32),
        ("scoring", c_int32),
        ("after_top_k", c_int32),
        ("n_group", c_int32),
        ("topk_group", c_int32),
        ("renormalize", c_int32),
        ("zero_experts", c_int32),
        ("epsilon", c_float),
        ("scale", c_float),
        ("bias", c_void_p),
        ("correction", c_void_p),
        ("table", c_void_p),
        ("table_is_int64", c_int32),
        ("vocabulary", c_int64),
        ("logits", c_void_p),
        ("stride", c_int64),
        ("logits_type", c_int32),
        ("threads", c_int32),
        ("tokens", c_int64),
        ("input_ids", c_void_p),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("identity", c_void_p),
    ]


class DenseStruct(Structure):
    """A matrix as torch stores it."""

    _fields_ = [
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("type", c_int32),
        ("rows", c_int32),
        ("columns", c_int32),
    ]


class HeadsStruct(Structure):
    """The heads of one attention."""

    _fields_ = [
        ("layer", c_int32),
        ("queries", c_int32),
        ("keys", c_int32),
        ("dim", c_int32),
        ("angles", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("eps", c_float),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
    ]


class StepStruct(Structure):
    """One small step over the rows of a decode step."""

    _fields_ = [
        ("kind", c_int32),
        ("count", c_int32),
        ("input", c_void_p),
        ("out", c_void_p),
        ("in_stride", c_int64),
        ("out_stride", c_int64),
        ("width", c_int64),
        ("number", c_float),
        ("what", c_void_p),
        ("how", c_void_p),
    ]


class DecodeStruct(Structure):
    """A decode step of a whole model."""

    _fields_ = [
        ("steps", c_void_p),
        ("count", c_int32),
        ("rows", c_int32),
        ("threads", c_int32),
        ("level", c_int32),
        ("scratch", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("positions", c_void_p),
        ("capacities", c_void_p),
        ("caches", c_void_p),
        ("cache_type", c_int32),
        ("picked", c_int32),
        ("picks", c_void_p),
        ("tile_rows", c_int32),
    ]
