// 16 floats in one AVX-512 register.
#pragma once

#include "bf16.h"

namespace eagle {
namespace {

struct Lanes {
  static constexpr int kAccumulators = 24;  // how many fit the registers, with room for operands

  __m512 v;
};

inline Lanes load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline Lanes load_first(const float* from, int count) {
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from)};
}
inline Lanes widened(__m256i halves) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
inline Lanes load(const Bf16* from) {
  return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline Lanes load_first(const Bf16* from, int count) {
  return widened(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), from));
}
inline void store(float* to, Lanes a) { _mm512_storeu_ps(to, a.v); }
inline void store_first(float* to, Lanes a, int count) {
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), a.v);
}
inline Lanes broadcast(float value) { return {_mm512_set1_ps(value)}; }

inline Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
// a * b + c, rounded once where the instruction set can.
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// `b` where either is NaN.
inline Lanes maximum(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }

inline Lanes magnitude(Lanes a) { return {_mm512_abs_ps(a.v)}; }
inline Lanes with_sign_of(Lanes a, Lanes sign) {
  const __m512 mask = _mm512_set1_ps(-0.0f);
  return {_mm512_or_ps(_mm512_andnot_ps(mask, a.v), _mm512_and_ps(mask, sign.v))};
}
// `a`, or 0 where x < limit.
inline Lanes zero_below(Lanes a, Lanes x, Lanes limit) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), a.v)};
}
// 2^n, n being the low bits of the float's representation.
inline Lanes power_of_two(Lanes low_bits) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(low_bits.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3F800000)))};
}

}  // namespace
}  // namespace eagle
