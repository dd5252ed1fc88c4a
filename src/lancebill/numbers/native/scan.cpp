// Searches for numbers that are not finite, and what can be said of bytes after one look at them.
#include <cstring>

#include "numbers.h"

namespace {

template <class Word>
bool any_with(const Word* numbers, int64_t count, Word exponent) {
  constexpr int64_t kChunk = 4096;  // stops early, but not after every number
  for (int64_t first = 0; first < count; first += kChunk) {
    const int64_t last = first + kChunk < count ? first + kChunk : count;
    Word found = 0;
    for (int64_t i = first; i < last; i++) found |= (numbers[i] & exponent) == exponent;
    if (found) return true;
  }
  return false;
}

}  // namespace

int32_t lancebill_contains(const uint8_t* bytes, int64_t count, const uint8_t* wanted, int32_t wanted_count) {
  for (int i = 0; count > 0 && i < wanted_count; i++) {
    if (std::memchr(bytes, wanted[i], count) != nullptr) return 1;
  }
  return 0;
}

int32_t lancebill_not_finite(const void* numbers, int64_t count, int32_t bytes, uint32_t exponent) {
  return bytes == 2 ? any_with(static_cast<const uint16_t*>(numbers), count, static_cast<uint16_t>(exponent))
                    : any_with(static_cast<const uint32_t*>(numbers), count, exponent);
}

void lancebill_survey_bytes(const uint8_t* bytes, int64_t count, lancebill_survey* found) {
  constexpr int64_t kChunk = 4096;  // stays in the cache for both loops
  int64_t sum = 0;
  uint8_t any = 0, low = 255, high = 0;
  for (int64_t first = 0; first < count; first += kChunk) {
    const int64_t last = first + kChunk < count ? first + kChunk : count;
    for (int64_t i = first; i + 8 <= last; i += 8) {
      int64_t word;
      std::memcpy(&word, bytes + i, 8);
      sum = static_cast<int64_t>(static_cast<uint64_t>(sum) + static_cast<uint64_t>(word));
    }
    for (int64_t i = first; i < last; i++) {
      any |= bytes[i];
      low = bytes[i] < low ? bytes[i] : low;
      high = bytes[i] > high ? bytes[i] : high;
    }
  }
  *found = {sum, any, low, high};
}
