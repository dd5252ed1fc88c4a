// flags x86_64: -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -ffp-contract=fast
#include "rows.h"

const lancebill::RowKernels* lancebill::rows_avx512() { return &kRowKernels; }
