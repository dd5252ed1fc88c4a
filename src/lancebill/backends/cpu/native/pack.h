/* Packing on the CPU: rows of canonical codes or numbers to the order that lancebill.h describes, in one pass. */
#ifndef LANCEBILL_PACK_H
#define LANCEBILL_PACK_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* How a part's codes or numbers lie in memory. Words are 32-bit words of eight 4-bit codes. */
enum lancebill_order {
  LANCEBILL_BY_ROW = 0,    /* row after row */
  LANCEBILL_BY_WORD = 1,   /* words of eight columns of a row, those of all rows side by side (GPTQ) */
  LANCEBILL_BY_COLUMN = 2  /* column after column, in words of eight rows: 0, 2, 4, 6, 1, 3, 5, 7 (AWQ) */
};

/* Rows of one matrix of several experts, and where they go. */
typedef struct lancebill_rows {
  const uint8_t *const *parts; /* [expert], or [expert][gate, up] if `gated`: where each begins */
  int64_t stride;              /* bytes from a row, a line of words or a column to the next */
  int32_t order;               /* an enum lancebill_order */
  int32_t experts;
  int32_t rows;           /* logical; of gate and up together if `gated` */
  int32_t columns;        /* logical: codes or groups */
  int32_t padded_rows;    /* of the packed form; padding is zero */
  int32_t padded_columns;
  int32_t gated;          /* blocks of gate and up rows alternate */
  uint8_t *out;           /* dense, but for gaps */
  int32_t threads;
} lancebill_rows;

#pragma GCC visibility push(default)
/* Codes of `bits` 4 (two per byte, even columns in the low nibble; `columns` even) or 8, to units of `codes`, an enum
 * lancebill_codes. `table` translates each code (NULL: unchanged), `invalid` lists codes other than 0 that no kernel
 * supports. Words are read to TABLE4: by word, `columns` is a multiple of 8, by column, the rows of a part are. Returns
 * 0, 1 if there was an invalid code (what is packed is then undefined), or LANCEBILL_LOST_WORKER. */
int32_t lancebill_pack_codes(const lancebill_rows *rows, int32_t bits, int32_t codes, const uint8_t *table,
                             int32_t table_size, const uint8_t *invalid, int32_t invalids);

/* Numbers of 1, 2 or 4 bytes by row, one per group, to [block][group][16 rows]. After every `record` groups, `gap`
 * bytes are left as they are; blocks have whole records. Returns an enum lancebill_status. */
int32_t lancebill_pack_groups(const lancebill_rows *rows, int32_t bytes, int32_t record, int32_t gap);
#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
