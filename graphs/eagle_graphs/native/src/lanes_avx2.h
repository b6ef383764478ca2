// 16 floats in two AVX2 registers. What the functions do is said in lanes_avx512.h.
#pragma once

#include "bf16.h"

namespace eagle {
namespace {

struct Lanes {
  static constexpr int kAccumulators = 6;

  __m256 low, high;
};

inline Lanes load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline __m256 widened(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline Lanes load(const Bf16* from) {
  const auto* halves = reinterpret_cast<const __m128i*>(from);
  return {widened(_mm_loadu_si128(halves)), widened(_mm_loadu_si128(halves + 1))};
}
inline void store(float* to, Lanes a) {
  _mm256_storeu_ps(to, a.low);
  _mm256_storeu_ps(to + 8, a.high);
}
template <class Number>
inline Lanes load_first(const Number* from, int count) {
  Number all[16] = {};
  for (int lane = 0; lane < count; ++lane) all[lane] = from[lane];
  return load(all);
}
inline void store_first(float* to, Lanes a, int count) {
  float all[16];
  store(all, a);
  for (int lane = 0; lane < count; ++lane) to[lane] = all[lane];
}
inline Lanes broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }

inline Lanes operator+(Lanes a, Lanes b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Lanes maximum(Lanes a, Lanes b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }

inline Lanes magnitude(Lanes a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
inline Lanes with_sign_of(Lanes a, Lanes sign) {
  const __m256 mask = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(mask, a.low), _mm256_and_ps(mask, sign.low)),
          _mm256_or_ps(_mm256_andnot_ps(mask, a.high), _mm256_and_ps(mask, sign.high))};
}
inline Lanes zero_below(Lanes a, Lanes x, Lanes limit) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.low, limit.low, _CMP_NLT_UQ), a.low),
          _mm256_and_ps(_mm256_cmp_ps(x.high, limit.high, _CMP_NLT_UQ), a.high)};
}
inline __m256 power_of_two(__m256 low_bits) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(low_bits), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3F800000)));
}
inline Lanes power_of_two(Lanes low_bits) { return {power_of_two(low_bits.low), power_of_two(low_bits.high)}; }

}  // namespace
}  // namespace eagle
