// flags x86_64: -mavx2 -mfma -mf16c ?-fno-tree-coalesce-vars
#include "layer.h"
#include "plan.h"
#include "vector_avx2.h"

const lancebill::Level* lancebill::level_avx2() {
  static constexpr Level level = {"avx2", Avx2::tiles, run_layer<Avx2>};
  return &level;
}
