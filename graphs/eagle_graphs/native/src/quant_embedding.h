// The op QuantEmbedding: rows of a weight that is laid out for QuantLinear, as a tied embedding is.
//
//     y = QuantEmbedding(ids, weight, weight_scale, order?)
//
//     ids           [B, Q] int64
//     weight        [ceil(N/16), P/4, 16, 4] uint8, as in quant_linear.h; N is the number of rows here
//     weight_scale  [N]
//     order         [K] int32, as in quant_linear.h
//     y             [B, Q, K] = (weight - 128) * weight_scale
//
//     attributes    N, K
#pragma once

#include "op.h"

namespace eagle {

class QuantEmbedding {
 public:
  static constexpr const char* kName = "QuantEmbedding";
  static constexpr Port kInputs[] = {{kOrtInt64}, {kOrtUint8}, {kOrtFloat}, {kOrtInt32, kOrtOptional}};
  static constexpr Port kOutputs[] = {{kOrtFloat}};

  explicit QuantEmbedding(const Attributes& attributes);
  void compute(const Context& context) const;

 private:
  const int64_t rows_, depth_;
};

}  // namespace eagle
