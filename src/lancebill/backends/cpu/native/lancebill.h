/* Quantised experts on CPUs: the C ABI. Plain structs and functions, to be called through ctypes.
 *
 * One call computes a whole layer, out = sum over slots of weight * (w2 @ act(w13 @ q(x) + b13) + b2), or one linear.
 * Weights are read in the packed form described here; nothing is expanded beyond a core's caches, nothing is kept
 * between calls, and no state is global: calls from several threads at once are fine.
 *
 * What a packed matrix means, for output row n and column k of group g = k / group:
 *
 *   W[n, k] = row_scale[n] * (scale[n, g] * (code_value(n, k) - zero[n, g]) - offset[n, g])
 *
 * with code_value(c) = step * (table[c] - center)   LANCEBILL_TABLE4   codes of up to 4 bits, table and center given
 *                    = step * (c - center)          LANCEBILL_BYTE     integers of 5 to 8 bits, offset binary
 *                    = step * minifloat(c)          LANCEBILL_FLOAT8   sign, 7 - m exponent and m mantissa bits
 * and zero counted in the units of the table: code_value - zero is step * (table[c] - zero_byte), center unused then.
 *
 * Packed sizes. Rows come in blocks of 16, columns in groups:
 *   padded(columns) = columns rounded up to a multiple of max(group, 32)
 *   padded(rows)    = rows rounded up to a multiple of 16, of 32 where codes are TABLE4; where the matrix feeds a gated
 *                     activation, each half by itself (halves of I rows: 2 * roundup(I, 16)), and blocks alternate:
 *                     packed block 2j holds gate rows 16j .. 16j+15, packed block 2j+1 holds up rows 16j .. 16j+15.
 * Padded columns may hold any code (their inputs are zero); padded rows may hold any code, and finite scales.
 * All arrays are dense with the expert first: array[expert][block][...].
 *
 * Codes, units of 64 bytes, [expert][strip][unit]. A strip is one block, of TABLE4 two; unit u holds columns 4u .. 4u+3:
 *   TABLE4: byte 4r + b holds column 4u + b of row r, of the even block in its low nibble, of the odd one in its high.
 *   BYTE:   byte 4r + b is row r, column 4u + b.
 *   FLOAT8: byte 16b + r is row r, column 4u + b.
 * Scales, zeros, offsets: [expert][block][group][16 rows], each number in its native bytes.
 *
 * Building: every *.cpp of this folder, C++17. A file that starts with `// flags MACHINE: ...` is for that machine alone
 * (`uname -m`) and takes those flags as well; it may be left out where the compiler does not know them, and its level is
 * then simply absent. All other files are compiled for every machine, with the flags of a first line `// flags: ...`.
 */
#ifndef LANCEBILL_H
#define LANCEBILL_H

#include <stddef.h>
#include <stdint.h>

#define LANCEBILL_ABI 2

#ifdef __cplusplus
extern "C" {
#endif

enum lancebill_codes { LANCEBILL_TABLE4 = 0, LANCEBILL_BYTE = 1, LANCEBILL_FLOAT8 = 2 };

/* NONE: one. E8M0 is 2^(b - 127) with b = 0 read as zero; E4M3 has a sign. NaN and infinite codes are the packer's to
 * refuse: they are not looked for here. */
enum lancebill_scale {
  LANCEBILL_SCALE_NONE = 0,
  LANCEBILL_SCALE_BF16 = 1,
  LANCEBILL_SCALE_F16 = 2,
  LANCEBILL_SCALE_F32 = 3,
  LANCEBILL_SCALE_E8M0 = 4,
  LANCEBILL_SCALE_E4M3 = 5
};

/* U8: one byte, 0 .. 255, in the units of the table (TABLE4 and BYTE only). F32: one float, what is subtracted after
 * scaling: a minimum, or scale * zero for zero points that are floats or beyond a byte. */
enum lancebill_zero { LANCEBILL_ZERO_NONE = 0, LANCEBILL_ZERO_U8 = 1, LANCEBILL_ZERO_OFFSET_F32 = 2 };

/* How a product's input is represented before it is multiplied (the rules of lancebill.numbers.activations):
 *   BF16, F16, F32  rounded to that type. Integer kernels then carry 16 bits per value relative to each group's largest.
 *   INT8            scale = fp32(largest / 127), q = clamp(rint(x / scale), -128, 127); integer products are exact.
 *   E4M3            scale = fp32(largest / 448), x / scale rounded to e4m3fn; carried like F32 afterwards.
 * Blocks of zeros have a scale of one. */
enum lancebill_input_kind {
  LANCEBILL_INPUT_BF16 = 0,
  LANCEBILL_INPUT_F16 = 1,
  LANCEBILL_INPUT_F32 = 2,
  LANCEBILL_INPUT_INT8 = 3,
  LANCEBILL_INPUT_E4M3 = 4
};

enum lancebill_float { LANCEBILL_BF16 = 0, LANCEBILL_F16 = 1, LANCEBILL_F32 = 2 };

/* One of the experts' matrices. Pointers that are not needed are NULL. */
typedef struct lancebill_matrix {
  int32_t rows;    /* logical: 2I where it feeds a gated activation */
  int32_t columns; /* logical */
  int32_t group;   /* 16, 32, 64 or 128 columns: one scale, one zero; larger groups repeat theirs */
  int32_t codes;   /* enum lancebill_codes */
  int32_t scale;   /* enum lancebill_scale; whole-row scales are row_scale, with NONE here */
  int32_t zero;    /* enum lancebill_zero */
  int32_t center;  /* what a code or table entry is relative to; ignored with ZERO_U8 and FLOAT8 */
  int32_t mantissa; /* FLOAT8 only: 2 (e5m2), 3 (e4m3) or 4 (e3m4), IEEE-like bias 2^(6 - m) - 1; step holds any other */
  float step;      /* value of one unit of the table; 1 for integers, 0.5 for e2m1 */
  uint16_t table[16]; /* TABLE4 only: entries 0 .. 16383. All <= 127: one look-up; larger ones take two. */

  const uint8_t *code_bytes;
  const void *scale_bytes;  /* NULL with SCALE_NONE */
  const void *zero_bytes;   /* NULL with ZERO_NONE */
  const float *row_scale;   /* [expert][padded rows], in packed row order; NULL: ones */
  const float *bias;        /* [expert][padded rows], in packed row order; NULL: none */
  const int32_t *perm;      /* [expert][columns]: packed column j takes input feature perm[j] (act-order); NULL: j */
  const float *pre_scale;   /* [expert][columns]: inputs are multiplied by it first, natural order; NULL: none */
  const float *input_scale; /* [expert]: static scale of INT8 or E4M3 inputs, which divides them; NULL: measured */

  int32_t input;       /* enum lancebill_input_kind */
  int32_t input_group; /* columns of a measured scale, a multiple of `group`; 0: the whole row */
} lancebill_matrix;

/* The functions of lancebill.moe.activation, by the same names. Gated ones first. */
enum lancebill_activation {
  LANCEBILL_SILU = 0,
  LANCEBILL_GELU = 1,
  LANCEBILL_GELU_TANH = 2,
  LANCEBILL_SWIGLUOAI = 3,
  LANCEBILL_SWIGLUSTEP = 4,
  LANCEBILL_SITU = 5,
  LANCEBILL_RELU2_NO_MUL = 16,
  LANCEBILL_SILU_NO_MUL = 17,
  LANCEBILL_GELU_NO_MUL = 18,
  LANCEBILL_GELU_TANH_NO_MUL = 19
};

/* A layer of experts: w2 is NULL for a linear, whose matrix is w13 and which takes no activation. */
typedef struct lancebill_layer {
  int32_t experts;
  int32_t activation; /* enum lancebill_activation */
  float limit;        /* <= 0: none */
  float alpha, beta;
  const lancebill_matrix *w13;
  const lancebill_matrix *w2;
} lancebill_layer;

/* What to compute. Either `ids` (indexed: out[token] = weighted sum over its slots) or `offsets` (grouped: rows to rows,
 * no weights, no sum). */
typedef struct lancebill_work {
  const void *x;
  void *out;
  int64_t x_stride, out_stride;  /* elements from row to row */
  int32_t x_type, out_type;      /* enum lancebill_float */

  int32_t tokens, top_k;         /* indexed */
  const int32_t *ids;            /* [tokens][top_k] local experts; others are skipped */
  const float *weights;          /* [tokens][top_k]; NULL: ones */
  int32_t weight_on_input;       /* the weight multiplies x instead of the result */

  const int64_t *offsets;        /* grouped: [experts + 1]; rows offsets[e] .. offsets[e + 1] of the list are expert e's */
  const int64_t *rows;           /* grouped: [offsets[experts]], row of x and of out; NULL: the place in the list itself */

  int32_t threads;               /* >= 1; without OpenMP one thread does it all */
  int32_t level;                 /* enum lancebill_level; negative: the best this machine has */
  int32_t tile_rows;             /* AMX from this many rows an expert; 0: the default; negative: never */
  void *scratch;                 /* 64-byte aligned, lancebill_scratch_bytes long; NULL: allocated in the call */
} lancebill_work;

enum lancebill_level {
  LANCEBILL_PORTABLE = 0,
  LANCEBILL_NEON = 1,       /* dot products of bytes (asimddp) */
  LANCEBILL_AVX2 = 2,
  LANCEBILL_AVXVNNI = 3,    /* AVX2 with 256-bit VNNI */
  LANCEBILL_AVX512VNNI = 4, /* AVX-512 with VNNI */
  LANCEBILL_AVX512 = 5,     /* with VNNI and VBMI */
  LANCEBILL_AMX = 6,        /* all of it and bf16 tiles */
  LANCEBILL_LEVELS = 7
};

enum lancebill_status {
  LANCEBILL_OK = 0,
  LANCEBILL_BAD_MATRIX = 1,  /* sizes, kinds or pointers of a matrix that contradict each other */
  LANCEBILL_BAD_LAYER = 2,   /* w13, w2 and the activation disagree about the intermediate size */
  LANCEBILL_BAD_WORK = 3,    /* neither ids nor offsets, no threads, offsets that fall ... */
  LANCEBILL_NO_LEVEL = 4,    /* this machine or this build does not have that level */
  LANCEBILL_NO_MEMORY = 5
};

#pragma GCC visibility push(default)
int32_t lancebill_abi(void);                       /* LANCEBILL_ABI of the library */
uint32_t lancebill_levels(void);                   /* bit i: level i was built and this machine can run it */
const char *lancebill_level_name(int32_t level);   /* "avx512"; NULL for no such level */
const char *lancebill_status_text(int32_t status); /* one sentence */
int32_t lancebill_has_openmp(void);

/* Bytes of scratch for this call; negative: minus the status that lancebill_run would return. */
int64_t lancebill_scratch_bytes(const lancebill_layer *layer, const lancebill_work *work);
int32_t lancebill_run(const lancebill_layer *layer, const lancebill_work *work);

/* Bytes of each packed array of one expert, for checks: codes, scales, zeros (0 where there is none). */
void lancebill_packed_bytes(const lancebill_matrix *matrix, int32_t gated, int64_t bytes[3]);

/* Reads memory as the fastest kernels do: `streams` pieces at once per thread, prefetching ahead. For the ceiling of a
 * benchmark and to empty the last-level cache. The result keeps the reads from being optimised away. */
uint64_t lancebill_stream(const void *memory, int64_t bytes, int32_t threads, int32_t streams);

/* Asks for huge pages inside [memory, memory + bytes); 0, or errno. Worth it before the pages are first touched. */
int32_t lancebill_huge_pages(void *memory, int64_t bytes);
#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
