// A number of the cache in half precision: the upper half of a float's bits.
#pragma once

#include <cstdint>

namespace eagle {

struct Bf16 {
  uint16_t bits;
};

}  // namespace eagle
