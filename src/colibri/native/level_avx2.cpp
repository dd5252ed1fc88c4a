// flags x86_64: -mavx2 -mfma -mf16c ?-fno-tree-ter ?-fno-tree-reassoc
// GCC would put off additions until all their products are there, which no longer fit the registers.
#include "layer.h"
#include "plan.h"
#include "vector_avx2.h"

const colibri::Level* colibri::level_avx2() {
  static constexpr Level level = {"avx2", Avx2::tiles, run_layer<Avx2>};
  return &level;
}
