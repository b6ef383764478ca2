// TopLogprobs' kernel over 16 lanes. Follows one of lanes_*.h and lanes_math.h.
//
// A logit enters the list only by being above its last one; few are, once the list is full, and a block of columns
// whose highest one is not is passed over. Nothing is above NaN, and NaN is above nothing: the sum tells of it.
#pragma once

namespace eagle {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kVectors = 8;  // of a block

// Puts a logit where it belongs in the list of `held`, of which the last one falls out where the list is full.
inline void insert(float logit, int64_t index, int64_t held, int64_t wanted, float* best, int64_t* indices) {
  int64_t place = held < wanted ? held : wanted - 1;
  for (; place > 0 && logit > best[place - 1]; --place) {
    best[place] = best[place - 1];
    indices[place] = indices[place - 1];
  }
  best[place] = logit;
  indices[place] = index;
}

inline bool any_above(const float* logits, float least) {
  Lanes highest = load(logits);
  for (int64_t vector = 1; vector < kVectors; ++vector) highest = maximum(load(logits + vector * kLanes), highest);
  return maximum_of_lanes(highest) > least;
}

inline void choose(TopLogprobsRow& row) {
  float* best = row.logprobs;
  int64_t column = 0;
  for (; column < row.wanted; ++column) insert(row.logits[column], column, column, row.wanted, best, row.indices);
  const float& least = best[row.wanted - 1];
  while (column < row.columns) {
    const int64_t left = row.columns - column;
    const int64_t end = column + (left < kVectors * kLanes ? left : kVectors * kLanes);
    if (left < kVectors * kLanes || any_above(row.logits + column, least)) {
      for (int64_t i = column; i < end; ++i) {
        if (row.logits[i] > least) insert(row.logits[i], i, row.wanted, row.wanted, best, row.indices);
      }
    }
    column = end;
  }
}

inline float sum_of_exponentials(const float* logits, int64_t columns, float highest) {
  Lanes sum = broadcast(0.0f);
  int64_t column = 0;
  for (; column + kLanes <= columns; column += kLanes) {
    sum = sum + exponential(load(logits + column) - broadcast(highest));
  }
  float rest[kLanes] = {};
  if (column < columns) {
    const int count = static_cast<int>(columns - column);
    store_first(rest, exponential(load_first(logits + column, count) - broadcast(highest)), count);
  }
  return sum_of_lanes(sum + load(rest));
}

inline void top_logprobs(TopLogprobsRow& row) {
  choose(row);
  const float highest = row.logprobs[0];
  row.sum = sum_of_exponentials(row.logits, row.columns, highest);
  for (int64_t i = 0; i < row.wanted; ++i) row.logprobs[i] -= highest;
}

}  // namespace
}  // namespace eagle
