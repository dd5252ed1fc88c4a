// flags x86_64: -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mamx-tile -mamx-bf16 -ffp-contract=fast
#include "tile_dense.h"

const lancebill::RowKernels* lancebill::rows_amx() {
  static constexpr DenseTiles tiles = {write_dense_inputs, tile_dense};
  static constexpr RowKernels kernels = {dense,        norm,  add,    gate,          rotate,   store, attend,
                                         attend_block, gated, &tiles, &kDensePanels, kTaskRows};
  return &kernels;
}
