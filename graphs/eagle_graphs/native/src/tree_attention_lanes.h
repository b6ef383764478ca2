// TreeAttention's kernel over 16 lanes. Follows one of lanes_*.h and lanes_math.h.
//
// What a row gets is a function of its path alone, by float operations in one order:
//   score   one chain of multiply-adds over the head's D numbers, times the scale, soft-capped
//   weight  exp(score - highest score)
//   sum     16 partial sums by logical index modulo 16, each in logical order, added in fixed pairs; then the sink's
//   value   one chain of multiply-adds in logical order for each of the D numbers, divided by the sum
// Neither the order nor the lane depends on Q, on where the buffer holds a row of the path, or on how the work is cut.
// A row that is not on the path is never read into the row's chains: were it infinite, a weight of zero would not do.
//
// A *pair* is a new row and a query head. Pairs are taken in groups of up to kGroup, which share what they load.
#pragma once

namespace eagle {
namespace {

constexpr int kGroup = Lanes::kAccumulators < 6 ? Lanes::kAccumulators : 6;
constexpr int64_t kLanes = 16;
// What one pass over the groups leaves in the first-level cache: 4 blocks of keys, 64 values.
constexpr int64_t kBlocksOfPass = 4;
constexpr int64_t kValuesOfPass = 64;
// A head's keys, or values, that stay in the second-level cache until they are used.
constexpr int64_t kNearBytes = 256 << 10;

// Blocks of keys, or vectors of a value, that are worked on at once for so many pairs.
constexpr int side_by_side(int pairs) {
  const int fitting = Lanes::kAccumulators / pairs;
  return fitting < 1 ? 1 : fitting > 4 ? 4 : fitting;
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t rounded_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Scores of kPairs queries with the 16 * kBlocks keys of consecutive blocks. `ahead`: how far behind a key that is which
// memory is asked for meanwhile; a block may fill a page, where the CPU's own prefetching ends.
template <int kPairs, int kBlocks, class Cache>
inline void score(const float* queries, const Cache* keys, int64_t ahead, int64_t head_dim, Lanes scale, float softcap,
                  float* scores, int64_t stride) {
  Lanes sums[kPairs][kBlocks];
  for (int pair = 0; pair < kPairs; ++pair) {
    for (int block = 0; block < kBlocks; ++block) sums[pair][block] = broadcast(0.0f);
  }
  for (int64_t d = 0; d < head_dim; ++d) {
    Lanes key[kBlocks];
    for (int block = 0; block < kBlocks; ++block) {
      const Cache* from = keys + (block * head_dim + d) * kLanes;
      key[block] = load(from);
      __builtin_prefetch(from + ahead, 0, 2);
    }
    for (int pair = 0; pair < kPairs; ++pair) {
      const Lanes query = broadcast(queries[d * kPairs + pair]);
      for (int block = 0; block < kBlocks; ++block) {
        sums[pair][block] = multiply_add(query, key[block], sums[pair][block]);
      }
    }
  }
  for (int pair = 0; pair < kPairs; ++pair) {
    for (int block = 0; block < kBlocks; ++block) {
      Lanes result = sums[pair][block] * scale;
      if (softcap != 0.0f) result = broadcast(softcap) * hyperbolic_tangent(result / broadcast(softcap));
      store(scores + pair * stride + block * kLanes, result);
    }
  }
}

// sums[pair][0 .. 16 * kVectors) += weights[pair][i] * values[i], for i in [0, count) in order. kPart: only the first
// `width` numbers of the one vector. `ahead`: as in score().
template <int kPairs, int kVectors, bool kPart, class Cache>
inline void weigh(const float* weights, int64_t stride, const Cache* values, int64_t ahead, int64_t head_dim,
                  int64_t count, float* sums, int64_t sums_stride, int width) {
  Lanes sum[kPairs][kVectors];
  for (int pair = 0; pair < kPairs; ++pair) {
    for (int vector = 0; vector < kVectors; ++vector) {
      sum[pair][vector] = load(sums + pair * sums_stride + vector * kLanes);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    Lanes value[kVectors];
    for (int vector = 0; vector < kVectors; ++vector) {
      const Cache* from = values + i * head_dim + vector * kLanes;
      value[vector] = kPart ? load_first(from, width) : load(from);
      __builtin_prefetch(from + ahead, 0, 2);
    }
    for (int pair = 0; pair < kPairs; ++pair) {
      const Lanes weight = broadcast(weights[pair * stride + i]);
      for (int vector = 0; vector < kVectors; ++vector) {
        sum[pair][vector] = multiply_add(weight, value[vector], sum[pair][vector]);
      }
    }
  }
  for (int pair = 0; pair < kPairs; ++pair) {
    for (int vector = 0; vector < kVectors; ++vector) {
      store(sums + pair * sums_stride + vector * kLanes, sum[pair][vector]);
    }
  }
}

// The two above for a number of pairs that is known only at run time, over any number of blocks and any D.
template <int kPairs = kGroup, class Cache>
void score_blocks(int pairs, const float* queries, const Cache* keys, int64_t ahead, int64_t head_dim, int64_t blocks,
                  float scale, float softcap, float* scores, int64_t stride) {
  if (pairs < kPairs) {
    if constexpr (kPairs > 1) {
      score_blocks<kPairs - 1>(pairs, queries, keys, ahead, head_dim, blocks, scale, softcap, scores, stride);
    }
    return;
  }
  constexpr int kBlocks = side_by_side(kPairs);
  const Lanes scales = broadcast(scale);
  int64_t block = 0;
  for (; block + kBlocks <= blocks; block += kBlocks) {
    score<kPairs, kBlocks>(queries, keys + block * kLanes * head_dim, ahead, head_dim, scales, softcap,
                           scores + block * kLanes, stride);
  }
  for (; block < blocks; ++block) {
    score<kPairs, 1>(queries, keys + block * kLanes * head_dim, ahead, head_dim, scales, softcap,
                     scores + block * kLanes, stride);
  }
}

template <int kPairs = kGroup, class Cache>
void weigh_values(int pairs, const float* weights, int64_t stride, const Cache* values, int64_t ahead,
                  int64_t head_dim, int64_t count, float* sums, int64_t sums_stride) {
  if (pairs < kPairs) {
    if constexpr (kPairs > 1) {
      weigh_values<kPairs - 1>(pairs, weights, stride, values, ahead, head_dim, count, sums, sums_stride);
    }
    return;
  }
  constexpr int kVectors = side_by_side(kPairs);
  int64_t d = 0;
  for (; d + kVectors * kLanes <= head_dim; d += kVectors * kLanes) {
    weigh<kPairs, kVectors, false>(weights, stride, values + d, ahead, head_dim, count, sums + d, sums_stride, kLanes);
  }
  for (; d + kLanes <= head_dim; d += kLanes) {
    weigh<kPairs, 1, false>(weights, stride, values + d, ahead, head_dim, count, sums + d, sums_stride, kLanes);
  }
  if (d < head_dim) {
    weigh<kPairs, 1, true>(weights, stride, values + d, ahead, head_dim, count, sums + d, sums_stride,
                           static_cast<int>(head_dim - d));
  }
}

// Scores [0, count) become weights, and what they must be divided by is returned. What lies before `from` or, up to
// the next 16, after the end is no part of the path: its weight is 0.
float weights_from_scores(float* scores, int64_t from, int64_t count, const float* sink) {
  const float nothing = -__builtin_inff();
  const int64_t padded = rounded_up(count);
  for (int64_t i = 0; i < from; ++i) scores[i] = nothing;
  for (int64_t i = count; i < padded; ++i) scores[i] = nothing;

  Lanes highest_lanes = load(scores);
  for (int64_t i = kLanes; i < padded; i += kLanes) highest_lanes = maximum(highest_lanes, load(scores + i));
  float highest = maximum_of_lanes(highest_lanes);
  if (sink != nullptr && *sink > highest) highest = *sink;

  const Lanes shift = broadcast(highest);
  Lanes sums = broadcast(0.0f);
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Lanes weights = exponential(load(scores + i) - shift);
    store(scores + i, weights);
    sums = sums + weights;
  }
  const float sum = sum_of_lanes(sums);
  return sink == nullptr ? sum : sum + first_lane(exponential(broadcast(*sink - highest)));
}

// Up to kGroup pairs of a task: consecutive rows with the task's heads, or some heads of one row.
template <class Cache>
class Group {
 public:
  void start(const TreeAttentionCall& call, const TreeAttentionTask& task, int64_t first_pair, int64_t first_logical,
             float* queries, float* scores, int64_t stride, float* sums) {
    call_ = &call;
    task_ = &task;
    first_pair_ = first_pair;
    pairs_ = static_cast<int>(least(kGroup, task.rows * task.heads - first_pair));
    base_ = first_logical;
    queries_ = queries;
    scores_ = scores;
    stride_ = stride;
    sums_ = sums;
    sums_stride_ = rounded_up(call.head_dim);
    const int64_t key_head = task.slot * call.kv_heads + task.kv_head;
    keys_ = static_cast<const Cache*>(call.keys) + key_head * call.capacity * call.head_dim;
    values_ = static_cast<const Cache*>(call.values) + key_head * call.capacity * call.head_dim;
    look_ahead();
    seen_end_ = common_first_ = 0;
    common_end_ = call.capacity;
    for (int pair = 0; pair < pairs_; ++pair) {
      const RowPath& path = path_of(pair);
      const int64_t branch = path.end - path.straight;
      seen_end_ = most(seen_end_, branch ? path.branch[branch - 1] + 1 : path.end);
      common_first_ = most(common_first_, path.first);
      common_end_ = least(common_end_, path.straight);
    }
    common_end_ = most(common_first_, common_end_);
    pack_queries();
  }

  void score_rows(int64_t from, int64_t to) {
    to = least(to, rounded_up(seen_end_));
    if (from >= to) return;
    score_blocks(pairs_, queries_, keys_ + from * call_->head_dim, key_ahead_, call_->head_dim, (to - from) / kLanes,
                 call_->scale, call_->softcap, scores_ + (from - base_), stride_);
  }

  // Puts the scores into logical order, makes them weights, and weighs the values that come before the common ones.
  void normalise() {
    for (int pair = 0; pair < pairs_; ++pair) {
      const RowPath& path = path_of(pair);
      float* scores = scores_ + pair * stride_;
      for (int64_t i = most(path.straight, path.first); i < path.end; ++i) {
        scores[i - base_] = scores[path.branch[i - path.straight] - base_];
      }
      const float* sink = call_->sinks ? call_->sinks + head_of(pair) : nullptr;
      sum_of_weights_[pair] = weights_from_scores(scores, path.first - base_, path.end - base_, sink);
    }
    for (int64_t i = 0; i < pairs_ * sums_stride_; ++i) sums_[i] = 0.0f;
    for (int pair = 0; pair < pairs_; pair += run_of(pair)) {
      const RowPath& path = path_of(pair);
      weigh_straight(pair, path.first, least(common_first_, path.straight));
    }
  }

  void weigh_common(int64_t from, int64_t to) {
    from = most(from, common_first_);
    to = least(to, common_end_);
    if (from >= to) return;
    weigh_values(pairs_, weights(0, from), stride_, value(from), value_ahead_, head_dim(), to - from, sums_,
                 sums_stride_);
  }

  // Weighs the values that come after the common ones, and writes the results.
  void finish() {
    for (int pair = 0; pair < pairs_; pair += run_of(pair)) {
      const RowPath& path = path_of(pair);
      weigh_straight(pair, common_end_, path.straight);
      for (int64_t i = most(path.straight, path.first); i < path.end; ++i) {
        weigh_run(pair, i, path.branch[i - path.straight], 1);
      }
    }
    for (int pair = 0; pair < pairs_; ++pair) write(pair);
  }

 private:
  int64_t head_dim() const { return call_->head_dim; }
  int64_t row_of(int pair) const {
    return task_->slot * call_->new_rows + task_->first_row + (first_pair_ + pair) / task_->heads;
  }
  int64_t head_of(int pair) const { return task_->first_head + (first_pair_ + pair) % task_->heads; }
  const RowPath& path_of(int pair) const { return call_->paths[row_of(pair)]; }
  // Pairs of one row, from this one on.
  int run_of(int pair) const {
    return static_cast<int>(least(pairs_ - pair, task_->heads - (first_pair_ + pair) % task_->heads));
  }
  const float* weights(int pair, int64_t logical) const { return scores_ + pair * stride_ + (logical - base_); }
  const Cache* value(int64_t row) const { return values_ + row * call_->head_dim; }

  // What is near while keys are scored: their values; while values are weighed: the next head's keys. Of a long sequence
  // they would be gone before their time: then the next blocks of keys.
  void look_ahead() {
    const bool stays = task_->seen_rows * head_dim() * int64_t{sizeof(Cache)} <= kNearBytes;
    key_ahead_ = stays ? values_ - keys_ : kBlocksOfPass * kLanes * head_dim();
    value_ahead_ = stays ? keys_ - values_ + call_->capacity * head_dim() : 0;
  }

  // [D][pairs], rotated.
  void pack_queries() {
    float* rotated = sums_;  // not in use yet
    for (int pair = 0; pair < pairs_; ++pair) {
      const int64_t row = row_of(pair);
      const float* query = call_->query + row * call_->query_stride + head_of(pair) * head_dim();
      rotate(query, rotated, head_dim(), call_->cosines + row * call_->half, call_->sines + row * call_->half,
             call_->half, call_->interleaved);
      for (int64_t d = 0; d < head_dim(); ++d) queries_[d * pairs_ + pair] = rotated[d];
    }
  }

  void weigh_straight(int pair, int64_t from, int64_t to) {
    if (from < to) weigh_run(pair, from, from, to - from);
  }

  // `count` values from the buffer's `row` on, with the weights from `logical` on, for the pairs of one row.
  void weigh_run(int pair, int64_t logical, int64_t row, int64_t count) {
    weigh_values(run_of(pair), weights(pair, logical), stride_, value(row), 0, head_dim(), count,
                 sums_ + pair * sums_stride_, sums_stride_);
  }

  void write(int pair) {
    float* out = call_->out + (row_of(pair) * call_->query_heads + head_of(pair)) * head_dim();
    const Lanes sum = broadcast(sum_of_weights_[pair]);
    for (int64_t d = 0; d < head_dim(); d += kLanes) {
      const Lanes result = load(sums_ + pair * sums_stride_ + d) / sum;
      store_first(out + d, result, static_cast<int>(least(kLanes, head_dim() - d)));
    }
  }

  const TreeAttentionCall* call_;
  const TreeAttentionTask* task_;
  int64_t first_pair_;
  int pairs_;
  int64_t base_;      // logical index of scores_[0], a multiple of 16
  float* queries_;    // [D, pairs]
  float* scores_;     // [pairs, stride]; weights after normalise()
  int64_t stride_;
  float* sums_;       // [pairs, D rounded up to 16]
  int64_t sums_stride_;
  const Cache* keys_;
  const Cache* values_;
  int64_t key_ahead_, value_ahead_;
  int64_t seen_end_;
  int64_t common_first_, common_end_;  // logical: the straight rows that every pair sees
  float sum_of_weights_[kGroup];
};

template <class Cache>
void attend_over(const TreeAttentionCall& call, const TreeAttentionTask& task, float* scratch) {
  const RowPath* paths = call.paths + task.slot * call.new_rows + task.first_row;
  int64_t first = paths[0].first;
  for (int64_t row = 1; row < task.rows; ++row) first = least(first, paths[row].first);
  first -= first % kLanes;

  const int64_t pairs = task.rows * task.heads;
  const int64_t stride = tree_attention_stride(task.seen_rows - first);
  float* const scores = scratch;
  float* const sums = scores + pairs * stride;
  float* const queries = sums + pairs * rounded_up(call.head_dim);
  Group<Cache> groups[kTreeAttentionPairs];
  int count = 0;
  for (int64_t pair = 0; pair < pairs; pair += kGroup) {
    groups[count++].start(call, task, pair, first, queries + pair * call.head_dim, scores + pair * stride, stride,
                          sums + pair * rounded_up(call.head_dim));
  }

  for (int64_t row = first; row < task.seen_rows; row += kBlocksOfPass * kLanes) {
    for (int group = 0; group < count; ++group) groups[group].score_rows(row, row + kBlocksOfPass * kLanes);
  }
  for (int group = 0; group < count; ++group) groups[group].normalise();
  for (int64_t row = first; row < task.seen_rows; row += kValuesOfPass) {
    for (int group = 0; group < count; ++group) groups[group].weigh_common(row, row + kValuesOfPass);
  }
  for (int group = 0; group < count; ++group) groups[group].finish();
}

void attend(const TreeAttentionCall& call, const TreeAttentionTask& task, float* scratch) {
  call.bf16 ? attend_over<Bf16>(call, task, scratch) : attend_over<float>(call, task, scratch);
}

}  // namespace
}  // namespace eagle
