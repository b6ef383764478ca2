#include "tree_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "rotary.h"
#include "scratch.h"

namespace eagle {
namespace {

constexpr int64_t kBlock = 16;  // keys of a block
// Fewer tasks would leave threads waiting for the last one.
constexpr int64_t kWantedTasks = 6;
// The most scores of a task that has more than one row.
constexpr int64_t kScoreBytes = 4 << 20;
// Fewer new rows are appended sooner than threads start.
constexpr int64_t kRowsWorthThreads = 64;

TreeAttentionKernel kernel_of(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return tree_attention_avx512;
  if (isa == Isa::kAvx2) return tree_attention_avx2;
#endif
  static_cast<void>(isa);
  return tree_attention_portable;
}

// Adds the buffer's rows of the set places in mask[from, to), the mask's first place being the row `length`.
void append_visible(const bool* mask, int64_t from, int64_t to, int64_t length, std::vector<int32_t>* rows) {
  for (int64_t j = from; j < to; ++j) {
    uint64_t eight = 1;
    if (j + 8 <= to) std::memcpy(&eight, mask + j, 8);
    if (eight == 0) {
      j += 7;  // most of a prompt's mask
    } else if (mask[j]) {
      rows->push_back(static_cast<int32_t>(length + j));
    }
  }
}

TreeAttentionPaths paths_from_mask(const bool* mask, const int64_t* lengths, int64_t slots, int64_t new_rows,
                                   int64_t total, int64_t window) {
  TreeAttentionPaths paths;
  std::vector<size_t> starts;
  for (int64_t row = 0; row < slots * new_rows; ++row, mask += total) {
    const int64_t length = lengths[row / new_rows];
    const void* gap = total ? std::memchr(mask, 0, static_cast<size_t>(total)) : nullptr;
    const int64_t chain = gap ? static_cast<const bool*>(gap) - mask : total;
    starts.push_back(paths.branches.size());
    append_visible(mask, chain, total, length, &paths.branches);

    RowPath path{};
    path.straight = length + chain;
    path.end = path.straight + static_cast<int64_t>(paths.branches.size() - starts.back());
    path.first = window ? std::max<int64_t>(0, path.end - window) : 0;
    require(path.end > 0, "row ", row % new_rows, " of slot ", row / new_rows,
            " sees no row: set its own place in tree_mask");
    paths.seen_rows.push_back(path.end == path.straight ? path.end : paths.branches.back() + 1);
    paths.rows.push_back(path);
  }
  for (size_t row = 0; row < paths.rows.size(); ++row) paths.rows[row].branch = paths.branches.data() + starts[row];
  return paths;
}

// Rows of a task: as many as share well what they load, unless that makes too few tasks or too many scores.
int64_t rows_of_task(int64_t heads, int64_t head_tasks, int64_t new_rows, int64_t seen_rows) {
  int64_t rows = std::max<int64_t>(1, kTreeAttentionPairs / heads);
  while (rows > 1 && (head_tasks * ((new_rows + rows - 1) / rows) < kWantedTasks ||
                      rows * heads * seen_rows * int64_t{sizeof(float)} > kScoreBytes)) {
    rows = (rows + 1) / 2;
  }
  return rows;
}

void put(float number, float* to) { *to = number; }

// To the nearest, of two the even one; NaN stays NaN.
void put(float number, Bf16* to) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  const uint32_t rounded = bits + 0x7FFF + (bits >> 16 & 1);
  to->bits = static_cast<uint16_t>((std::isnan(number) ? bits | 0x400000 : rounded) >> 16);
}

}  // namespace

template <class Cache>
struct TreeAttention<Cache>::Inputs {
  Tensor<float> query, key, value;
  Tensor<Cache> past_key, past_value;
  Tensor<bool> tree_mask;
  Tensor<int64_t> kv_length;
  Tensor<float> cosines, sines, sinks;
  int64_t slots, new_rows, total, capacity, head_dim;

  bool packed() const { return !key.given; }
  int64_t half() const { return cosines.given ? cosines.shape[2] : 0; }
};

template <class Cache>
TreeAttention<Cache>::TreeAttention(const Attributes& attributes)
    : kernel_(kernel_of(attributes.isa)),
      heads_(attributes.integer("num_heads")),
      kv_heads_(attributes.integer("kv_num_heads")),
      window_(attributes.integer("sliding_window", 0)),
      scale_(attributes.number("scale")),
      softcap_(attributes.number("softcap", 0.0f)),
      interleaved_(attributes.integer("interleaved", 0) != 0) {
  require(kv_heads_ > 0 && heads_ > 0 && heads_ % kv_heads_ == 0, "num_heads ", heads_,
          " is no multiple of kv_num_heads ", kv_heads_);
  require(window_ >= 0, "sliding_window is ", window_, ", expected 0 for none or a number of rows");
  require(std::isfinite(softcap_) && softcap_ >= 0, "softcap is ", softcap_, ", expected 0 for none or more");
}

template <class Cache>
typename TreeAttention<Cache>::Inputs TreeAttention<Cache>::checked_inputs(const Context& context) const {
  Inputs in{context.input<float>(0, "query"),
            context.input<float>(1, "key"),
            context.input<float>(2, "value"),
            context.input<Cache>(3, "past_key"),
            context.input<Cache>(4, "past_value"),
            context.input<bool>(5, "tree_mask"),
            context.input<int64_t>(6, "kv_length"),
            context.input<float>(7, "cos"),
            context.input<float>(8, "sin"),
            context.input<float>(9, "sinks"),
            0, 0, 0, 0, 0};
  in.past_value.expect_rank(4);
  in.tree_mask.expect_rank(3);
  in.slots = in.tree_mask.shape[0];
  in.new_rows = in.tree_mask.shape[1];
  in.total = in.tree_mask.shape[2];
  in.capacity = in.past_value.shape[2];
  in.head_dim = in.past_value.shape[3];
  require(in.head_dim > 0, "past_value has rows of no numbers");
  require(in.capacity % kBlock == 0, "the cache has ", in.capacity, " rows, expected a multiple of ", kBlock);
  require(in.total >= in.new_rows, "tree_mask has ", in.total, " columns, expected at least its ", in.new_rows,
          " rows");
  in.past_value.expect_shape({in.slots, kv_heads_, in.capacity, in.head_dim});
  in.past_key.expect_shape({in.slots, kv_heads_, in.capacity / kBlock, in.head_dim, kBlock});

  require(in.key.given == in.value.given, "key and value are given together, or not at all");
  const int64_t query_width = heads_ * in.head_dim;
  const int64_t key_width = kv_heads_ * in.head_dim;
  in.query.expect_shape({in.slots, in.new_rows, in.packed() ? query_width + 2 * key_width : query_width});
  if (!in.packed()) {
    in.key.expect_shape({in.slots, in.new_rows, key_width});
    in.value.expect_shape({in.slots, in.new_rows, key_width});
  }

  require(in.cosines.given == in.sines.given, "cos and sin are given together, or not at all");
  if (in.cosines.given) {
    in.cosines.expect_rank(3);
    require(2 * in.half() <= in.head_dim, "cos has ", in.half(), " columns, expected at most half of the head's ",
            in.head_dim);
    in.cosines.expect_shape({in.slots, in.new_rows, in.half()});
    in.sines.expect_shape({in.slots, in.new_rows, in.half()});
  }
  if (in.sinks.given) in.sinks.expect_shape({heads_});

  in.kv_length.expect_shape({in.slots});
  for (int64_t slot = 0; slot < in.slots; ++slot) {
    const int64_t length = in.kv_length.data[slot];
    require(length >= 0 && length <= in.capacity - in.total, "slot ", slot, " has ", length, " committed rows and ",
            in.total, " more, but the cache holds ", in.capacity, ": use a longer cache");
  }
  return in;
}

template <class Cache>
void TreeAttention<Cache>::compute(const Context& context) const {
  const Inputs in = checked_inputs(context);
  const TreeAttentionPaths paths =
      paths_from_mask(in.tree_mask.data, in.kv_length.data, in.slots, in.new_rows, in.total, window_);

  float* out = context.output<float>(0, {in.slots, in.new_rows, heads_ * in.head_dim});
  Cache* keys = context.output<Cache>(1, in.past_key.shape);
  Cache* values = context.output<Cache>(2, in.past_value.shape);
  if (keys != in.past_key.data) std::copy_n(in.past_key.data, in.past_key.shape.elements(), keys);
  if (values != in.past_value.data) std::copy_n(in.past_value.data, in.past_value.shape.elements(), values);

  append_rows(context, in, keys, values);

  TreeAttentionCall call{};
  call.query = in.query.data;
  call.query_stride = in.query.shape[2];
  call.cosines = in.cosines.data;
  call.sines = in.sines.data;
  call.half = in.half();
  call.interleaved = interleaved_;
  call.keys = keys;
  call.values = values;
  call.bf16 = kCache == kOrtBf16;
  call.sinks = in.sinks.given ? in.sinks.data : nullptr;
  call.paths = paths.rows.data();
  call.out = out;
  call.new_rows = in.new_rows;
  call.query_heads = heads_;
  call.kv_heads = kv_heads_;
  call.capacity = in.capacity;
  call.head_dim = in.head_dim;
  call.scale = scale_;
  call.softcap = softcap_;
  const std::vector<TreeAttentionTask> tasks = cut(in, paths);
  context.parallel_for(tasks.size(), [&](size_t index) {
    Scratch scratch(tree_attention_scratch(tasks[index], in.head_dim) * sizeof(float));
    kernel_(call, tasks[index], scratch.as<float>());
  });
}

// Rotates the new keys and writes them and the new values where they belong in the cache.
template <class Cache>
void TreeAttention<Cache>::append_rows(const Context& context, const Inputs& in, Cache* keys, Cache* values) const {
  const int64_t head_dim = in.head_dim;
  const int64_t stride = in.packed() ? in.query.shape[2] : kv_heads_ * head_dim;
  const float* new_keys = in.packed() ? in.query.data + heads_ * head_dim : in.key.data;
  const float* new_values = in.packed() ? new_keys + kv_heads_ * head_dim : in.value.data;
  const auto append_head = [&](size_t index) {
    const int64_t slot = static_cast<int64_t>(index) / kv_heads_;
    const int64_t head = static_cast<int64_t>(index) % kv_heads_;
    const int64_t cache = static_cast<int64_t>(index) * in.capacity * head_dim;
    std::vector<float> rotated(head_dim);
    for (int64_t i = 0; i < in.new_rows; ++i) {
      const int64_t row = slot * in.new_rows + i;
      const int64_t place = in.kv_length.data[slot] + in.total - in.new_rows + i;
      rotate(new_keys + row * stride + head * head_dim, rotated.data(), head_dim, in.cosines.data + row * in.half(),
             in.sines.data + row * in.half(), in.half(), interleaved_);
      Cache* key = keys + cache + place / kBlock * kBlock * head_dim + place % kBlock;
      const float* new_value = new_values + row * stride + head * head_dim;
      for (int64_t d = 0; d < head_dim; ++d) {
        put(rotated[d], key + d * kBlock);
        put(new_value[d], values + cache + place * head_dim + d);
      }
    }
  };
  const size_t heads = static_cast<size_t>(in.slots * kv_heads_);
  if (in.slots * in.new_rows >= kRowsWorthThreads) {
    context.parallel_for(heads, append_head);
  } else {
    for (size_t index = 0; index < heads; ++index) append_head(index);
  }
}

template <class Cache>
std::vector<TreeAttentionTask> TreeAttention<Cache>::cut(const Inputs& in, const TreeAttentionPaths& paths) const {
  const int64_t group = heads_ / kv_heads_;
  const int64_t parts = (group + kTreeAttentionPairs - 1) / kTreeAttentionPairs;
  const int64_t heads = (group + parts - 1) / parts;
  if (paths.seen_rows.empty()) return {};
  const int64_t most_seen = *std::max_element(paths.seen_rows.begin(), paths.seen_rows.end());
  const int64_t rows = rows_of_task(heads, in.slots * kv_heads_ * parts, in.new_rows, most_seen);
  std::vector<TreeAttentionTask> tasks;
  for (int64_t slot = 0; slot < in.slots; ++slot) {
    for (int64_t kv_head = 0; kv_head < kv_heads_; ++kv_head) {
      for (int64_t head = 0; head < group; head += heads) {
        for (int64_t row = 0; row < in.new_rows; row += rows) {
          TreeAttentionTask task{};
          task.slot = slot;
          task.kv_head = kv_head;
          task.first_head = kv_head * group + head;
          task.heads = std::min(heads, group - head);
          task.first_row = row;
          task.rows = std::min(rows, in.new_rows - row);
          const auto seen = paths.seen_rows.begin() + slot * in.new_rows + row;
          task.seen_rows = *std::max_element(seen, seen + task.rows);
          tasks.push_back(task);
        }
      }
    }
  }
  return tasks;
}

template class TreeAttention<float>;
template class TreeAttention<Bf16>;

}  // namespace eagle
