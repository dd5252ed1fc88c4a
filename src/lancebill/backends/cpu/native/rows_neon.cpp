// flags aarch64: -march=armv8.2-a+dotprod -ffp-contract=fast
#include "rows.h"

const lancebill::RowKernels* lancebill::rows_neon() { return &kRowKernels; }
