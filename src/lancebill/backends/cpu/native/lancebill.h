/* The C ABI of the CPU kernels for quantised experts. Plain structs and functions, called through ctypes.
 *
 * One call computes a whole layer, out = sum over slots of weight * (w2 @ act(w13 @ q(x) + b13) + b2), or one linear.
 * Weights are read in the packed form described here. Expanded weights stay in the caches, nothing is kept between
 * calls, and there is no global state: several threads may call at once.
 *
 * The value of a packed weight, for output row n and column k of group g = k / group:
 *
 *   W[n, k] = row_scale[n] * (scale[n, g] * (code_value(n, k) - zero[n, g]) - offset[n, g])
 *
 * with code_value(c) = step * (table[c] - center)   LANCEBILL_TABLE4   codes of up to 4 bits, with table and center
 *                    = step * (c - center)          LANCEBILL_BYTE     integers of 7 and 8 bits, offset binary
 *                                                   LANCEBILL_BITS6    likewise, of 5 and 6 bits
 *                    = step * minifloat(c)          LANCEBILL_FLOAT8   sign, 7 - m exponent and m mantissa bits
 * A zero point is in units of the table: code_value - zero is step * (table[c] - zero_byte), and center is unused.
 *
 * Packed sizes. Rows are packed in blocks of 16, columns in groups:
 *   padded(columns) = columns rounded up to a multiple of max(group, 32)
 *   padded(rows)    = rows rounded up to a multiple of 16, of 32 with TABLE4 codes. Before a gated activation each half
 *                     is padded separately (halves of I rows: 2 * roundup(I, 16)) and blocks alternate: block 2j has
 *                     gate rows 16j .. 16j+15, block 2j+1 has up rows 16j .. 16j+15.
 * Padding columns may hold any code (their inputs are zero). Padding rows may hold any code and any finite scale.
 * All arrays are dense, with the expert as the first dimension: array[expert][block][...].
 *
 * Codes: [expert][strip][unit], with units of 64 bytes. A strip is one block, or two with TABLE4. Unit u has columns
 * 4u .. 4u+3:
 *   TABLE4: byte 4r + b is row r, column 4u + b: of the even block in the low nibble, of the odd block in the high one.
 *   BYTE:   byte 4r + b is row r, column 4u + b.
 *   FLOAT8: byte 16b + r is row r, column 4u + b.
 *   BITS6:  bytes as with BYTE, but four units are stored in three, those of columns 16v .. 16v+15 from byte 192v on:
 *           the first three in the low six bits, the fourth in the top two of each, its lowest two bits in the first.
 * Scales, zeros, offsets: [expert][block][group][16 rows], each number in its native type. I8 numbers are bytes under
 * a factor for each row and `factor` columns: [expert][block][record], where a record has the factors of 16 rows in
 * fp32, then [group][16 rows] bytes of so many columns. The last record of a block is complete.
 *
 * Building: compile every *.cpp of this folder as C++17. A file that starts with `// flags MACHINE: ...` is only for
 * that machine (`uname -m`) and needs those flags; without them, skip the file: its level is then absent. All other
 * files are for every machine; a first line `// flags: ...` gives their extra flags.
 */
#ifndef LANCEBILL_H
#define LANCEBILL_H

#include <stddef.h>
#include <stdint.h>

#define LANCEBILL_ABI 16

#ifdef __cplusplus
extern "C" {
#endif

enum lancebill_codes { LANCEBILL_TABLE4 = 0, LANCEBILL_BYTE = 1, LANCEBILL_FLOAT8 = 2, LANCEBILL_BITS6 = 3 };

/* NONE: 1. E8M0 is 2^(b - 127), but b = 0 is read as zero. E4M3 is signed. I8 is a signed integer times its factor,
 * with TABLE4 and BITS6 only. The kernels do not check for NaN and infinite codes: the packer must reject them. */
enum lancebill_scale {
  LANCEBILL_SCALE_NONE = 0,
  LANCEBILL_SCALE_BF16 = 1,
  LANCEBILL_SCALE_F16 = 2,
  LANCEBILL_SCALE_F32 = 3,
  LANCEBILL_SCALE_E8M0 = 4,
  LANCEBILL_SCALE_E4M3 = 5,
  LANCEBILL_SCALE_I8 = 6
};

/* U8: one byte, 0 .. 255, in units of the table (not FLOAT8). OFFSET: a number that is subtracted after scaling: a
 * minimum, or scale * zero for zero points that are floats or do not fit a byte. In fp32, or in I8 if the scales are. */
enum lancebill_zero {
  LANCEBILL_ZERO_NONE = 0,
  LANCEBILL_ZERO_U8 = 1,
  LANCEBILL_ZERO_OFFSET_F32 = 2,
  LANCEBILL_ZERO_OFFSET_I8 = 3
};

/* How the input of a GEMM is rounded or quantised (the rules of lancebill.numbers.activations):
 *   BF16, F16, F32  rounded to that type. Integer kernels then keep 16 bits per value, relative to the group's largest;
 *                   of F32 they keep 23.
 *   INT8            scale = fp32(largest / 127), q = clamp(rint(x / scale), -128, 127); integer products are exact.
 *   E4M3            scale = fp32(largest / 448), x / scale rounded to e4m3fn; then like F16.
 * Blocks of zeros have a scale of 1. */
enum lancebill_input_kind {
  LANCEBILL_INPUT_BF16 = 0,
  LANCEBILL_INPUT_F16 = 1,
  LANCEBILL_INPUT_F32 = 2,
  LANCEBILL_INPUT_INT8 = 3,
  LANCEBILL_INPUT_E4M3 = 4
};

enum lancebill_float { LANCEBILL_BF16 = 0, LANCEBILL_F16 = 1, LANCEBILL_F32 = 2 };

/* One matrix of all experts. Unused pointers are NULL. */
typedef struct lancebill_matrix {
  int32_t rows;    /* logical: 2I before a gated activation */
  int32_t columns; /* logical */
  int32_t group;   /* columns that share a scale and a zero: 16, 32, 64 or 128; larger groups repeat them */
  int32_t factor;  /* columns that share a factor of I8 numbers: group times a power of two; 0 without I8 */
  int32_t codes;   /* enum lancebill_codes */
  int32_t scale;   /* enum lancebill_scale; NONE if there are only row scales */
  int32_t zero;    /* enum lancebill_zero */
  int32_t center;  /* subtracted from codes or table entries; ignored with ZERO_U8 and FLOAT8 */
  int32_t mantissa; /* FLOAT8 only: 2 (e5m2), 3 (e4m3) or 4 (e3m4), bias 2^(6 - m) - 1; step corrects others */
  float step;      /* value of one unit of the table; 1 for integers, 0.5 for e2m1 */
  int32_t table[16]; /* TABLE4: 0 .. 16383; to 2^24 - 1 with fp32 inputs, which are then multiplied in fp32: no I8, U8 */

  const uint8_t *code_bytes;
  const void *scale_bytes;  /* NULL with SCALE_NONE */
  const void *zero_bytes;   /* NULL with ZERO_NONE */
  const float *row_scale;   /* [expert][padded rows], in packed row order; NULL: 1 */
  const float *bias;        /* [expert][padded rows], in packed row order; NULL: none */
  const int32_t *perm;      /* [expert][columns]: packed column j reads input feature perm[j] (act-order); NULL: j */
  const float *pre_scale;   /* [expert][columns]: multiplies the inputs before all else, natural order; NULL: none */
  const float *input_scale; /* [expert]: static scale of INT8 or E4M3 inputs; NULL: dynamic */

  int32_t input;       /* enum lancebill_input_kind */
  int32_t input_group; /* columns per dynamic scale, a multiple of `group`; 0: the whole row */
  int32_t rotation;    /* columns of a block of the Hadamard rotation of the inputs, after pre_scale; 0: none */
} lancebill_matrix;

/* The functions of lancebill.moe.activation, with the same names. Gated ones come first. */
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

/* A layer of experts, or a linear: matrix w13, no activation, w2 NULL. */
typedef struct lancebill_layer {
  int32_t experts;
  int32_t activation; /* enum lancebill_activation */
  float limit;        /* <= 0: none */
  float alpha, beta;
  const lancebill_matrix *w13;
  const lancebill_matrix *w2;
} lancebill_layer;

/* The rows of a call. Set either `ids` (indexed: out[token] = weighted sum over its slots) or `offsets` (grouped: one
 * row out for each row in, no weights, no sum). */
typedef struct lancebill_work {
  const void *x;
  void *out;
  int64_t x_stride, out_stride;  /* in elements */
  int32_t x_type, out_type;      /* enum lancebill_float */

  int32_t tokens, top_k;         /* indexed */
  const int32_t *ids;            /* [tokens][top_k] experts, in 32-bit words; ids that are no expert are skipped */
  int32_t id_words;              /* words per id: 1 or 2 */
  int64_t id_row, id_column;     /* strides in words */
  const int32_t *expert_map;     /* [mapped] local expert of each id, or negative; NULL: ids are local */
  int32_t mapped;
  const void *weights;           /* [tokens][top_k]; NULL: 1 */
  int32_t weight_type;           /* enum lancebill_float */
  int64_t weight_row, weight_column; /* strides in elements */
  int32_t weight_on_input;       /* the weight multiplies x instead of the result */

  const int64_t *offsets;        /* grouped: [experts + 1]; expert e has list entries offsets[e] .. offsets[e + 1] */
  const int64_t *rows;           /* grouped: [offsets[experts]], row of x and out of each entry; NULL: its index */

  int32_t threads;               /* >= 1 */
  int32_t level;                 /* enum lancebill_level; negative: the best of this machine */
  int32_t tile_rows;             /* use AMX tiles from this many rows per expert; 0: the default; negative: never */
  void *scratch;                 /* 64-byte aligned, lancebill_scratch_bytes long; NULL: allocated in the call */
} lancebill_work;

/* A call that CUDA makes: lancebill_host_call is a host function (CUhostFn), `call` its argument. It takes no lock of
 * Python. All that `work` points to must stay where it is as long as the call can be made. If the call fails, `out` is
 * filled with NaN and `status` is set; it keeps the first failure until the owner resets it. */
typedef struct lancebill_call {
  const lancebill_layer *layer;
  const lancebill_work *work; /* indexed, with scratch; out is dense fp32 */
  int32_t status;             /* enum lancebill_status */
  int64_t count;              /* calls so far */
  int64_t nanoseconds;        /* that they took, together */
} lancebill_call;

/* The slots of a batch, dense. */
typedef struct lancebill_slots {
  const int32_t *ids;        /* [tokens][top_k]; ids outside the map are no expert */
  const float *weights;      /* [tokens][top_k] */
  int64_t tokens, top_k;
  const int32_t *expert_map; /* [mapped] expert of each id, or negative */
  int32_t mapped;
} lancebill_slots;

/* What a large batch costs on either way, in microseconds: lancebill.split.ways.BatchCosts, with the same names. */
typedef struct lancebill_batch_costs {
  double tokens;
  double call, begin, row;      /* the CPU's part: any call, one with only some experts, and each row */
  double wait, copy, run, sums; /* copies: any, of an expert, for a gap between experts, and for a row of the CPU */
  double most_rows, most_chosen;
  double late;                  /* by so much the CPU may take longer */
  const double *at, *taken;     /* [points] tokens of an expert, and the CPU's time */
  int32_t points;
} lancebill_batch_costs;

typedef struct lancebill_division {
  int32_t used; /* experts with tokens */
  double cpu_us, stream_us, cpu_alone_us, copied_us, rows;
} lancebill_division;

/* The scoring functions of lancebill.moe.routing. */
enum lancebill_scoring {
  LANCEBILL_SCORING_SOFTMAX = 0,
  LANCEBILL_SCORING_SIGMOID = 1,
  LANCEBILL_SCORING_SQRTSOFTPLUS = 2,
  LANCEBILL_SCORING_NONE = 3
};

enum { LANCEBILL_MOST_EXPERTS = 2048 };  /* columns of the logits in lancebill_route */

/* From logits to ids and weights; the fields of lancebill.moe.routing.Routing with the same names. */
typedef struct lancebill_routing {
  int32_t experts; /* columns of the logits, zero experts included */
  int32_t top_k;
  int32_t scoring; /* enum lancebill_scoring */
  int32_t after_top_k;
  int32_t n_group, topk_group; /* n_group 0 or 1: no groups */
  int32_t renormalize;
  int32_t zero_experts;
  float epsilon;
  float scale;             /* multiplies the weights */
  const float *bias;       /* [experts]; NULL: none. Added to the logits. */
  const float *correction; /* [experts]; NULL: none. Added to the scores for the selection. */
  const void *table;       /* [vocabulary][top_k] experts by token id; read if input_ids is set */
  int32_t table_is_int64;  /* else int32 */
  int64_t vocabulary;

  const void *logits;       /* [tokens][experts], rows `stride` elements apart */
  int64_t stride;
  int32_t logits_type;      /* enum lancebill_float */
  int32_t threads;          /* >= 1 */
  int64_t tokens;
  const int64_t *input_ids; /* [tokens]: hash routing; negative: padding. NULL: experts are selected by score. */

  int32_t *ids;    /* [tokens][top_k]; -1: padding or a zero expert */
  float *weights;  /* [tokens][top_k] */
  float *identity; /* [tokens]: total weight of zero experts; may be NULL if there are none */
} lancebill_routing;

/* A decode step of a whole model: small steps over a few rows of fp32, one after the other. Buffers belong to the caller;
 * a step reads and writes `rows` rows of them. */
enum lancebill_step_kind {
  LANCEBILL_STEP_NORM = 0,      /* out = in / rms(in) * what; what: float[width]; number: epsilon */
  LANCEBILL_STEP_DENSE = 1,     /* out = matrices times in; what: lancebill_dense[count], results side by side */
  LANCEBILL_STEP_PACKED = 2,    /* a linear; what: lancebill_layer, how: lancebill_work */
  LANCEBILL_STEP_EXPERTS = 3,   /* likewise, of experts; ids and weights are those of `how` */
  LANCEBILL_STEP_ROUTE = 4,     /* from logits; how: lancebill_routing */
  LANCEBILL_STEP_ATTENTION = 5, /* in: queries, keys and values of all heads, overwritten; what: lancebill_heads */
  LANCEBILL_STEP_ADD = 6,       /* out += factor * in; the factor is number, or sigmoid(what[row]) if what is set */
  LANCEBILL_STEP_GATE = 7,      /* out = act(first width columns) * next width columns; what: lancebill_layer */
  LANCEBILL_STEP_PICK = 8       /* out = the rows in `picks`; later steps have only these */
};

/* A matrix as torch stores it, [rows][columns]. */
typedef struct lancebill_dense {
  const void *weights;
  const float *bias; /* [rows]; NULL: none */
  int32_t type;      /* enum lancebill_float */
  int32_t rows, columns;
} lancebill_dense;

/* The heads of one attention. Query head h uses key head h / (queries / keys). */
typedef struct lancebill_heads {
  int32_t layer;              /* in the caches */
  int32_t queries, keys, dim;
  int32_t angles;             /* rotated columns at the start of a head */
  int32_t window;             /* tokens that a token sees, itself included; <= 0: all */
  float scale, eps;
  const float *query_norm, *key_norm; /* [dim]; NULL: none */
} lancebill_heads;

typedef struct lancebill_step {
  int32_t kind;  /* enum lancebill_step_kind */
  int32_t count;
  const float *input;
  float *out;
  int64_t in_stride, out_stride; /* in elements */
  int64_t width;
  float number;
  const void *what, *how;
} lancebill_step;

typedef struct lancebill_decode {
  const lancebill_step *steps;
  int32_t count, rows;
  int32_t threads, level;
  void *scratch;             /* the largest that lancebill_scratch_bytes and lancebill_dense_bytes give for a step */
  const float *cos, *sin;    /* [rows][angles] */
  const int64_t *positions;  /* [rows] in its sequence; its keys and values are stored there */
  const int64_t *capacities; /* [rows] tokens that the caches of its sequence have room for */
  void *const *const *caches; /* [rows][2 * layers]: keys and values, each [keys][capacity][dim] */
  int32_t cache_type;        /* enum lancebill_float */
  int32_t picked;
  const int32_t *picks;      /* [picked] rows, ascending */
  int32_t tile_rows;         /* dense bf16 matrices use AMX tiles from this many rows, as in lancebill_work; negative:
                                nor does attention take tokens of a sequence together */
} lancebill_decode;

enum lancebill_level {
  LANCEBILL_PORTABLE = 0,
  LANCEBILL_NEON = 1,       /* with byte dot products (asimddp) */
  LANCEBILL_AVX2 = 2,
  LANCEBILL_AVXVNNI = 3,    /* AVX2 with 256-bit VNNI */
  LANCEBILL_AVX512BW = 4,   /* AVX-512 with BW, DQ and VL */
  LANCEBILL_AVX512VNNI = 5, /* with VNNI, too */
  LANCEBILL_AVX512 = 6,     /* with VNNI, VBMI and GFNI */
  LANCEBILL_AMX = 7,        /* AVX512 and bf16 tiles */
  LANCEBILL_LEVELS = 8
};

enum lancebill_status {
  LANCEBILL_OK = 0,
  LANCEBILL_BAD_MATRIX = 1,  /* sizes, kinds or pointers of a matrix contradict each other */
  LANCEBILL_BAD_LAYER = 2,   /* w13, w2 and the activation disagree about the intermediate size */
  LANCEBILL_BAD_WORK = 3,    /* neither ids nor offsets, no threads, decreasing offsets ... */
  LANCEBILL_NO_LEVEL = 4,    /* this machine or this build does not have that level */
  LANCEBILL_NO_MEMORY = 5,
  LANCEBILL_BAD_TOKEN = 6,   /* a token id is outside the hash table */
  LANCEBILL_LOST_WORKER = 7, /* a thread ended before its task did; the next call starts another one */
  LANCEBILL_SPOILED = 8      /* an earlier call of a mailbox came too late, and wrote where this one's rows are */
};

#pragma GCC visibility push(default)
int32_t lancebill_abi(void);                       /* LANCEBILL_ABI of the library */
uint32_t lancebill_levels(void);                   /* bit i: level i is built and this machine can run it */
const char *lancebill_level_name(int32_t level);   /* such as "avx512"; NULL for an unknown level */
const char *lancebill_status_text(int32_t status); /* one sentence */

/* From now on workers run on any of these CPUs (count 0: of all), and threads without a task spin this many microseconds
 * before they sleep (negative: the default). A caller stays where it is. */
void lancebill_place_threads(const int32_t *cpus, int32_t count, int32_t spin_us);

/* From now on calls compute on the threads of the OpenMP library with this GOMP_parallel, instead of threads of our own;
 * with NULL on ours again. Nothing then replaces a thread that ends, and a forked child must not call. */
void lancebill_use_openmp(void *gomp_parallel);

void lancebill_end_worker(void); /* for tests: the next worker that takes a task ends, as if it were killed */

/* Scratch bytes of this call; negative: minus the status that lancebill_run would return. */
int64_t lancebill_scratch_bytes(const lancebill_layer *layer, const lancebill_work *work);
int32_t lancebill_run(const lancebill_layer *layer, const lancebill_work *work);

void lancebill_host_call(void *call); /* a lancebill_call */
void lancebill_fail_call(void *call, int32_t status); /* what a call with this status does */

/* How many slots each of the experts [experts] has. */
void lancebill_count_slots(const lancebill_slots *slots, int32_t experts, double *counts);

/* How many experts of a batch the CPU computes: the first ones of `order` [experts], which gets those with tokens.
 * `begun` [experts]: whether its copy has begun. Both ways together must take at most `worth` of one alone. */
int32_t lancebill_divide(const lancebill_batch_costs *costs, double worth, const double *counts, const uint8_t *begun,
                         int32_t experts, int32_t *order, lancebill_division *found);

/* The rows with a slot of an expert: their numbers, ids and weights, one after the other; returns how many. There is
 * room for all rows. */
int64_t lancebill_take_rows(const lancebill_slots *slots, int32_t *rows, int32_t *ids, float *weights);

/* Routes all tokens. Nothing is written unless it returns LANCEBILL_OK. */
int32_t lancebill_route(const lancebill_routing *routing);
int32_t lancebill_decode_step(const lancebill_decode *call);

/* One dense step: out[count][rows] = x[count][columns] times a lancebill_dense; a row's sums do not depend on others. */
int32_t lancebill_linear(const void *weights, int32_t type, int32_t rows, int32_t columns, const float *bias,
                         const float *x, int64_t x_stride, int32_t count, float *out, int64_t out_stride,
                         int32_t threads, int32_t level);

int64_t lancebill_dense_bytes(int64_t rows, int64_t columns); /* scratch of a dense step with so many of x */

/* Bytes per expert of the packed arrays, for checks: codes, scales, zeros (0 if absent). */
void lancebill_packed_bytes(const lancebill_matrix *matrix, int32_t gated, int64_t bytes[3]);

/* Reads memory like the fastest kernels: `streams` streams per thread, with prefetch. Measures the memory bandwidth for
 * benchmarks and flushes the last-level cache. Returns a sum so that the reads are not optimised away. */
uint64_t lancebill_stream(const void *memory, int64_t bytes, int32_t threads, int32_t streams);

/* Requests huge pages inside [memory, memory + bytes). Call it before the first write. Returns 0 or errno. */
int32_t lancebill_huge_pages(void *memory, int64_t bytes);
#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
