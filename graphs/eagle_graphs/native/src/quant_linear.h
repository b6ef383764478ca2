// The op QuantLinear: a linear layer with 8-bit weights (one scale a column) and activations (one scale a row).
//
//     y = QuantLinear(x, weight, weight_scale, bias?, residual?, norm_weight?)
//
//     x             [..., K], or [..., 2K] where the prologue multiplies two halves
//     weight        [ceil(N/16), P/4, 16, 4] uint8, P = K rounded up to a multiple of 64
//     weight_scale  [N]
//     bias          [N]
//     residual      [..., N]
//     norm_weight   [K]: for rms_norm, and for it only
//     y             [..., N] = integer product * row's scale * weight_scale (+ bias) (+ residual)
//
//     attributes    N, K; prologue: none, rms_norm, silu_mul, gelu_tanh_mul; epsilon (rms_norm); groups: the K axis
//                   in that many equal parts, each with a scale of its own per row; activation_bits: 8 or 16. Of 16
//                   bits, the upper 8 and the lower 8 meet the weight separately: twice the products, one weight
//
// eagle_graphs/native/packing.py has the layout of the weight and the definition in numpy.
#pragma once

#include <string>

#include "op.h"
#include "quant_linear_kernel.h"

namespace eagle {

class QuantLinear {
 public:
  static constexpr const char* kName = "QuantLinear";
  static constexpr Port kInputs[] = {{kOrtFloat},
                                     {kOrtUint8},
                                     {kOrtFloat},
                                     {kOrtFloat, kOrtOptional},
                                     {kOrtFloat, kOrtOptional},
                                     {kOrtFloat, kOrtOptional}};
  static constexpr Port kOutputs[] = {{kOrtFloat}};

  explicit QuantLinear(const Attributes& attributes);
  void compute(const Context& context) const;

 private:
  QuantLinearCall checked_call(const Context& context) const;
  void run(const Context& context, QuantLinearCall call) const;

  const QuantLinearKernel& kernel_;
  const int64_t columns_, depth_, padded_depth_, groups_, activation_bits_;
  const Prologue prologue_;
  const float epsilon_;
};

}  // namespace eagle
