/* Fast paths of lancebill.numbers and the formats: what torch defines, in one pass instead of many.
 *
 * Every function computes on the calling thread and takes dense arrays. Loaders call them from one thread per slice of
 * experts. Results are those of the torch definitions, bit for bit. */
#ifndef LANCEBILL_NUMBERS_H
#define LANCEBILL_NUMBERS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A bit field of the numbers of a block: see `Plane` in formats/_gguf_blocks.py. */
typedef struct lancebill_plane {
  int32_t start, size, width, run, bit, lanes, first, shift;
} lancebill_plane;

/* The numbers of one kind in a block, and where those of all blocks go. */
typedef struct lancebill_field {
  const lancebill_plane *planes;
  int32_t plane_count;
  int32_t flip;    /* every so many bytes one has its top bit inverted; 0: none */
  int32_t bytes;   /* of each block in `out`: assembled from the planes ... */
  int32_t nibbles; /* ... or, of one plane of two 4-bit lanes, not unpacked: column 2i in the low nibble of byte i */
  uint8_t *out;
} lancebill_field;

/* One number for each row and each `side` columns (0: for the whole row); NULL: none. */
typedef struct lancebill_level {
  const float *numbers; /* [rows][stride] */
  int32_t stride;
  int32_t side;
  int32_t divide; /* whether a value is divided by its number instead of multiplied */
} lancebill_level;

enum lancebill_encoding { LANCEBILL_INTEGER = 0, LANCEBILL_MINIFLOAT = 1 };
enum lancebill_most { LANCEBILL_MOST_SCALES = 3 };

/* A type of codes. */
typedef struct lancebill_code_type {
  int32_t encoding; /* an enum lancebill_encoding */
  float low, high;  /* the largest codes' values: positions beyond are clamped */
  int32_t offset;   /* integers: subtracted from the value to give the code ... */
  int32_t mask;     /* stored bits of the code */
  int32_t mantissa, bias, bits; /* minifloats */
} lancebill_code_type;

/* Rounding of a matrix under given levels, and its error. */
typedef struct lancebill_rounding {
  const float *values; /* [rows][columns] */
  uint8_t *codes;      /* [rows][columns] */
  int64_t rows, columns;
  /* position = (value + minimum) / step + zero, in units of the code table */
  lancebill_level minimum, step, zero;
  /* the value of a code: (its table entry - zero) * scale ... - minimum */
  lancebill_level scales[LANCEBILL_MOST_SCALES];
  int32_t scale_count;
  lancebill_code_type type;
  float beyond_low, beyond_high; /* positions outside are counted as saturated */
  /* results */
  double squares, energy; /* sums of squared errors and of squared values */
  float worst, peak;      /* largest error and largest value */
  int64_t saturated, flushed;
} lancebill_rounding;

/* Rounding of a matrix with several scales in turn, of which only the error counts. */
typedef struct lancebill_trials {
  const float *values; /* [rows][columns] */
  const float *steps;  /* [candidates][rows][blocks]: a position is value * (1 / step) + zero */
  float *errors;       /* [candidates][rows][blocks]: step**2 * sum of ((rounded position - position) * value)**2 */
  int64_t *best;       /* [rows][blocks]: the candidate with the least error, the first of equal ones */
  int64_t rows, columns;
  int32_t candidates;
  int32_t side; /* columns of a block; the last one of a row may have fewer */
  lancebill_level zero;
  lancebill_code_type type;
} lancebill_trials;

typedef struct lancebill_survey {
  int64_t sum;            /* of the whole words of 8 bytes, modulo 2**64 */
  uint8_t any, low, high; /* all bits that occur, the smallest and the largest byte */
} lancebill_survey;

#pragma GCC visibility push(default)
/* [batch][rows][columns] of 1, 2 or 4 bytes to [batch][columns][rows]. */
void lancebill_transpose(const void *in, void *out, int64_t batch, int64_t rows, int64_t columns, int32_t bytes);

/* Two 4-bit codes per byte, [batch][rows][columns / 2], to [batch][columns][rows / 2]; `rows` is even. Of each eight
 * columns, nibble j of their four bytes is column order[j]. */
void lancebill_turn_nibbles(const uint8_t *in, uint8_t *out, int64_t batch, int64_t rows, int64_t columns,
                            const int32_t *order);

/* The fields of `count` blocks of `size` bytes. */
void lancebill_read_fields(const uint8_t *blocks, int64_t count, int64_t size, const lancebill_field *fields,
                           int32_t field_count);

/* A dense bit stream: `groups` of eight codes of 1 to 7 bits, one byte per code. */
void lancebill_unpack_bits(const uint8_t *data, int64_t groups, int32_t bits, uint8_t *out);

/* Whether any of the `wanted` bytes occurs. */
int32_t lancebill_contains(const uint8_t *bytes, int64_t count, const uint8_t *wanted, int32_t wanted_count);

/* Whether any number of 2 or 4 bytes has all bits of `exponent` set: NaN and infinity. */
int32_t lancebill_not_finite(const void *numbers, int64_t count, int32_t bytes, uint32_t exponent);

/* What all bytes have in common. */
void lancebill_survey_bytes(const uint8_t *bytes, int64_t count, lancebill_survey *found);

void lancebill_round(lancebill_rounding *work);

void lancebill_try_scales(const lancebill_trials *work);
#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
