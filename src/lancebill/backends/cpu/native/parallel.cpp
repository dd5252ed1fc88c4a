// Teams of threads. A call ends when its tasks have ended, not when every thread has come: beside other load a thread
// that the system does not run delays nobody, because the others take its tasks.
//
// A thread without a task spins for a short time, because a layer is several loops with little in between. Then it
// sleeps: an idle process uses no CPU time. It does not yield while it spins: beside other load, a thread that yielded
// got its core back too late to take a task, but one that slept got it at once.
//
// A worker that has ended (something killed it) is not missed while it has no task. If it had one, the caller finds
// that every worker that lives is idle and still a task has not ended; the call fails, and another thread takes its
// place.
#include "parallel.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "lancebill.h"

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

namespace lancebill {
namespace {

constexpr int kMostThreads = 1024, kMostCpus = 1024;
constexpr int32_t kSpinMicroseconds = 50;
constexpr long kLookForLostTasks = 100'000'000;  // nanoseconds that a caller sleeps in between

// Where threads run and how long they spin. Replaced as a whole, and never freed: threads read it at any time.
struct Setting {
  int32_t spin_us = kSpinMicroseconds;
  std::vector<int32_t> cpus;  // workers run on any of these; empty: on any of the machine
};

std::atomic<const Setting*> setting{new Setting};
std::atomic<bool> a_worker_shall_end{false};
thread_local bool lost_tasks = false;  // in a loop of this caller

// Sleeps while `word` is `value`, at most for `limit`; may wake for no reason.
void sleep_while(std::atomic<uint32_t>& word, uint32_t value, const timespec* limit = nullptr) {
#ifdef __linux__
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, limit, nullptr, 0);
#else
  (void)limit;
  if (word.load() == value) usleep(100);
#endif
}

void wake(std::atomic<uint32_t>& word, int threads) {
#ifdef __linux__
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, threads, nullptr, nullptr, 0);
#else
  (void)word, (void)threads;
#endif
}

// Spins until is_over() or until it has taken too long; returns whether it is over.
template <class Condition>
bool spin(const Condition& is_over) {
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    for (int i = 0; i < 32; i++) {
      if (is_over()) return true;
      pause_core();
    }
    const std::chrono::microseconds limit(setting.load(std::memory_order_relaxed)->spin_us);
    if (std::chrono::steady_clock::now() - start > limit) return false;
  }
}

void move_thread(const Setting& to) {
#ifdef __linux__
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  for (const int32_t cpu : to.cpus) CPU_SET(cpu, &allowed);
  for (int cpu = 0; to.cpus.empty() && cpu < CPU_SETSIZE; cpu++) CPU_SET(cpu, &allowed);
  pthread_setaffinity_np(pthread_self(), sizeof allowed, &allowed);  // it runs elsewhere if the system refuses
#else
  (void)to;
#endif
}

// A thread of a team beside the caller.
struct alignas(64) Worker {
  std::atomic<bool> busy{false};      // it may have a task
  std::atomic<long> id{0};            // the system's; 0: it has not run yet
  std::atomic<uint32_t> sleeping{0};  // its own word: a call with fewer threads than the team must wake the right ones

  void wake_up() {
    if (sleeping.exchange(0) == 1) wake(sleeping, 1);
  }

  bool lives() const {
#ifdef __linux__
    const long known = id.load();
    // Only if there is no such thread: a sandbox may refuse to ask.
    return known == 0 || syscall(SYS_tgkill, getpid(), known, 0) == 0 || errno != ESRCH;
#else
    return true;
#endif
  }
};

void end_thread() {
#ifdef __linux__
  syscall(SYS_exit, 0);
#endif
}

// The threads that work for one caller at a time.
class Team {
 public:
  // Returns whether all tasks have ended.
  bool run(int threads, int64_t count, TaskFunction call, const void* task) {
    add_workers(threads - 1);
    call_ = call;
    task_ = task;
    count_ = count;
    left_.store(static_cast<uint32_t>(count), std::memory_order_relaxed);
    tickets_.store(uint64_t(threads) << 32 | uint64_t(count), std::memory_order_release);
    // Both sides write before they read, so either the sleeper sees the new round or we see the sleeper.
    round_.fetch_add(1);
    if (sleepers_.load() > 0) {
      const int present = std::min(threads - 1, static_cast<int>(workers_.size()));
      for (int i = 0; i < present; i++) workers_[i]->wake_up();
    }
    work(0);
    while (!spin([&] { return left_.load(std::memory_order_acquire) == 0; })) {
      wait_for_the_last();
      if (tasks_are_lost()) return restart_workers(), false;
    }
    return true;
  }

 private:
  // Takes tasks until none is left. A ticket holds the number of threads and of tasks that nobody has taken; taking one
  // succeeds only while its call lasts, so what belongs to the call is read afterwards.
  void work(int thread) {
    uint32_t done = 0;
    uint64_t ticket = tickets_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(ticket) > 0 && thread < static_cast<int>(ticket >> 32)) {
      if (!tickets_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
      if (thread > 0 && a_worker_shall_end.load(std::memory_order_relaxed) && a_worker_shall_end.exchange(false)) {
        end_thread();
      }
      call_(task_, count_ - static_cast<uint32_t>(ticket), thread);
      done++;
      ticket = tickets_.load(std::memory_order_acquire);
    }
    if (done > 0 && left_.fetch_sub(done) == done && caller_sleeps_.load()) wake(left_, 1);
  }

  void wait_for_the_last() {
    caller_sleeps_.store(true);
    const uint32_t left = left_.load();
    const timespec limit{0, kLookForLostTasks};
    if (left > 0) sleep_while(left_, left, &limit);
    caller_sleeps_.store(false);
  }

  // Whether a worker that has ended had a task. All tasks were taken. A worker says that its tasks have ended before it
  // says that it is idle, so `left_` must be read last.
  bool tasks_are_lost() const {
    for (const auto& worker : workers_) {
      if (worker->busy.load() && worker->lives()) return false;
    }
    return left_.load() > 0;
  }

  void serve(Worker& self, int thread) {
#ifdef __linux__
    self.id.store(syscall(SYS_gettid));
#endif
    const Setting* followed = nullptr;
    for (uint32_t round = 0;;) {
      const Setting* now = setting.load();
      if (now != followed && (followed != nullptr || !now->cpus.empty())) move_thread(*now);
      followed = now;
      const auto is_new = [&] { return round_.load(std::memory_order_acquire) != round; };
      while (!spin(is_new)) {
        self.sleeping.store(1);
        sleepers_.fetch_add(1);
        if (round_.load() == round) sleep_while(self.sleeping, 1);
        sleepers_.fetch_sub(1);
        self.sleeping.store(0);
      }
      round = round_.load(std::memory_order_acquire);
      self.busy.store(true);
      work(thread);
      self.busy.store(false);
    }
  }

  struct Start {
    Team* team;
    Worker* worker;
    int thread;
  };

  // If the system gives no more threads, those that exist do the work.
  void add_workers(int wanted) {
    while (static_cast<int>(workers_.size()) < wanted) {
      workers_.push_back(std::make_unique<Worker>());
      if (!start(static_cast<int>(workers_.size()))) return workers_.pop_back();
    }
  }

  void restart_workers() {
    for (size_t i = 0; i < workers_.size(); i++) {
      if (workers_[i]->lives()) continue;
      workers_[i]->id.store(0);
      workers_[i]->busy.store(false);
      start(static_cast<int>(i) + 1);
    }
  }

  // Starts the worker with this number; the caller is number 0.
  bool start(int thread) {
    auto* start = new Start{this, workers_[thread - 1].get(), thread};
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals such as Ctrl-C are the other threads' business
    pthread_t worker;
    const int failed = pthread_create(
        &worker, nullptr,
        [](void* given) -> void* {
          const Start start = *static_cast<Start*>(given);
          delete static_cast<Start*>(given);
          start.team->serve(*start.worker, start.thread);
          return nullptr;
        },
        start);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (failed) {
      delete start;
    } else {
      pthread_detach(worker);
    }
    return failed == 0;
  }

  std::vector<std::unique_ptr<Worker>> workers_;
  TaskFunction call_ = nullptr;
  const void* task_ = nullptr;
  int64_t count_ = 0;
  alignas(64) std::atomic<uint64_t> tickets_{0};
  alignas(64) std::atomic<uint32_t> left_{0};  // tasks that have not ended
  std::atomic<bool> caller_sleeps_{false};
  alignas(64) std::atomic<uint32_t> round_{0};
  std::atomic<int> sleepers_{0};
};

// Teams without a caller. Several threads may call at once: each takes the team that worked for it, else the one that
// worked last.
class Teams {
 public:
  Team* take() {
    static thread_local const Team* own = nullptr;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) idle_.push_back(new Team);
    const auto found = std::find(idle_.begin(), idle_.end(), own);
    if (found != idle_.end()) std::rotate(found, found + 1, idle_.end());  // keeps the order of the others
    Team* team = idle_.back();
    idle_.pop_back();
    own = team;
    return team;
  }

  void give_back(Team* team) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(team);
  }

 private:
  std::mutex mutex_;
  std::vector<Team*> idle_;
};

// Never destroyed: threads may use it until the process ends. A forked child has none of the threads, so it starts
// with no teams.
std::atomic<Teams*>& all_teams() {
  static std::atomic<Teams*> teams{[] {
    pthread_atfork(nullptr, nullptr, [] { all_teams().store(new Teams); });
    return new Teams;
  }()};
  return teams;
}

}  // namespace

void run_tasks(int threads, int64_t count, TaskFunction call, const void* task) {
  if (run_on_openmp(threads, count, call, task)) return;
  Teams* teams = all_teams().load();
  Team* team = teams->take();
  lost_tasks = !team->run(std::min(threads, kMostThreads), count, call, task);
  teams->give_back(team);
}

bool tasks_are_lost() { return lost_tasks; }

int32_t take_loop_status() {
  const bool lost = lost_tasks;
  lost_tasks = false;
  return lost ? LANCEBILL_LOST_WORKER : LANCEBILL_OK;
}

}  // namespace lancebill

void lancebill_end_worker(void) { lancebill::a_worker_shall_end.store(true); }

void lancebill_place_threads(const int32_t* cpus, int32_t count, int32_t spin_us) {
  auto* placed = new lancebill::Setting;
  if (spin_us >= 0) placed->spin_us = spin_us;
  for (int32_t i = 0; i < count; i++) {
    if (cpus[i] >= 0 && cpus[i] < lancebill::kMostCpus) placed->cpus.push_back(cpus[i]);
  }
  lancebill::setting.store(placed);
}
