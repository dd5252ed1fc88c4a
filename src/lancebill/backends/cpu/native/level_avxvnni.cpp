// flags x86_64: -mavx2 -mfma -mf16c -mavxvnni
#include "layer.h"
#include "plan.h"
#include "vector_avx2.h"

const lancebill::Level* lancebill::level_avxvnni() {
  static constexpr Level level = {"avxvnni", Avx2::tiles, run_layer<Avx2>};
  return &level;
}
