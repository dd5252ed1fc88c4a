// flags x86_64: -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512vbmi -mgfni -mfma -mf16c ?-fno-tree-coalesce-vars
#include "layer.h"
#include "plan.h"
#include "vector_avx512.h"

const lancebill::Level* lancebill::level_avx512() {
  static constexpr Level level = {"avx512", Avx512::tiles, run_layer<Avx512>};
  return &level;
}
