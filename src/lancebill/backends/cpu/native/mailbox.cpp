// Calls that a GPU asks for by writing to host memory. A thread of ours watches the mailboxes: CUDA's own way to call a
// host function takes 60 microseconds and more until the function runs and the stream goes on.
//
// The thread spins while calls come, and sleeps between looks when none came for a while: an idle process uses next to
// no CPU time, and the first call after a pause waits for the end of one sleep.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <vector>

#include "mailbox.h"

#include "parallel.h"

namespace lancebill {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::milliseconds(2);       // since the last call; a model's step has shorter pauses
constexpr auto kAlert = std::chrono::milliseconds(200);    // then it looks often for as long
constexpr long kShortSleep = 50'000, kLongSleep = 1'000'000;  // nanoseconds

void sleep_for(long nanoseconds) {
  const timespec time{0, nanoseconds};
  nanosleep(&time, nullptr);
}

// Makes the call that was asked for, if one was. The request may be newer than its number, if the GPU gave up meanwhile:
// then nobody waits for this answer, and the next look finds the newer number.
bool serve(lancebill_mailbox& box) {
  const uint32_t asked = __atomic_load_n(&box.asked, __ATOMIC_ACQUIRE);
  if (asked == box.done) return false;
  const auto given_up = [&] { return __atomic_load_n(&box.late, __ATOMIC_ACQUIRE) == asked; };
  const bool wanted = !given_up();
  if (wanted) {
    void* const call = __atomic_load_n(&box.request, __ATOMIC_RELAXED);
    box.spoiled ? lancebill_fail_call(call, LANCEBILL_SPOILED) : lancebill_host_call(call);
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);  // the sums were written before `late` is read
  box.spoiled = wanted && given_up();
  __atomic_store_n(&box.done, asked, __ATOMIC_RELEASE);
  return true;
}

class Watcher {
 public:
  bool add(lancebill_mailbox* box) {
    const Turn turn(*this);
    boxes_.push_back(box);
    if (!running_) running_ = start();
    return running_;
  }

  // The thread holds the lock while it looks: when this returns, it has looked for the last time.
  void remove(lancebill_mailbox* box) {
    const Turn turn(*this);
    boxes_.erase(std::remove(boxes_.begin(), boxes_.end(), box), boxes_.end());
  }

 private:
  // The lock of a caller. The thread takes it again at once, so it must know that someone else wants it.
  struct Turn {
    explicit Turn(Watcher& watcher) : waiting(watcher.waiting_), lock((waiting++, watcher.mutex_)) { waiting--; }
    std::atomic<int>& waiting;
    std::lock_guard<std::mutex> lock;
  };

  bool start() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    const int failed = pthread_create(
        &thread, nullptr,
        [](void* watcher) -> void* {
          static_cast<Watcher*>(watcher)->watch();
          return nullptr;
        },
        this);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (!failed) pthread_detach(thread);
    return failed == 0;
  }

  // Ends when no mailbox is left.
  void watch() {
    auto last = Clock::now();
    for (;;) {
      bool served = false;
      while (waiting_.load() > 0) sched_yield();
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (boxes_.empty()) {
          running_ = false;
          return;
        }
        for (int look = 0; look < 64 && !served; look++) {
          for (lancebill_mailbox* box : boxes_) served |= serve(*box);
          pause_core();
        }
      }
      const auto now = Clock::now();
      if (served) last = now;
      if (now - last > kAlert) {
        sleep_for(kLongSleep);
      } else if (now - last > kSpin) {
        sleep_for(kShortSleep);
      }
    }
  }

  std::mutex mutex_;
  std::atomic<int> waiting_{0};
  std::vector<lancebill_mailbox*> boxes_;
  bool running_ = false;
};

// A forked child has no such thread and no GPU: it starts anew.
std::atomic<Watcher*>& watcher() {
  static std::atomic<Watcher*> one{[] {
    pthread_atfork(nullptr, nullptr, [] { watcher().store(new Watcher); });
    return new Watcher;
  }()};
  return one;
}

}  // namespace
}  // namespace lancebill

int32_t lancebill_watch(lancebill_mailbox* box) {
  return lancebill::watcher().load()->add(box) ? LANCEBILL_OK : LANCEBILL_NO_MEMORY;
}

void lancebill_unwatch(lancebill_mailbox* box) { lancebill::watcher().load()->remove(box); }
