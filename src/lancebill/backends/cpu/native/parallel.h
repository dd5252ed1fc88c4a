// All that is known of threads: tasks are handed out in order, one at a time, to whoever is free.
#pragma once

#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace lancebill {
namespace {

// task(i, thread) for i in [0, count). No task may depend on another, nor its result on the thread it runs on.
template <class Task>
void parallel(int threads, int64_t count, Task task) {
#ifdef _OPENMP
  if (threads > 1 && count > 1) {
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
