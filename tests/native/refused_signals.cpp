// A task that takes longer than the caller sleeps, where the system refuses to say whether the worker lives.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <thread>

#include "parallel.h"

namespace {

bool refuse_tgkill() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_tgkill, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{4, filter};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

}  // namespace

int main() {
  if (!refuse_tgkill()) return std::puts("no filters"), 0;
  std::atomic<bool> taken{false}, ended{false};
  lancebill::parallel(2, 2, [&](int64_t, int thread) {
    if (thread == 0) {
      while (!taken) std::this_thread::yield();
      return;
    }
    taken = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    ended = true;
  });
  std::printf("status %d, ended %d\n", lancebill::take_loop_status(), int{ended});
}
