// flags x86_64: -mavx2 -mfma -mf16c -ffp-contract=fast
#include "rows.h"

const lancebill::RowKernels* lancebill::rows_avx2() { return &kRowKernels; }
