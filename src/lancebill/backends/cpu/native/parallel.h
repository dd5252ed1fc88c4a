// The thread pool: OpenMP with dynamic scheduling, one task at a time, in order.
#pragma once

#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace lancebill {

extern bool one_thread_only;  // see lancebill_use_one_thread

namespace {

// Runs task(i, thread) for i in [0, count). Tasks are independent, and results must not depend on the thread.
template <class Task>
void parallel(int threads, int64_t count, Task task) {
#ifdef _OPENMP
  if (threads > 1 && count > 1 && !one_thread_only) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < count; i++) task(i, omp_get_thread_num());
    return;
  }
#endif
  (void)threads;
  for (int64_t i = 0; i < count; i++) task(i, 0);
}

}  // namespace
}  // namespace lancebill
