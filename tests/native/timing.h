// Times a layer of 128 experts, top-8, hidden 2048, intermediate 768. Flushes the caches before every call.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "lancebill.h"
#include "numbers.h"

namespace {

struct TimedLayer {
  lancebill_layer layer = {};
  lancebill_matrix w13 = {}, w2 = {};
  std::vector<uint8_t> bytes[6];
  int64_t expert_bytes = 0;
};

void make_timed_layer(TimedLayer& t, const char* format, int experts, int hidden, int width) {
  const std::string name = format;
  lancebill_matrix m = {};
  m.step = 1, m.center = 8, m.group = 32, m.scale = LANCEBILL_SCALE_BF16, m.input = LANCEBILL_INPUT_BF16;
  for (int i = 0; i < 16; i++) m.table[i] = static_cast<int32_t>(i);
  if (name == "int4-g128") m.group = 128;
  if (name == "int4-a8") m.input = LANCEBILL_INPUT_INT8, m.input_group = 32;
  if (name == "int4-zp") m.zero = LANCEBILL_ZERO_U8;
  if (name == "mxfp4") m.scale = LANCEBILL_SCALE_E8M0;
  if (name == "nvfp4") m.scale = LANCEBILL_SCALE_E4M3, m.group = 16;
  if (name == "nf4") m.table[15] = 16000, m.center = 8000;
  if (name == "int8") m.codes = LANCEBILL_BYTE, m.center = 128, m.group = 128;
  if (name == "int6") m.codes = LANCEBILL_BITS6, m.center = 32, m.group = 16, m.scale = LANCEBILL_SCALE_F32;
  if (name == "fp8") m.codes = LANCEBILL_FLOAT8, m.mantissa = 3, m.group = 128;
  t.w13 = t.w2 = m;
  t.w13.rows = 2 * width, t.w13.columns = hidden, t.w2.rows = hidden, t.w2.columns = width;
  int i = 0;
  for (lancebill_matrix* w : {&t.w13, &t.w2}) {
    int64_t sizes[3];
    lancebill_packed_bytes(w, 0, sizes);
    for (int64_t size : sizes) {
      std::vector<uint8_t>& bytes = t.bytes[i++];
      bytes.resize(size * experts);
      lancebill_huge_pages(bytes.data(), static_cast<int64_t>(bytes.size()));
      static std::vector<uint8_t> noise;
      for (; noise.size() < 1 << 20; noise.push_back(static_cast<uint8_t>(random_bits()))) {}
      for (size_t k = 0; k < bytes.size(); k += noise.size()) {
        std::memcpy(bytes.data() + k, noise.data(), std::min(noise.size(), bytes.size() - k));
      }
      t.expert_bytes += size;
    }
    for (size_t k = 0; k < t.bytes[i - 2].size(); k++) {  // every scale type: near 2^-6
      const bool two = m.scale == LANCEBILL_SCALE_BF16;
      t.bytes[i - 2][k] = two ? (k % 2 ? 0x3c : 0x80) : m.scale == LANCEBILL_SCALE_E8M0 ? 121 : 0x08;
    }
    w->code_bytes = t.bytes[i - 3].data(), w->scale_bytes = t.bytes[i - 2].data();
    w->zero_bytes = m.zero ? t.bytes[i - 1].data() : nullptr;
  }
  t.layer.experts = experts, t.layer.activation = LANCEBILL_SILU, t.layer.w13 = &t.w13, t.layer.w2 = &t.w2;
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void time_format(const char* format, int threads, std::vector<uint8_t>& flush) {
  constexpr int kHidden = 2048, kWidth = 768, kExperts = 128, kTop = 8;
  TimedLayer t;
  make_timed_layer(t, format, kExperts, kHidden, kWidth);
  std::vector<uint16_t> x(512 * kHidden), out(x.size());
  for (uint16_t& v : x) v = bf16_bits(normal());
  for (int tokens : {1, 16, 512}) {
    std::vector<int32_t> ids(tokens * kTop);
    std::vector<char> seen(kExperts);
    int experts = 0;
    for (int i = 0; i < tokens; i++) {
      std::vector<int> order(kExperts);
      for (int e = 0; e < kExperts; e++) order[e] = e;
      std::shuffle(order.begin(), order.end(), random_bits);
      for (int j = 0; j < kTop; j++) {
        ids[i * kTop + j] = order[j];
        experts += !seen[order[j]];
        seen[order[j]] = 1;
      }
    }
    for (int level = LANCEBILL_NEON; level < LANCEBILL_LEVELS; level++) {
      const bool slow = level == LANCEBILL_AVX2 || level == LANCEBILL_AVXVNNI;
      if (!(lancebill_levels() >> level & 1) || (tokens == 512 && slow)) continue;
      if (tokens < 512 && level == LANCEBILL_AMX) continue;
      lancebill_work work = {};
      work.x = x.data(), work.out = out.data(), work.x_stride = work.out_stride = kHidden;
      work.tokens = tokens, work.top_k = kTop, work.ids = ids.data(), work.threads = threads, work.level = level;
      work.id_words = 1, work.id_row = kTop, work.id_column = 1;
      std::vector<uint8_t> scratch(lancebill_scratch_bytes(&t.layer, &work) + 64);
      work.scratch = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
      double best = 1e9;
      for (int i = 0; i < (tokens == 512 ? 2 : 4); i++) {
        lancebill_stream(flush.data(), static_cast<int64_t>(flush.size()), threads, 8);
        const double start = seconds();
        lancebill_run(&t.layer, &work);
        best = std::min(best, seconds() - start);
      }
      const double bytes = experts * static_cast<double>(t.expert_bytes);
      const double flops = 6.0 * tokens * kTop * kHidden * kWidth;
      std::printf("%-9s threads %d tokens %3d %-8s %8.3f ms %6.1f GB/s %6.0f GFLOP/s\n", format, threads, tokens,
                  lancebill_level_name(level), best * 1e3, bytes / best / 1e9, flops / best / 1e9);
    }
  }
}

void time_all(int threads, const std::vector<std::string>& formats) {
  std::vector<uint8_t> flush(400 << 20, 1);
  for (int i = 0; i < 3; i++) {
    const double start = seconds();
    lancebill_stream(flush.data(), static_cast<int64_t>(flush.size()), threads, 8);
    const double elapsed = seconds() - start;
    std::printf("stream    threads %d %6.1f GB/s\n", threads, static_cast<double>(flush.size()) / elapsed / 1e9);
  }
  for (const std::string& format : formats) {
    time_format(format.c_str(), threads, flush);
    std::fflush(stdout);
  }
}

}  // namespace
