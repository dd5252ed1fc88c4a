// Loops on the threads of an engine's OpenMP library. Its threads spin between its own loops; where loops of both take
// turns, threads of ours would find the cores taken.
#include <algorithm>
#include <atomic>

#include "lancebill.h"
#include "parallel.h"

namespace lancebill {
namespace {

// GOMP_parallel, which GNU's OpenMP has, and LLVM's for compatibility: calls a function on every thread of a team, and
// returns when all have returned.
using OpenMp = void (*)(void (*function)(void*), void* data, unsigned threads, unsigned flags);

std::atomic<OpenMp> openmp{nullptr};

struct Loop {
  int64_t count;
  TaskFunction call;
  const void* task;
  std::atomic<int64_t> next{0};
  std::atomic<int> threads{0};  // that have come

  void work() {
    const int thread = threads.fetch_add(1);
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) call(task, i, thread);
  }
};

}  // namespace

bool run_on_openmp(int threads, int64_t count, TaskFunction call, const void* task) {
  const OpenMp run = openmp.load(std::memory_order_relaxed);
  if (run == nullptr) return false;
  Loop loop{count, call, task};
  const auto wanted = static_cast<unsigned>(std::min<int64_t>(threads, count));
  run([](void* given) { static_cast<Loop*>(given)->work(); }, &loop, wanted, 0);
  return true;
}

}  // namespace lancebill

void lancebill_use_openmp(void* gomp_parallel) {
  lancebill::openmp.store(reinterpret_cast<lancebill::OpenMp>(gomp_parallel));
}
