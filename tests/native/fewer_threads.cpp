// Calls with fewer threads than the team has: the workers that may take a task are those that wake.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include "parallel.h"

namespace {

using namespace std::chrono_literals;

// Two tasks that wait for each other; returns whether both ran at once.
bool two_meet() {
  std::atomic<int> came{0};
  std::atomic<bool> met{true};
  lancebill::parallel(2, 2, [&](int64_t, int) {
    came++;
    for (const auto end = std::chrono::steady_clock::now() + 2s; came < 2 && met;) {
      if (std::chrono::steady_clock::now() > end) met = false;
      std::this_thread::yield();
    }
  });
  return met;
}

}  // namespace

int main() {
  constexpr int kTeam = 6, kRounds = 20;
  int met = 0;
  for (int round = 0; round < kRounds && met == round; round++) {
    lancebill::parallel(kTeam, kTeam, [](int64_t, int) { std::this_thread::sleep_for(1ms); });
    std::this_thread::sleep_for(20ms);  // all of them sleep
    met += two_meet();
  }
  std::printf("%d of %d\n", met, kRounds);
}
