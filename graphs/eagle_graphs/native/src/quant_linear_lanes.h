// QuantLinear in 16 lanes, the same for every instruction set. Follows lanes_math.h and one of dot_*.h, which has
//
//     Value               the type of a row's integers
//     kTileRows           the most rows of values that dot() takes: their sums fit the registers
//     store_low_bits      16 Values of the low bits of 16 floats' representations
//     from_integers       16 floats from int32
//     dot<rows>           integer products of a tile of rows and a block of 16 columns
//
// Integers are exact and floats meet in one order, so that a row's result depends on nothing but the row.
//
// A tile of R rows holds its values as [P/64, R, planes, 64]: while dot() goes down the depth it reads one line of cache
// after another and finds the rows at constant distances, and no two rows, which different threads may be writing,
// share a line.
#pragma once

#include "quant_linear_kernel.h"

namespace eagle {
namespace {

constexpr int64_t kBlock = 16;    // columns of a block of the weight
constexpr int64_t kSegment = 64;  // depth of a line of values
// How far the weight is fetched ahead, in bytes: memory answers in the time that a tile takes for about this much.
constexpr int64_t kAhead = 4096;

// The tiles have nearly the same number of rows.
struct Tile {
  int64_t first, rows;
};

inline int64_t tiles_of(const QuantLinearCall& call) {
  const int64_t most = kTileRows / call.planes;
  return (call.rows + most - 1) / most;
}

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

// The largest magnitude of a number in so many planes; 127 * 256 + 127 leaves the low one its 8 bits.
inline float largest_integer(int64_t planes) { return planes == 1 ? 127.0f : 32639.0f; }

// 16 numbers that are integers, as int8 values in `planes` planes of a line each; adds them to the planes' sums.
inline void store_values(Lanes integers, int64_t planes, Value* values, Lanes* sums) {
  const Lanes rounder = broadcast(kRounder);
  if (planes == 2) {
    // Of two nearest multiples of 256 the upper one, so that the rest is -128 and not 128.
    const Lanes shifted = (integers + broadcast(0.25f)) * broadcast(1.0f / 256) + rounder;
    const Lanes high = shifted - rounder;
    store_low_bits(values, shifted);
    sums[0] = sums[0] + high;
    integers = integers - high * broadcast(256.0f);
    values += kSegment;
    ++sums;
  }
  store_low_bits(values, integers + rounder);
  *sums = *sums + integers;
}

inline void quantize_row(const QuantLinearCall& call, int64_t row, float* numbers) {
  prepare(call, row, numbers);
  const int64_t planes = call.planes, index = ((row + 1) * tiles_of(call) - 1) / call.rows;
  const Tile tile = tile_at(call, index);
  Value* values = static_cast<Value*>(call.values) +
                  (tile.first * call.padded_depth + (row - tile.first) * kSegment) * planes;
  const Lanes rounder = broadcast(kRounder);
  const float limit = largest_integer(planes);
  const int64_t depth = call.padded_depth / call.groups;
  for (int64_t group = 0; group < call.groups; ++group, numbers += depth) {
    Lanes largest = broadcast(0.0f);
    for (int64_t k = 0; k < depth; k += 16) largest = maximum(magnitude(load(numbers + k)), largest);
    const float highest = maximum_of_lanes(largest);
    // What is so small that its inverse overflows counts as zero.
    const float inverse = limit / highest <= __FLT_MAX__ ? limit / highest : 0.0f;
    Lanes sums[2] = {broadcast(0.0f), broadcast(0.0f)};
    for (int64_t k = 0; k < depth; k += kSegment, values += tile.rows * planes * kSegment) {
      for (int64_t i = 0; i < kSegment; i += 16) {
        const Lanes integers = (load(numbers + k + i) * broadcast(inverse) + rounder) - rounder;
        store_values(integers, planes, values + i, sums);
      }
    }
    // Integers below 2^24, exact in float; NaN if there was a NaN, which `largest` passed over, or an infinity, times 0.
    const int64_t at = row * call.groups + group;
    const bool finite = sum_of_lanes(sums[0]) == sum_of_lanes(sums[0]);
    call.scales[at] = finite ? (inverse == 0.0f ? 0.0f : highest / limit) : __builtin_nanf("");
    for (int64_t plane = 0; plane < planes; ++plane) {
      call.offsets[at * planes + plane] = finite ? -128 * static_cast<int32_t>(sum_of_lanes(sums[plane])) : 0;
    }
  }
}

// One tile of rows times one block of columns.
template <int kRows, int kPlanes>
void multiply_tile(const QuantLinearCall& call, int64_t first_row, int64_t block, int64_t ahead) {
  const int64_t depth = call.padded_depth / call.groups;
  const Value* values = static_cast<const Value*>(call.values) + first_row * call.padded_depth * kPlanes;
  const uint8_t* weight = call.weight + block * call.padded_depth * kBlock;
  const float* scales = call.scales + first_row * call.groups;
  const int32_t* offsets = call.offsets + first_row * call.groups * kPlanes;
  alignas(64) int32_t products[kRows * kPlanes][kBlock];
  Lanes sums[kRows];
  for (int64_t group = 0; group < call.groups; ++group) {
    dot<kRows * kPlanes>(values, weight, depth / kSegment, ahead, products);
    for (int row = 0; row < kRows; ++row) {
      const int64_t at = row * call.groups + group;
      Lanes product = from_integers(products[row * kPlanes], offsets[at * kPlanes]);
      if constexpr (kPlanes == 2) {
        product = product * broadcast(256.0f) + from_integers(products[row * 2 + 1], offsets[at * 2 + 1]);
      }
      const Lanes scaled = product * broadcast(scales[at]);
      sums[row] = group == 0 ? scaled : sums[row] + scaled;
    }
    values += depth * kRows * kPlanes;
    weight += depth * kBlock;
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
template <int kPlanes, int kRows = kTileRows / kPlanes>
inline void multiply_rows(const QuantLinearCall& call, Tile tile, int64_t block, int64_t ahead) {
  if constexpr (kRows > 0) {
    if (tile.rows == kRows) return multiply_tile<kRows, kPlanes>(call, tile.first, block, ahead);
    multiply_rows<kPlanes, kRows - 1>(call, tile, block, ahead);
  }
}

// Block after block, so that the weight comes from memory once, in order.
inline void multiply(const QuantLinearCall& call, int64_t first, int64_t end) {
  const int64_t tiles = tiles_of(call);
  for (int64_t block = first; block < end; ++block) {
    for (int64_t index = 0; index < tiles; ++index) {
      const int64_t ahead = index == 0 ? kAhead : 0;
      if (call.planes == 1) {
        multiply_rows<1>(call, tile_at(call, index), block, ahead);
      } else {
        multiply_rows<2>(call, tile_at(call, index), block, ahead);
      }
    }
  }
}

}  // namespace
}  // namespace eagle
