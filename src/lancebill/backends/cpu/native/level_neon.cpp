// flags aarch64: -march=armv8.2-a+dotprod
#include "layer.h"
#include "plan.h"
#include "vector_neon.h"

const lancebill::Level* lancebill::level_neon() {
  static constexpr Level level = {"neon", Neon::tiles, run_layer<Neon>};
  return &level;
}
