// flags x86_64: -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512vbmi -mgfni -mfma -mf16c -mamx-tile -mamx-bf16 ?-mavx512fp16 ?-fno-tree-coalesce-vars
#include "layer.h"
#include "plan.h"
#include "tiles.h"

const lancebill::Level* lancebill::level_amx() {
  static constexpr Level level = {"amx", Amx::tiles, run_layer<Amx>};
  return &level;
}
