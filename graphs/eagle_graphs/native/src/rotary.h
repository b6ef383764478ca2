// Rotary position embedding of one head's row.
#pragma once

#include <cstdint>

namespace eagle {
namespace {

// Rotates the first 2 * half of `width` numbers by the angles whose cosines and sines are given, half of each; the rest
// is copied. The two of a pair lie `half` apart, or, interleaved, side by side. With half = 0 it only copies.
inline void rotate(const float* from, float* to, int64_t width, const float* cosines, const float* sines, int64_t half,
                   bool interleaved) {
  const int64_t apart = interleaved ? 1 : half;
  const int64_t step = interleaved ? 2 : 1;
  for (int64_t pair = 0; pair < half; ++pair) {
    const float a = from[pair * step];
    const float b = from[pair * step + apart];
    to[pair * step] = a * cosines[pair] - b * sines[pair];
    to[pair * step + apart] = b * cosines[pair] + a * sines[pair];
  }
  for (int64_t index = 2 * half; index < width; ++index) to[index] = from[index];
}

}  // namespace
}  // namespace eagle
