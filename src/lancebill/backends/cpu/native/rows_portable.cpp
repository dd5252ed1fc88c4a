// flags: -ffp-contract=fast
#include "rows.h"

const lancebill::RowKernels* lancebill::rows_portable() { return &kRowKernels; }
