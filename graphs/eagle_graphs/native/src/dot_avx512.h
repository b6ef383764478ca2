// Integer products with AVX-512 VNNI. What the functions do is said in quant_linear_lanes.h.
#pragma once

#include <cstdint>

namespace eagle {
namespace {

using Value = int8_t;

constexpr int kTileRows = 16;
constexpr int kFetchAhead = 6144;  // bytes of the weight: long enough for memory to answer

inline void store_low_bits(Value* to, Lanes a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_castps_si512(a.v)));
}

inline Lanes from_integers(const int32_t* from, int32_t offset) {
  return {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_loadu_si512(from), _mm512_set1_epi32(offset)))};
}

#define EAGLE_UNROLL _Pragma("GCC unroll 16")

// Four numbers of the depth in a step: a load of 16 columns, and for every row a broadcast and a vpdpbusd, whose
// unsigned operand is the weight. Few rows need several sums each, or a sum's latency would be the pace.
template <int kRows, bool kFetch>
inline void dot(const Value* values, const uint8_t* weight, int64_t segments, int32_t (*products)[16]) {
  constexpr int kSums = kRows <= 2 ? 4 : kRows <= 4 ? 2 : 1;
  __m512i sums[kSums][kRows];
  EAGLE_UNROLL for (int i = 0; i < kSums; ++i) {
    EAGLE_UNROLL for (int row = 0; row < kRows; ++row) sums[i][row] = _mm512_setzero_si512();
  }
  for (; segments > 0; --segments, values += kRows * 64) {
    for (int step = 0; step < 16; step += kSums, weight += kSums * 64) {
      EAGLE_UNROLL for (int i = 0; i < kSums; ++i) {
        const __m512i columns = _mm512_loadu_si512(weight + i * 64);
        if (kFetch) _mm_prefetch(reinterpret_cast<const char*>(weight + i * 64 + kFetchAhead), _MM_HINT_T1);
        EAGLE_UNROLL for (int row = 0; row < kRows; ++row) {
          int32_t four;
          __builtin_memcpy(&four, values + row * 64 + (step + i) * 4, 4);
          sums[i][row] = _mm512_dpbusd_epi32(sums[i][row], columns, _mm512_set1_epi32(four));
        }
      }
    }
  }
  EAGLE_UNROLL for (int row = 0; row < kRows; ++row) {
    EAGLE_UNROLL for (int i = 1; i < kSums; ++i) sums[0][row] = _mm512_add_epi32(sums[0][row], sums[i][row]);
    _mm512_store_si512(products[row], sums[0][row]);
  }
}

#undef EAGLE_UNROLL

}  // namespace
}  // namespace eagle
