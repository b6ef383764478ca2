// QuantLinear in 16 lanes, the same for every instruction set. Follows lanes_math.h and one of dot_*.h, which has
//
//     Value               the type of a row's integers
//     kTileRows           the most rows that dot() takes: their sums fit the registers
//     store_low_bits      16 Values of the low bits of 16 floats' representations
//     from_integers       16 floats from int32
//     dot<rows, fetch>    integer products of a tile of rows and a block of 16 columns; `fetch`: also asks
//                         memory for the part of the weight that is due a little later
//
// Integers are exact and floats meet in one order, so that a row's result depends on nothing but the row.
//
// A tile of R rows holds each part of its values as [depth/64, R, 64]: while dot() goes down the depth it reads one line of cache
// after another and finds the rows at constant distances, and no two rows, which different threads may be writing,
// share a line.
#pragma once

#include "quant_linear_kernel.h"

namespace eagle {
namespace {

constexpr int64_t kBlock = 16;    // columns of a block of the weight
constexpr int64_t kSegment = 64;  // depth of a line of values

// The tiles have nearly the same number of rows.
struct Tile {
  int64_t first, rows;
};

inline int64_t tiles_of(const QuantLinearCall& call) { return (call.rows + kTileRows - 1) / kTileRows; }

inline Tile tile_at(const QuantLinearCall& call, int64_t index) {
  const int64_t first = index * call.rows / tiles_of(call);
  return {first, (index + 1) * call.rows / tiles_of(call) - first};
}

inline Lanes load_up_to(const float* from, int64_t count) {
  return count >= 16 ? load(from) : load_first(from, static_cast<int>(count));
}

// function(start, count) for every 16 of `size`; the last may be fewer.
template <class Function>
inline void for_lanes(int64_t size, const Function& function) {
  int64_t start = 0;
  for (; start + 16 <= size; start += 16) function(start, int64_t{16});
  if (start < size) function(start, size - start);
}

// x / (1 + e^-u)
inline Lanes gate(Lanes x, Lanes u) {
  const Lanes exponent = broadcast(0.0f) - maximum(broadcast(-88.0f), u);
  return x / (broadcast(1.0f) + exponential(exponent));
}

inline Lanes silu(Lanes x) { return gate(x, x); }

// x / 2 * (1 + tanh(v)) is x / (1 + e^-2v); v = sqrt(2 / pi) * (x + 0.044715 x^3).
inline Lanes gelu_tanh(Lanes x) {
  return gate(x, broadcast(1.59576912f) * (x + broadcast(0.044715f) * (x * x * x)));
}

// The prologue's result for one row, padded with zeros.
inline void prepare(const QuantLinearCall& call, int64_t row, float* numbers) {
  const int64_t depth = call.depth;
  for (int64_t k = depth / 16 * 16; k < call.padded_depth; k += 16) store(numbers + k, broadcast(0.0f));
  if (call.prologue == Prologue::kSiluMul || call.prologue == Prologue::kGeluTanhMul) {
    const float* x = call.x + row * 2 * depth;
    const bool silu_gate = call.prologue == Prologue::kSiluMul;
    for_lanes(depth, [&](int64_t k, int64_t count) {
      const Lanes gate = load_up_to(x + k, count);
      store(numbers + k, (silu_gate ? silu(gate) : gelu_tanh(gate)) * load_up_to(x + depth + k, count));
    });
    return;
  }
  const float* x = call.x + row * depth;
  if (call.prologue == Prologue::kNone) {
    for_lanes(depth, [&](int64_t k, int64_t count) { store(numbers + k, load_up_to(x + k, count)); });
    return;
  }
  Lanes squares = broadcast(0.0f);
  for_lanes(depth, [&](int64_t k, int64_t count) {
    const Lanes v = load_up_to(x + k, count);
    store(numbers + k, v);
    squares = squares + v * v;
  });
  const float mean = sum_of_lanes(squares) / static_cast<float>(depth);
  const Lanes inverse = broadcast(1.0f / __builtin_sqrtf(mean + call.epsilon));
  for_lanes(depth, [&](int64_t k, int64_t count) {
    store(numbers + k, load(numbers + k) * inverse * load_up_to(call.norm_weight + k, count));
  });
}

// 1.5 * 2^23: a sum with it is rounded to an integer, in the low bits.
constexpr float kRounder = 12582912.0f;

// Where a row's values go: parts of lines of 64, a stride apart.
struct Lines {
  Value* at;
  int64_t stride;
};

// Rounds `count` numbers, a multiple of 64, to integers of `bits` bits: their scale, 0 where all are 0 and NaN where one
// is not finite, and for each part -128 times the sum of its values.
template <int kBits>
inline float round_numbers(const float* numbers, int64_t count, Lines high, Lines low, int32_t* offsets) {
  constexpr float kLargest = kBits == 8 ? 127.0f : 127.0f * 256 + 127;  // 127 leaves the low part its 8 bits
  Lanes largest = broadcast(0.0f);
  for (int64_t k = 0; k < count; k += 16) largest = maximum(magnitude(load(numbers + k)), largest);
  const float highest = maximum_of_lanes(largest);
  // What is so small that its inverse overflows counts as zero.
  const float inverse = kLargest / highest <= __FLT_MAX__ ? kLargest / highest : 0.0f;
  const Lanes rounder = broadcast(kRounder);
  Lanes high_sums = broadcast(0.0f), low_sums = broadcast(0.0f);
  for (int64_t k = 0; k < count; k += kSegment, high.at += high.stride, low.at += low.stride) {
    for (int64_t i = 0; i < kSegment; i += 16) {
      Lanes shifted = load(numbers + k + i) * broadcast(inverse) + rounder;
      if constexpr (kBits == 16) {
        const Lanes integers = shifted - rounder;
        // Of two nearest multiples of 256 the upper one, so that the rest is -128 and not 128.
        const Lanes upper = (integers + broadcast(0.25f)) * broadcast(1.0f / 256) + rounder;
        store_low_bits(high.at + i, upper);
        high_sums = high_sums + (upper - rounder);
        shifted = integers - (upper - rounder) * broadcast(256.0f) + rounder;
      }
      store_low_bits(low.at + i, shifted);
      low_sums = low_sums + (shifted - rounder);
    }
  }
  // Integers below 2^24 add up exactly. The sum is NaN if there was a NaN, or an infinity, whose inverse is 0.
  const float high_sum = sum_of_lanes(high_sums), low_sum = sum_of_lanes(low_sums);
  const bool finite = low_sum == low_sum;
  if constexpr (kBits == 16) *offsets++ = finite ? -128 * static_cast<int32_t>(high_sum) : 0;
  *offsets = finite ? -128 * static_cast<int32_t>(low_sum) : 0;
  return !finite ? low_sum : inverse == 0.0f ? 0.0f : highest / kLargest;
}

inline void quantize_row(const QuantLinearCall& call, int64_t row, float* numbers) {
  prepare(call, row, numbers);
  const int64_t depth = call.padded_depth, wide = call.wide;
  if (call.order) {
    float* ordered = numbers + depth;
    for (int64_t k = 0; k < call.depth; ++k) ordered[k] = numbers[call.order[k]];
    for (int64_t k = call.depth; k < depth; ++k) ordered[k] = 0.0f;
    numbers = ordered;
  }
  const Tile tile = tile_at(call, ((row + 1) * tiles_of(call) - 1) / call.rows);
  Value* values = static_cast<Value*>(call.values) + tile.first * (depth + wide) + (row - tile.first) * kSegment;
  const int64_t stride = tile.rows * kSegment;
  const auto part = [&](int64_t start) { return Lines{values + start * tile.rows, stride}; };
  float* scales = call.scales + row * 2;
  int32_t* offsets = call.offsets + row * 3;
  if (wide > 0) scales[0] = round_numbers<16>(numbers, wide, part(0), part(wide), offsets);
  if (wide < depth) {
    const Lines rest = part(2 * wide);
    scales[1] = round_numbers<8>(numbers + wide, depth - wide, rest, rest, offsets + 2);
  }
}

// One tile of rows times one block of columns.
template <int kRows>
void multiply_tile(const QuantLinearCall& call, int64_t first_row, int64_t block, bool fetch) {
  const auto products_of = fetch ? dot<kRows, true> : dot<kRows, false>;
  const int64_t depth = call.padded_depth, wide = call.wide;
  const Value* values = static_cast<const Value*>(call.values) + first_row * (depth + wide);
  const uint8_t* weight = call.weight + block * depth * kBlock;
  const float* scales = call.scales + first_row * 2;
  const int32_t* offsets = call.offsets + first_row * 3;
  alignas(64) int32_t products[kRows][kBlock];
  Lanes sums[kRows];
  if (wide > 0) {
    products_of(values, weight, wide / kSegment, products);
    for (int row = 0; row < kRows; ++row) sums[row] = from_integers(products[row], offsets[row * 3]);
    dot<kRows, false>(values + wide * kRows, weight, wide / kSegment, products);
    for (int row = 0; row < kRows; ++row) {
      const Lanes low = from_integers(products[row], offsets[row * 3 + 1]);
      sums[row] = (sums[row] * broadcast(256.0f) + low) * broadcast(scales[row * 2]);
    }
  }
  if (wide < depth) {
    products_of(values + 2 * wide * kRows, weight + wide * kBlock, (depth - wide) / kSegment, products);
    for (int row = 0; row < kRows; ++row) {
      const Lanes rest = from_integers(products[row], offsets[row * 3 + 2]) * broadcast(scales[row * 2 + 1]);
      sums[row] = wide > 0 ? sums[row] + rest : rest;
    }
  }

  const int64_t column = block * kBlock;
  const int count = static_cast<int>(call.columns - column < kBlock ? call.columns - column : kBlock);
  const Lanes weight_scale = load_up_to(call.weight_scale + column, count);
  const Lanes bias = call.bias ? load_up_to(call.bias + column, count) : broadcast(0.0f);
  for (int row = 0; row < kRows; ++row) {
    const int64_t at = (first_row + row) * call.columns + column;
    Lanes y = sums[row] * weight_scale;
    if (call.bias) y = y + bias;
    if (call.residual) y = y + load_up_to(call.residual + at, count);
    if (count == kBlock) {
      store(call.y + at, y);
    } else {
      store_first(call.y + at, y, count);
    }
  }
}

// The right number of rows becomes a constant.
template <int kRows = kTileRows>
inline void multiply_rows(const QuantLinearCall& call, Tile tile, int64_t block, bool fetch) {
  if constexpr (kRows > 0) {
    if (tile.rows == kRows) return multiply_tile<kRows>(call, tile.first, block, fetch);
    multiply_rows<kRows - 1>(call, tile, block, fetch);
  }
}

// The first tile's pass brings the weight of these blocks near, the others find it there.
inline void multiply(const QuantLinearCall& call, int64_t first, int64_t end) {
  const int64_t tiles = tiles_of(call);
  for (int64_t index = 0; index < tiles; ++index) {
    const Tile tile = tile_at(call, index);
    for (int64_t block = first; block < end; ++block) multiply_rows(call, tile, block, index == 0);
  }
}

}  // namespace
}  // namespace eagle
