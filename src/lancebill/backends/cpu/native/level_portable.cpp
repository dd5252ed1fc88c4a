// flags: -O2
// The fallback for every machine. -O3 would double its speed, but takes a minute to compile on machines that never use
// it. For the same reason loops are not unrolled here.
#define LANCEBILL_PLAIN_LOOPS
#include "layer.h"
#include "plan.h"
#include "vector_portable.h"

const lancebill::Level* lancebill::level_portable() {
  static constexpr Level level = {"portable", Portable::tiles, run_layer<Portable>};
  return &level;
}
