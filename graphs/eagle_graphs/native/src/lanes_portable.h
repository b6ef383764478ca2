// 16 floats in four vectors of the compiler's own, which any CPU with 128-bit vectors has (SSE2, NEON). What the
// functions do is said in lanes_avx512.h.
#pragma once

#include <cstdint>

#include "bf16.h"

namespace eagle {
namespace {

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef uint32_t Word4 __attribute__((vector_size(16)));

struct Lanes {
  static constexpr int kAccumulators = 2;

  Float4 v[4];
};

template <class Function>
inline Lanes each(const Function& function) {
  return {{function(0), function(1), function(2), function(3)}};
}

inline Lanes load_first(const float* from, int count) {
  Lanes a = {};
  for (int lane = 0; lane < count; ++lane) a.v[lane / 4][lane % 4] = from[lane];
  return a;
}
inline Lanes load_first(const Bf16* from, int count) {
  Lanes a = {};
  for (int lane = 0; lane < count; ++lane) {
    const uint32_t bits = static_cast<uint32_t>(from[lane].bits) << 16;
    float number;
    __builtin_memcpy(&number, &bits, sizeof number);
    a.v[lane / 4][lane % 4] = number;
  }
  return a;
}
inline void store_first(float* to, Lanes a, int count) {
  for (int lane = 0; lane < count; ++lane) to[lane] = a.v[lane / 4][lane % 4];
}
inline Lanes load(const float* from) {
  Lanes a;
  __builtin_memcpy(&a, from, sizeof a);
  return a;
}
inline Lanes load(const Bf16* from) { return load_first(from, 16); }
inline void store(float* to, Lanes a) { __builtin_memcpy(to, &a, sizeof a); }
inline Lanes broadcast(float x) {
  const Float4 all = {x, x, x, x};
  return {{all, all, all, all}};
}

inline Lanes operator+(Lanes a, Lanes b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
inline Lanes operator-(Lanes a, Lanes b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
inline Lanes operator*(Lanes a, Lanes b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
inline Lanes operator/(Lanes a, Lanes b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return a * b + c; }
inline Lanes maximum(Lanes a, Lanes b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }

inline Lanes magnitude(Lanes a) {
  return each([&](int i) { return (Float4)((Int4)a.v[i] & INT32_MAX); });
}
inline Lanes with_sign_of(Lanes a, Lanes sign) {
  return each([&](int i) { return (Float4)(((Int4)a.v[i] & INT32_MAX) | ((Int4)sign.v[i] & INT32_MIN)); });
}
inline Lanes zero_below(Lanes a, Lanes x, Lanes limit) {
  return each([&](int i) { return (Float4)((Int4)a.v[i] & ~(x.v[i] < limit.v[i])); });
}
inline Lanes power_of_two(Lanes low_bits) {
  return each([&](int i) { return (Float4)(((Word4)low_bits.v[i] << 23) + 0x3F800000); });
}

}  // namespace
}  // namespace eagle
