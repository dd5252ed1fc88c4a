// Checks every level against a naive loop in double, with random codes, groups, scales, zeros, inputs, sizes,
// dispatches; and that decode steps have the same bits with any number of threads.
//
//   driver [seed] [cases]             random cases on every level of this machine
//   driver callers N [seed] [cases]   the same from N threads at once, each with its own cases
//   driver time THREADS [FORMAT ...]  times a decode and a prefill step, next to the memory bandwidth
//
// Link it with the objects of all native/*.cpp, each compiled with the flags of its first line. To run the x86 levels
// on another machine, compile them with -Itests/native/shim, and the driver with -DLANCEBILL_EMULATED. For AMX also define
// __AVX512F__, __AVX512VBMI__, __GFNI__, __F16C__ and __FMA__; with -Dalways_inline=unused -DLANCEBILL_PLAIN_LOOPS it
// takes seconds instead of minutes.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "lancebill.h"
#include "plan.h"
#include "random_case.h"
#include "random_decode.h"
#include "timing.h"

using namespace lancebill;

namespace {

// Calls a level directly, without asking whether the machine has it, so that emulated levels run too.
int32_t run_level(const Level& level, const Case& c, std::vector<float>& out) {
  lancebill_work work = c.work;
  out.assign(c.want.size(), NAN);
  work.out = out.data();
  work.out_type = LANCEBILL_F32;
  work.out_stride = c.out_columns;
  Call call;
  if (const int32_t status = plan(&c.layer, &work, level.tiles, call)) return status;
  std::vector<uint8_t> memory(lay_out(call, nullptr) + kUnit, 0xff);  // NaN: kernels must not rely on zeros
  uint8_t* aligned = memory.data() + (kUnit - reinterpret_cast<uintptr_t>(memory.data()) % kUnit) % kUnit;
  lay_out(call, aligned);
  if (const int32_t status = sort_slots(call)) return status;
  level.run(call);
  return LANCEBILL_OK;
}

// Largest relative error of a row. Where terms cancel, it is measured against their size.
double worst_row(const Case& c, const std::vector<float>& out) {
  double worst = 0;
  for (size_t row = 0; row * c.out_columns < c.want.size(); row++) {
    double error = 0, norm = 0;
    for (int n = 0; n < c.out_columns; n++) {
      const size_t i = row * c.out_columns + n;
      error += std::pow(out[i] - c.want[i], 2), norm += c.want[i] * c.want[i];
    }
    const double relative = std::sqrt(error) / std::max({std::sqrt(norm), c.sizes[row], 1e-20});
    worst = std::isfinite(relative) ? std::max(worst, relative) : INFINITY;
  }
  return worst;
}

// Largest allowed error: 16-bit inputs lose precision, the hidden values and rotated inputs may round the other way, and
// tiles round weights to bf16.
double bound(const Case& c, bool tiles) {
  const double rounding[] = {8e-3, 2e-3, 8e-4, 2e-2, 6e-2};  // by input kind
  if (c.w13.abi.input == LANCEBILL_INPUT_F32 && (c.linear || c.w2.abi.input == LANCEBILL_INPUT_F32)) return 1e-5;
  const double once = c.w13.abi.rotation ? rounding[c.w13.abi.input] : 8e-4;
  const double base = c.linear ? once : std::max(once, rounding[c.w2.abi.input]);
  return tiles ? base + 2e-2 : base;
}

struct BuiltLevel {
  const Level* level;
  bool usable;
};

std::vector<BuiltLevel> built_levels() {
  using Getter = const Level* (*)();
  const Getter getters[] = {level_portable, level_neon,       level_avx2,   level_avxvnni,
                            level_avx512bw, level_avx512vnni, level_avx512, level_amx};
  std::vector<BuiltLevel> levels;
  for (int i = 0; i < LANCEBILL_LEVELS; i++) {
    if (getters[i] == nullptr) continue;
#ifdef LANCEBILL_EMULATED
    const bool usable = true;
#else
    const bool usable = lancebill_levels() >> i & 1;
#endif
    levels.push_back({getters[i](), usable});
  }
  return levels;
}

std::string describe_matrix(const Matrix& w) {
  char text[200];
  const lancebill_matrix& m = w.abi;
  std::snprintf(text, sizeof text, "%s %dx%d g%d scale %d zero %d input %d/%d perm %d pre %d rotation %d static %d", w.name.c_str(),
                m.rows, m.columns, m.group, m.scale, m.zero, m.input, m.input_group, !!m.perm, !!m.pre_scale,
                m.rotation, !!m.input_scale);
  return text;
}

std::string describe_case(const Case& c) {
  const std::string matrices = c.linear ? "linear " + describe_matrix(c.w13)
                                        : describe_matrix(c.w13) + " | " + describe_matrix(c.w2);
  return matrices + " | act " + std::to_string(c.layer.activation) + " rows " +
         std::to_string(c.want.size() / c.out_columns) + (c.work.ids ? " indexed" : " grouped");
}

int check_levels(unsigned seed, int cases) {
  int failures = 0;
  std::vector<double> worst(LANCEBILL_LEVELS);
  const auto levels = built_levels();
  for (int i = 0; i < cases; i++) {
    random_bits.seed(seed + i);
    Case c;
    make_case(c);
    for (size_t l = 0; l < levels.size(); l++) {
      if (!levels[l].usable) continue;
      std::vector<float> out, other_out;
      const int32_t status = run_level(*levels[l].level, c, out);
      Case other = c;
      other.work.threads = 4 - c.work.threads;
      run_level(*levels[l].level, other, other_out);
      const bool same =
          out.size() == other_out.size() && std::memcmp(out.data(), other_out.data(), out.size() * 4) == 0;
      const double error = worst_row(c, out), limit = bound(c, levels[l].level->tiles);
      worst[l] = std::max(worst[l], error / limit);
      if (status != LANCEBILL_OK || !same || !(error <= limit)) {
        std::printf("FAILED %s seed %u: status %d, error %.3g (limit %.3g)%s: %s\n", levels[l].level->name, seed + i,
                    status, error, limit, same ? "" : ", bits depend on threads", describe_case(c).c_str());
        failures++;
      }
    }
  }
  for (size_t l = 0; l < levels.size(); l++) {
    std::printf("%-9s %s", levels[l].level->name, levels[l].usable ? "" : "not on this machine\n");
    if (levels[l].usable) std::printf("%d cases, worst error at %.0f %% of its bound\n", cases, 100 * worst[l]);
  }
  return failures;
}

// Decode steps of a model: three threads give the bits of one.
int check_decode(unsigned seed, int cases) {
  int failures = 0;
  for (int i = 0; i < cases; i++) {
    random_bits.seed(seed + i);
    DecodeCase c;
    make_decode_case(c);
    for (int level = 0; level < LANCEBILL_LEVELS; level++) {
      if (!(lancebill_levels() >> level & 1)) continue;
      std::vector<float> one, three;
      const int32_t status = std::max(run_decode(c, level, 1, one), run_decode(c, level, 3, three));
      const bool finite = std::all_of(one.begin(), one.end(), [](float v) { return std::isfinite(v); });
      const bool same = std::memcmp(one.data(), three.data(), one.size() * 4) == 0;
      if (status == LANCEBILL_OK && finite && same) continue;
      std::printf("FAILED decode steps of level %d seed %u: status %d%s%s: %s\n", level, seed + i, status,
                  finite ? "" : ", not finite", same ? "" : ", bits depend on threads", describe_case(c.layer).c_str());
      failures++;
    }
  }
  return failures;
}

int check(unsigned seed, int cases) { return check_levels(seed, cases) + check_decode(seed, cases); }

// Several callers at once, as threads of a server are: they share teams of workers, and nothing else.
int check_callers(int callers, unsigned seed, int cases) {
  std::vector<int> failures(callers);
  std::vector<std::thread> threads;
  for (int i = 0; i < callers; i++)
    threads.emplace_back([&, i] { failures[i] = check(seed + i * cases, cases); });
  for (std::thread& thread : threads) thread.join();
  int all = 0;
  for (int count : failures) all += count;
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2 && std::strcmp(argv[1], "time") == 0) {
    const std::vector<std::string> all = {"int4",  "int4-g128", "int4-a8", "int4-zp", "mxfp4",
                                          "nvfp4", "nf4",       "int8",    "fp8"};
    time_all(std::atoi(argv[2]), argc > 3 ? std::vector<std::string>(argv + 3, argv + argc) : all);
    return 0;
  }
  if (argc > 2 && std::strcmp(argv[1], "callers") == 0) {
    const unsigned seed = argc > 3 ? static_cast<unsigned>(std::atoi(argv[3])) : 1;
    const int failures = check_callers(std::atoi(argv[2]), seed, argc > 4 ? std::atoi(argv[4]) : 100);
    std::printf("%d failures\n", failures);
    return failures != 0;
  }
  const unsigned seed = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 1;
  const int failures = check(seed, argc > 2 ? std::atoi(argv[2]) : 300);
  std::printf("%d failures\n", failures);
  return failures != 0;
}
