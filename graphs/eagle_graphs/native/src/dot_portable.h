// Integer products in plain loops. What the functions do is said in quant_linear_lanes.h.
#pragma once

#include <cstdint>

namespace eagle {
namespace {

using Value = int16_t;

constexpr int kTileRows = 4;

inline void store_low_bits(Value* to, Lanes a) {
  for (int lane = 0; lane < 16; ++lane) to[lane] = static_cast<int16_t>(((Int4)a.v[lane / 4])[lane % 4]);
}

inline Lanes from_integers(const int32_t* from, int32_t offset) {
  float numbers[16];
  for (int lane = 0; lane < 16; ++lane) numbers[lane] = static_cast<float>(from[lane] + offset);
  return load(numbers);
}

template <int kRows, bool>
inline void dot(const Value* values, const uint8_t* weight, int64_t segments, int32_t (*products)[16]) {
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < 16; ++column) products[row][column] = 0;
  }
  for (; segments > 0; --segments, values += kRows * 64) {
    for (int step = 0; step < 16; ++step, weight += 64) {
      for (int row = 0; row < kRows; ++row) {
        const Value* four = values + row * 64 + step * 4;
        for (int column = 0; column < 16; ++column) {
          const uint8_t* w = weight + column * 4;
          products[row][column] += w[0] * four[0] + w[1] * four[1] + w[2] * four[2] + w[3] * four[3];
        }
      }
    }
  }
}

}  // namespace
}  // namespace eagle
