// The op QuantLinear: a linear layer with 8-bit weights (one scale a column) and activations (one scale a row).
//
//     y = QuantLinear(x, weight, weight_scale, bias?, residual?, norm_weight?, order?)
//
//     x             [..., K], or [..., 2K] where the prologue multiplies two halves
//     weight        [ceil(N/16), P/4, 16, 4] uint8, P = K rounded up to a multiple of 64
//     weight_scale  [N]
//     bias          [N]
//     residual      [..., N]
//     norm_weight   [K]: for rms_norm, and for it only
//     order         [K] int32: the weight's depth k meets input order[k]; without it, input k
//     y             [..., N] = integer product * row's scale * weight_scale (+ bias) (+ residual)
//
//     attributes    N, K; prologue: none, rms_norm, silu_mul, gelu_tanh_mul; epsilon (rms_norm); wide: so many inputs,
//                   the first in the weight's order, have 16 bits and a scale of their own per row; the others have 8.
//                   Of 16 bits, the upper 8 and the lower 8 meet the weight separately
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
                                     {kOrtFloat, kOrtOptional},
                                     {kOrtInt32, kOrtOptional}};
  static constexpr Port kOutputs[] = {{kOrtFloat}};

  explicit QuantLinear(const Attributes& attributes);
  void compute(const Context& context) const;

 private:
  QuantLinearCall checked_call(const Context& context) const;
  void run(const Context& context, QuantLinearCall call) const;

  const QuantLinearKernel& kernel_;
  const int64_t columns_, depth_, padded_depth_, wide_;
  const Prologue prologue_;
  const float epsilon_;
};

}  // namespace eagle
