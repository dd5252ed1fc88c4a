// Which experts of a large batch the CPU computes, and which are copied to a GPU: the rule of lancebill.split.ways, which
// says what it is about. The CPU waits for the answer, and here it takes a tenth of the time.
#include <algorithm>
#include <cmath>
#include <limits>

#include "lancebill.h"

namespace {

// The CPU's time for an expert with so many tokens, on the line through the two nearest points.
double expert_us(const lancebill_batch_costs& costs, double tokens) {
  if (tokens <= costs.at[0]) return costs.taken[0];
  int32_t i = 1;
  while (i + 1 < costs.points && tokens > costs.at[i]) i++;
  const double slope = (costs.taken[i] - costs.taken[i - 1]) / (costs.at[i] - costs.at[i - 1]);
  return costs.taken[i - 1] + (tokens - costs.at[i - 1]) * slope;
}

// Used experts as the CPU would take them: those that are being copied last, and those with few tokens first.
int32_t order_of_cpu(const double* counts, const uint8_t* begun, int32_t experts, int32_t* order) {
  int32_t used = 0;
  for (int32_t expert = 0; expert < experts; expert++) {
    if (counts[expert] > 0) order[used++] = expert;
  }
  std::stable_sort(order, order + used, [&](int32_t a, int32_t b) {
    return begun[a] != begun[b] ? begun[a] < begun[b] : counts[a] < counts[b];
  });
  return used;
}

struct Times {
  double cpu, stream, rows;
  double us() const { return std::max(cpu, stream); }
};

// Of batches in which the CPU has none of the experts, the first one, two ...
class Divisions {
 public:
  Divisions(const lancebill_batch_costs& costs, const double* counts, const int32_t* order, int32_t used)
      : costs_(costs), counts_(counts), order_(order), used_(used) {}

  Times next() {
    const Times times{cpu_us(), stream_us(), rows()};
    if (number_ < used_) {
      const double tokens = counts_[order_[number_++]];
      slots_ += tokens;
      experts_us_ += expert_us(costs_, tokens);
    }
    return times;
  }

 private:
  double rows() const {
    if (number_ == used_ || costs_.tokens == 0) return costs_.tokens;
    const double used = costs_.tokens * -std::expm1(-slots_ / costs_.tokens);
    return used <= costs_.most_chosen ? used : costs_.tokens;
  }

  double cpu_us() const {
    if (number_ == 0) return 0;
    const bool pieces = costs_.tokens > costs_.most_rows, all = number_ == used_;
    if (pieces && !all && slots_ > costs_.most_rows) return std::numeric_limits<double>::infinity();
    const double sent = costs_.call + costs_.row * rows();
    if (all) return sent + (pieces ? pieces_us() : experts_us_);
    return sent + experts_us_ + costs_.begin;
  }

  double pieces_us() const {
    double us = 0;
    for (int32_t i = 0; i < used_; i++) {
      const double tokens = counts_[order_[i]], pieces = std::min(tokens, std::ceil(costs_.tokens / costs_.most_rows));
      us += pieces * expert_us(costs_, tokens / pieces);
    }
    return us;
  }

  double stream_us() const {
    if (number_ == used_) return 0;
    const double copied = used_ - number_, runs = copied * number_ / used_;
    return costs_.wait + costs_.sums * rows() + costs_.run * runs + costs_.copy * copied;
  }

  const lancebill_batch_costs& costs_;
  const double* counts_;
  const int32_t* order_;
  int32_t used_, number_ = 0;
  double slots_ = 0, experts_us_ = 0;
};

}  // namespace

int32_t lancebill_divide(const lancebill_batch_costs* costs, double worth, const double* counts, const uint8_t* begun,
                         int32_t experts, int32_t* order, lancebill_division* found) {
  const int32_t used = order_of_cpu(counts, begun, experts, order);
  Divisions divisions(*costs, counts, order, used);
  const Times copied = divisions.next();
  Times both = copied, cpu = copied;
  int32_t number = 0;
  const auto late_us = [&](const Times& times) { return std::max(costs->late * times.cpu, times.stream); };
  for (int32_t i = 1; i <= used; i++) {
    cpu = divisions.next();
    if (late_us(cpu) < late_us(both)) both = cpu, number = i;
  }
  const bool copies_win = copied.us() < cpu.us();
  const Times& alone = copies_win ? copied : cpu;
  const bool together = both.us() <= worth * alone.us();
  const Times& taken = together ? both : alone;
  *found = {used, taken.cpu, taken.stream, cpu.cpu, copied.stream, taken.rows};
  return together ? number : copies_win ? 0 : used;
}
