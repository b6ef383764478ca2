// The two steps of a QuantLinear call, as each instruction set runs them.
#pragma once

#include <cstdint>

namespace eagle {

enum class Prologue { kNone, kRmsNorm, kSiluMul, kGeluTanhMul };

// M rows of K numbers, N columns; P is K rounded up to a multiple of 64. The first W numbers, in the weight's order, are
// rounded to 16 bits, 256 * high + low, the others to 8 bits. So a row has P + W values in three parts: the high ones
// of the first numbers, their low ones, and the others.
struct QuantLinearCall {
  const float* x;              // [M, K], or [M, 2K] where the prologue multiplies two halves
  const uint8_t* weight;       // [ceil(N/16), P/4, 16, 4]
  const float* weight_scale;   // [N]
  const float* bias;           // [N]; null: none
  const float* residual;       // [M, N]; null: none
  const float* norm_weight;    // [K]; for rms_norm
  const int32_t* order;        // [K]: number k of the weight's order is number order[k] of the row; null: k
  float* y;                    // [M, N]
  int64_t rows, columns, depth, padded_depth;
  int64_t wide;                // W, a multiple of 64
  Prologue prologue;
  float epsilon;               // for rms_norm

  // The rows as integers, made by the first step.
  void* values;                // M * (P + W) of them, in tiles of rows
  float* scales;               // [M, 2]: of the first numbers and of the others
  int32_t* offsets;            // [M, 3]: -128 times the sum of each part's values
};

struct QuantLinearKernel {
  int value_bytes;
  // Applies the prologue to one row and rounds it to integers. `numbers` is scratch for 2P floats, aligned to 64 bytes.
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
