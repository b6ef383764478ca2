// The order of a weight's inputs, which QuantLinear and QuantEmbedding share.
#pragma once

#include "op.h"

namespace eagle {

// The order's numbers, null where none is given. Throws where one is not an input.
inline const int32_t* checked_order(const Tensor<int32_t>& order, int64_t depth) {
  if (!order.given) return nullptr;
  order.expect_shape({depth});
  for (int64_t k = 0; k < depth; ++k) {
    const int32_t input = order.data[k];
    require(input >= 0 && input < depth, "order has ", input, ", expected 0 to ", depth - 1);
  }
  return order.data;
}

}  // namespace eagle
