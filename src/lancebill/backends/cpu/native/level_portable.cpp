// flags: -O2
// What every machine can run. -O3 would double its speed, and compile for a minute on machines that never use it; for the
// same reason loops that are unrolled for other levels stay loops.
#define LANCEBILL_PLAIN_LOOPS
#include "layer.h"
#include "plan.h"
#include "vector_portable.h"

const lancebill::Level* lancebill::level_portable() {
  static constexpr Level level = {"portable", Portable::tiles, run_layer<Portable>};
  return &level;
}
