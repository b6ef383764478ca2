// The two steps of a QuantLinear call, as each instruction set runs them.
#pragma once

#include <cstdint>

namespace eagle {

enum class Prologue { kNone, kRmsNorm, kSiluMul, kGeluTanhMul };

// M rows of K numbers in G groups, N columns; P is K rounded up to a multiple of 64. A number is one integer of 8 bits
// or two: 16 bits as 256 * high + low, each a plane of values like any other.
struct QuantLinearCall {
  const float* x;              // [M, K], or [M, 2K] where the prologue multiplies two halves
  const uint8_t* weight;       // [ceil(N/16), P/4, 16, 4]
  const float* weight_scale;   // [N]
  const float* bias;           // [N]; null: none
  const float* residual;       // [M, N]; null: none
  const float* norm_weight;    // [K]; for rms_norm
  float* y;                    // [M, N]
  int64_t rows, columns, depth, padded_depth, groups;
  int64_t planes;              // 1 or 2
  Prologue prologue;
  float epsilon;               // for rms_norm

  // The rows as integers, made by the first step.
  void* values;                // M * P * planes of them, in tiles of rows
  float* scales;               // [M, G]
  int32_t* offsets;            // [M, G, planes]: -128 times the sum of the group's values
};

struct QuantLinearKernel {
  int value_bytes;
  // Applies the prologue to one row and rounds it to integers. `numbers` is scratch for P floats, aligned to 64 bytes.
  void (*quantize_row)(const QuantLinearCall&, int64_t row, float* numbers);
  // All rows of y, in the columns of the weight's blocks [first, end). All rows must have been quantized.
  void (*multiply)(const QuantLinearCall&, int64_t first, int64_t end);
};

extern const QuantLinearKernel kQuantLinearPortable;
#if defined(__x86_64__)
extern const QuantLinearKernel kQuantLinearAvx2;
extern const QuantLinearKernel kQuantLinearAvx512;
#endif

}  // namespace eagle
