// Software prefetch of packed weights: which addresses, how far ahead, in which order.
#pragma once

#include "convert.h"
#include "plan.h"

namespace lancebill {
namespace {

// Codes of the blocks of one kernel call that stay in the second cache, together with those of the next blocks.
constexpr int64_t kKeptBytes = 256 << 10;
constexpr int64_t kScalePrefetch = 512;  // bytes from the scales and zeros being read to those being prefetched

// The row blocks that one kernel call reads. Each strip is a separate memory stream. `next_*` are the blocks read
// afterwards: prefetches past the end of the current blocks continue there.
//
// Many input rows take several calls for the same blocks, and only the first would wait for memory. Then each of 2^shift
// calls prefetches its share of the next blocks, to L2: memory is read as long as something is computed.
struct Streams {
  const uint8_t *codes, *scales, *zeros;
  const uint8_t *next_codes, *next_scales, *next_zeros;
  int shift = 0;
  int64_t call = 0;
};

// For `calls` calls of `blocks` row blocks.
inline Streams streams(const Packed& p, int64_t block, int64_t next, int64_t blocks = 1, int64_t calls = 1) {
  const bool kept = blocks * p.strip_bytes <= kKeptBytes * p.strip;
  const int shift = kept ? 63 - __builtin_clzll(static_cast<uint64_t>(calls)) : 0;
  return {p.codes(block), p.scales(block), p.zeros(block), p.codes(next), p.scales(next), p.zeros(next), shift};
}

// The address `distance` bytes after `offset` in `current`, which has `size` bytes and is followed by `next`. The
// distance is at most `size`.
inline const uint8_t* prefetch_address(const uint8_t* current, const uint8_t* next, int64_t offset, int64_t distance,
                                       int64_t size) {
  offset += min_of(distance, size);
  const bool inside = offset < size;
  const uintptr_t address = reinterpret_cast<uintptr_t>(inside ? current : next) + (inside ? offset : offset - size);
  return reinterpret_cast<const uint8_t*>(address);
}

// The two prefetch addresses in the first strip: `far` goes to L2, `near` to L1 (see kFarBytes). Offsets reach the
// other strips. `far` moves more slowly if it passes a share of a strip only, and some lines are prefetched repeatedly.
struct PrefetchPoint {
  const uint8_t *far, *near;
  int shift;

  LANCEBILL_INLINE void prefetch_both(int64_t offset) const { prefetch_line(far + offset, near + offset); }
  LANCEBILL_INLINE void prefetch_far(int64_t offset) const { __builtin_prefetch(far + offset, 0, 3); }
  PrefetchPoint operator+(int64_t offset) const { return {far + offset, near + offset, shift}; }
  PrefetchPoint moved(int64_t bytes) const { return {far + (bytes >> shift), near + bytes, shift}; }
};

// Prefetches the lines of `Strips` strips while the kernel multiplies an earlier group. Each step prefetches `Count`
// lines, each pass has `steps` steps, and after all passes every line was prefetched once. Memory is faster when
// several strips (pages) are read at once, but the kernel computes strips one after the other; so each step prefetches
// a line from each of several strips.
template <class V, int Strips, int Count>
struct PrefetchSteps {
  static constexpr int kPower = Count & -Count;  // the largest power of two that divides it; Strips is one
  static constexpr int kStreams = min_of(Strips, kPower), kSets = Strips / kStreams, kLines = Count / kStreams;
  static_assert(kStreams * kSets == Strips && kStreams * kLines == Count, "every line is prefetched exactly once");
  PrefetchPoint point;
  int64_t strip_bytes;

  PrefetchSteps(const PrefetchPoint& first, int64_t strip_bytes, int pass, int64_t steps)
      : point((first + pass % kSets * kStreams * strip_bytes).moved(pass / kSets * steps * kLines * kUnit)),
        strip_bytes(strip_bytes) {}

  LANCEBILL_INLINE void step() {
    LANCEBILL_EACH(line, kLines)
      LANCEBILL_EACH(stream, kStreams) {
        const int64_t offset = stream * strip_bytes + line * kUnit;
        V::prefetch_twice ? point.prefetch_both(offset) : point.prefetch_far(offset);
      }
    point = point.moved(kLines * kUnit);
  }
};

// Prefetch addresses for a kernel that reads `piece` bytes of each strip per group.
// Distances are multiples of `piece`, so a prefetched piece never crosses the end of a strip.
class PrefetchCursor {
 public:
  PrefetchCursor(const Packed& p, const Streams& s, int64_t piece)
      : s_(s), strip_bytes_(p.strip_bytes), piece_(piece), far_(round_up(kFarBytes, piece)),
        near_(round_up(kNearBytes, piece)), end_(s.codes + p.strip_bytes) {}

  PrefetchPoint at(int64_t offset) const {
    const int64_t share = s_.call & ((1 << s_.shift) - 1);
    const uint8_t* shared = s_.next_codes + ((share * strip_bytes_ + offset) >> s_.shift);
    return {s_.shift == 0 ? address(offset, far_) : shared, address(offset, near_), s_.shift};
  }
  LANCEBILL_INLINE PrefetchPoint next(const PrefetchPoint& point) const {
    const uint8_t* far = point.shift == 0 ? next(point.far) : point.far + (piece_ >> point.shift);
    return {far, next(point.near), point.shift};
  }

 private:
  const uint8_t* address(int64_t offset, int64_t distance) const {
    return prefetch_address(s_.codes, s_.next_codes, offset, distance, strip_bytes_);
  }
  LANCEBILL_INLINE const uint8_t* next(const uint8_t* address) const {
    address += piece_;
    return address == end_ ? s_.next_codes : address;
  }

  Streams s_;
  int64_t strip_bytes_, piece_, far_, near_;
  const uint8_t* end_;
};

}  // namespace
}  // namespace lancebill
