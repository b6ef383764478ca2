// Functions of 16 lanes, the same operations for every lane. Follows one of lanes_*.h.
#pragma once

namespace eagle {
namespace {

// e^x for x <= 88, within 2 units in the last place; 0 below -87, where the result would leave the normal range.
inline Lanes exponential(Lanes x) {
  // x = n ln 2 + r with |r| <= (ln 2) / 2. Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  const Lanes rounder = broadcast(12582912.0f);
  const Lanes shifted = multiply_add(x, broadcast(1.44269504f), rounder);
  const Lanes n = shifted - rounder;
  // ln 2 in two parts; the first has so few bits that n times it is exact.
  Lanes r = multiply_add(n, broadcast(-0.693145752f), x);
  r = multiply_add(n, broadcast(-1.42860677e-6f), r);
  // Taylor's series: r^8 / 8! is below 1e-8.
  Lanes sum = broadcast(1.0f / 5040);
  sum = multiply_add(sum, r, broadcast(1.0f / 720));
  sum = multiply_add(sum, r, broadcast(1.0f / 120));
  sum = multiply_add(sum, r, broadcast(1.0f / 24));
  sum = multiply_add(sum, r, broadcast(1.0f / 6));
  sum = multiply_add(sum, r, broadcast(0.5f));
  sum = multiply_add(sum, r, broadcast(1.0f));
  sum = multiply_add(sum, r, broadcast(1.0f));
  return zero_below(sum * power_of_two(shifted), x, broadcast(-87.0f));
}

// tanh(x), within 1e-7.
inline Lanes hyperbolic_tangent(Lanes x) {
  const Lanes one = broadcast(1.0f);
  const Lanes small = exponential(broadcast(-2.0f) * magnitude(x));
  return with_sign_of((one - small) / (one + small), x);
}

inline float first_lane(Lanes a) {
  float lane;
  store_first(&lane, a, 1);
  return lane;
}

// The lanes' sum, always added in the same pairs.
inline float sum_of_lanes(Lanes a) {
  float lanes[16];
  store(lanes, a);
  for (int half = 8; half >= 1; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

inline float maximum_of_lanes(Lanes a) {
  float lanes[16];
  store(lanes, a);
  for (int half = 8; half >= 1; half /= 2) {
    for (int lane = 0; lane < half; ++lane) {
      lanes[lane] = lanes[lane] > lanes[lane + half] ? lanes[lane] : lanes[lane + half];
    }
  }
  return lanes[0];
}

}  // namespace
}  // namespace eagle
