// Parallel loops: independent tasks, given out one at a time, in order, to the threads of a team (see parallel.cpp).
#pragma once

#include <cstdint>

namespace lancebill {

using TaskFunction = void (*)(const void* task, int64_t index, int thread);

// Tells the core that this thread spins.
inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Runs call(task, i, thread) for i in [0, count), with thread in [0, threads). The caller is thread 0. If a thread ends
// before its task has, the task is lost: then loops of this caller do nothing until it asks for the status.
void run_tasks(int threads, int64_t count, TaskFunction call, const void* task);

// The same on an engine's OpenMP threads (see openmp.cpp); false if nobody asked for that.
bool run_on_openmp(int threads, int64_t count, TaskFunction call, const void* task);

bool tasks_are_lost();  // in a loop of this thread, since it last asked for the status

// LANCEBILL_OK, or LANCEBILL_LOST_WORKER if tasks were lost since this thread last asked. Every call ends with it.
int32_t take_loop_status();

namespace {

// Runs task(i, thread) for i in [0, count). Results must not depend on the thread.
template <class Task>
void parallel(int threads, int64_t count, const Task& task) {
  if (tasks_are_lost()) return;  // what this loop would read was not computed
  if (threads > 1 && count > 1) {
    run_tasks(threads, count,
              [](const void* given, int64_t i, int thread) { (*static_cast<const Task*>(given))(i, thread); }, &task);
    return;
  }
  for (int64_t i = 0; i < count; i++) task(i, 0);
}

}  // namespace
}  // namespace lancebill
