// The C ABI: level selection, calls, and two memory helpers.
#include "lancebill.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <memory>

#include "convert.h"
#include "parallel.h"
#include "plan.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace lancebill {

namespace {

constexpr int64_t kHugePage = 2 << 20;

constexpr const char* kNames[LANCEBILL_LEVELS] = {"portable",   "neon",       "avx2",   "avxvnni",
                                                   "avx512bw", "avx512vnni", "avx512", "amx"};

#if defined(__x86_64__)
struct CpuId {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  CpuId(unsigned leaf, unsigned part) { __get_cpuid_count(leaf, part, &eax, &ebx, &ecx, &edx); }
};

// Linux enables the tile registers of a process only on request.
bool tiles_granted() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool machine_has(int level) {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (CpuId(1, 0).ecx >> 29 & 1);
  const bool avx512bw = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq");
  const bool vnni = avx512bw && __builtin_cpu_supports("avx512vnni");
  const bool avx512 = vnni && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni");
  const CpuId seven(7, 0), seven_one(7, 1);
  switch (level) {
    case LANCEBILL_PORTABLE: return true;
    case LANCEBILL_AVX2: return avx2;
    case LANCEBILL_AVXVNNI: return avx2 && (seven_one.eax >> 4 & 1);
    case LANCEBILL_AVX512BW: return avx2 && avx512bw;
    case LANCEBILL_AVX512VNNI: return avx2 && vnni;
    case LANCEBILL_AVX512: return avx2 && avx512;
    case LANCEBILL_AMX: {  // AMX-BF16, AMX-TILE, AVX512-FP16
      constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 23;
      return avx2 && avx512 && (seven.edx & kNeeded) == kNeeded && tiles_granted();
    }
    default: return false;
  }
}
#elif defined(__aarch64__)
bool machine_has(int level) {
  constexpr unsigned long kDotProducts = 1 << 20;  // HWCAP_ASIMDDP
  return level == LANCEBILL_PORTABLE || (level == LANCEBILL_NEON && (getauxval(AT_HWCAP) & kDotProducts));
}
#else
bool machine_has(int level) { return level == LANCEBILL_PORTABLE; }
#endif

const Level* built_level(int level) {
  using Getter = const Level* (*)();
  const Getter getters[LANCEBILL_LEVELS] = {level_portable, level_neon,       level_avx2,   level_avxvnni,
                                            level_avx512bw, level_avx512vnni, level_avx512, level_amx};
  return getters[level] == nullptr ? nullptr : getters[level]();
}

uint32_t usable_levels() {
  static const uint32_t levels = [] {  // evaluated once
    uint32_t mask = 0;
    for (int level = 0; level < LANCEBILL_LEVELS; level++) {
      if (built_level(level) != nullptr && machine_has(level)) mask |= 1u << level;
    }
    return mask;
  }();
  return levels;
}

const Level* choose_level(int32_t requested) {
  const uint32_t levels = usable_levels();
  if (requested >= 0) {
    return requested < LANCEBILL_LEVELS && (levels >> requested & 1) ? built_level(requested) : nullptr;
  }
  for (int level = LANCEBILL_LEVELS; level-- > 0;) {
    if (levels >> level & 1) return built_level(level);
  }
  return nullptr;
}

int32_t plan_call(const lancebill_layer* layer, const lancebill_work* work, Call& call, const Level*& level) {
  if (work == nullptr) return LANCEBILL_BAD_WORK;
  level = choose_level(work->level);
  return level == nullptr ? LANCEBILL_NO_LEVEL : plan(layer, work, level->tiles, call);
}

}  // namespace
}  // namespace lancebill

using namespace lancebill;

int32_t lancebill_abi(void) { return LANCEBILL_ABI; }

uint32_t lancebill_levels(void) { return usable_levels(); }

const char* lancebill_level_name(int32_t level) {
  return level >= 0 && level < LANCEBILL_LEVELS ? kNames[level] : nullptr;
}

const char* lancebill_status_text(int32_t status) {
  switch (status) {
    case LANCEBILL_OK: return "ok";
    case LANCEBILL_BAD_MATRIX: return "the sizes, kinds or pointers of a matrix contradict each other";
    case LANCEBILL_BAD_LAYER: return "the matrices and the activation do not match";
    case LANCEBILL_BAD_WORK: return "bad rows, offsets or number of threads";
    case LANCEBILL_NO_LEVEL: return "this machine or this build does not have that level";
    case LANCEBILL_NO_MEMORY: return "no memory for scratch";
    case LANCEBILL_BAD_TOKEN: return "a token id is outside the hash table";
    case LANCEBILL_LOST_WORKER: return "a thread of the library ended before its task; the next call starts another";
    case LANCEBILL_SPOILED: return "an earlier call came too late, and may have overwritten the rows of this one";
    default: return "unknown status";
  }
}

int64_t lancebill_scratch_bytes(const lancebill_layer* layer, const lancebill_work* work) {
  Call call;
  const Level* level = nullptr;
  const int32_t status = plan_call(layer, work, call, level);
  return status == LANCEBILL_OK ? lay_out(call, nullptr) : -status;
}

int32_t lancebill_run(const lancebill_layer* layer, const lancebill_work* work) {
  Call call;
  const Level* level = nullptr;
  if (const int32_t status = plan_call(layer, work, call, level)) return status;
  if (call.slots == 0) return LANCEBILL_OK;
  std::unique_ptr<void, decltype(&std::free)> owned(nullptr, std::free);
  uint8_t* scratch = static_cast<uint8_t*>(work->scratch);
  if (scratch == nullptr) {
    owned.reset(std::aligned_alloc(kUnit, lay_out(call, nullptr)));
    scratch = static_cast<uint8_t*>(owned.get());
    if (scratch == nullptr) return LANCEBILL_NO_MEMORY;
  }
  lay_out(call, scratch);
  if (const int32_t status = sort_slots(call)) return status;
  level->run(call);
  return take_loop_status();
}

void lancebill_host_call(void* given) {
  auto& call = *static_cast<lancebill_call*>(given);
  call.count++;
  const auto start = std::chrono::steady_clock::now();
  const int32_t status = lancebill_run(call.layer, call.work);
  const std::chrono::nanoseconds taken = std::chrono::steady_clock::now() - start;
  call.nanoseconds += taken.count();
  if (status != LANCEBILL_OK) lancebill_fail_call(given, status);
}

void lancebill_fail_call(void* given, int32_t status) {
  auto& call = *static_cast<lancebill_call*>(given);
  if (call.status == LANCEBILL_OK) call.status = status;
  if (call.work == nullptr || call.layer == nullptr || call.layer->w2 == nullptr) return;
  float* out = static_cast<float*>(call.work->out);
  std::fill_n(out, int64_t{call.work->tokens} * call.layer->w2->rows, std::numeric_limits<float>::quiet_NaN());
}

void lancebill_packed_bytes(const lancebill_matrix* matrix, int32_t gated, int64_t bytes[3]) {
  const Packed p = describe(*matrix, gated != 0);
  bytes[0] = p.blocks / p.strip * p.strip_bytes;
  bytes[1] = p.blocks * p.scale.block;
  bytes[2] = p.blocks * p.zero.block;
}

uint64_t lancebill_stream(const void* memory, int64_t bytes, int32_t threads, int32_t streams) {
  constexpr int64_t kPiece = 1 << 20, kLine = 64;
  const int64_t pieces = bytes / kPiece, each = kPiece / streams / kLine * kLine;
  std::unique_ptr<uint64_t[]> sums(new uint64_t[max_of<int64_t>(pieces, 1)]());
  parallel(threads, pieces, [&](int64_t piece, int) {
    const uint8_t* base = static_cast<const uint8_t*>(memory) + piece * kPiece;
    uint64_t sum = 0;
    for (int64_t at = 0; at < each; at += kLine) {
      for (int32_t s = 0; s < streams; s++) {
        const uint8_t* line = base + s * each + at;
        prefetch_line(line + kFarBytes, line + kNearBytes);
        uint64_t words[kLine / 8];
        std::memcpy(words, line, kLine);
        for (uint64_t word : words) sum += word;
      }
    }
    sums[piece] = sum;
  });
  take_loop_status();  // a rate that is too high: whoever measures sees it
  uint64_t total = 0;
  for (int64_t piece = 0; piece < pieces; piece++) total += sums[piece];
  return total;
}

int32_t lancebill_huge_pages(void* memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  const uintptr_t first = static_cast<uintptr_t>(round_up(reinterpret_cast<intptr_t>(memory), kHugePage));
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / kHugePage * kHugePage;
  if (end > first && madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE) != 0) return errno;
#else
  (void)memory, (void)bytes;
#endif
  return 0;
}
