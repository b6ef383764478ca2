// Integer products with AVX2. What the functions do is said in quant_linear_lanes.h.
//
// vpmaddubsw would multiply bytes, but it saturates; 16-bit products are exact.
#pragma once

#include <cstdint>

namespace eagle {
namespace {

using Value = int16_t;

constexpr int kTileRows = 2;
constexpr int kFetchAhead = 6144;  // bytes of the weight: long enough for memory to answer

inline void store_low_bits(Value* to, Lanes a) {
  // The float's upper half is cut off and the lower one's sign extended.
  const __m256i low = _mm256_srai_epi32(_mm256_slli_epi32(_mm256_castps_si256(a.low), 16), 16);
  const __m256i high = _mm256_srai_epi32(_mm256_slli_epi32(_mm256_castps_si256(a.high), 16), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), packed);
}

inline __m256 from_eight_integers(const int32_t* from, int32_t offset) {
  const __m256i integers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm256_cvtepi32_ps(_mm256_add_epi32(integers, _mm256_set1_epi32(offset)));
}
inline Lanes from_integers(const int32_t* from, int32_t offset) {
  return {from_eight_integers(from, offset), from_eight_integers(from + 8, offset)};
}

#define EAGLE_UNROLL _Pragma("GCC unroll 4")

// Four numbers of the depth in a step. A register has two sums for each of four columns.
template <int kRows, bool kFetch>
inline void dot(const Value* values, const uint8_t* weight, int64_t segments, int32_t (*products)[16]) {
  __m256i sums[kRows][4];
  EAGLE_UNROLL for (int row = 0; row < kRows; ++row) {
    EAGLE_UNROLL for (int i = 0; i < 4; ++i) sums[row][i] = _mm256_setzero_si256();
  }
  for (; segments > 0; --segments, values += kRows * 64) {
    for (int step = 0; step < 16; ++step, weight += 64) {
      if (kFetch) _mm_prefetch(reinterpret_cast<const char*>(weight + kFetchAhead), _MM_HINT_T1);
      __m256i four[kRows];
      EAGLE_UNROLL for (int row = 0; row < kRows; ++row) {
        long long bits;
        __builtin_memcpy(&bits, values + row * 64 + step * 4, 8);
        four[row] = _mm256_set1_epi64x(bits);
      }
      EAGLE_UNROLL for (int i = 0; i < 4; ++i) {
        const __m256i columns =
            _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weight + i * 16)));
        EAGLE_UNROLL for (int row = 0; row < kRows; ++row) {
          sums[row][i] = _mm256_add_epi32(sums[row][i], _mm256_madd_epi16(columns, four[row]));
        }
      }
    }
  }
  EAGLE_UNROLL for (int row = 0; row < kRows; ++row) {
    EAGLE_UNROLL for (int i = 0; i < 2; ++i) {
      const __m256i pairs = _mm256_hadd_epi32(sums[row][2 * i], sums[row][2 * i + 1]);
      _mm256_store_si256(reinterpret_cast<__m256i*>(products[row] + i * 8), _mm256_permute4x64_epi64(pairs, 0xD8));
    }
  }
}

#undef EAGLE_UNROLL

}  // namespace
}  // namespace eagle
