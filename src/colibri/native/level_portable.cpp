// What every machine can run.
#include "layer.h"
#include "plan.h"
#include "vector_portable.h"

const colibri::Level* colibri::level_portable() {
  static constexpr Level level = {"portable", Portable::tiles, run_layer<Portable>};
  return &level;
}
