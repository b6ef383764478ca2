// Rotary position embedding of one head's row.
#pragma once

#include <cstdint>

namespace eagle {
namespace {

// Rotates the first 2 * half of `width` numbers by the angles whose cosines and sines are given, half of each; the rest
// is copied. The two of a pair lie `half` apart, or, interleaved, side by side. With half = 0 it only copies.
inline void rotate(const float* from, float* __restrict to, int64_t width, const float* cosines, const float* sines,
                   int64_t half, bool interleaved) {
  for (int64_t i = 0; i < half; ++i) {
    const int64_t first = interleaved ? 2 * i : i;
    const int64_t second = interleaved ? 2 * i + 1 : i + half;
    const float a = from[first];
    const float b = from[second];
    to[first] = a * cosines[i] - b * sines[i];
    to[second] = b * cosines[i] + a * sines[i];
  }
  for (int64_t index = 2 * half; index < width; ++index) to[index] = from[index];
}

}  // namespace
}  // namespace eagle
