// One task of a TreeAttention call, as each instruction set runs it.
#pragma once

#include <cstdint>

namespace eagle {

// What a new row sees. *Logical* indices count the rows seen from the start of the sequence, whether or not a window
// hides them; up to `straight` they are the rows of the buffer.
struct RowPath {
  int64_t first;          // logical: the first row in the window
  int64_t straight;       // logical: the end of what lies in the buffer as it is seen
  int64_t end;            // logical: the end of the path
  const int32_t* branch;  // buffer rows of the logical indices from `straight` to `end`
};

// The shapes are those of the op: B slots, Q new rows, Hq query heads, Hkv key heads, C rows of D numbers.
struct TreeAttentionCall {
  const float* query;  // [B, Q, query_stride], of which the first Hq * D are the queries
  int64_t query_stride;
  const float* cosines;  // [B, Q, half]; null: no rotation
  const float* sines;
  int64_t half;
  bool interleaved;
  const void* keys;     // [B, Hkv, C/16, D, 16]
  const void* values;   // [B, Hkv, C, D]
  bool bf16;            // the type of keys and values: Bf16, or float
  const float* sinks;   // [Hq]; null: none
  const RowPath* paths;  // [B, Q]
  float* out;           // [B, Q, Hq*D]
  int64_t new_rows, query_heads, kv_heads, capacity, head_dim;
  float scale, softcap;
};

// Some query heads of one key head, over some new rows of one slot.
struct TreeAttentionTask {
  int64_t slot, kv_head;
  int64_t first_head, heads;  // of the query heads
  int64_t first_row, rows;
  int64_t seen_rows;  // the end of the buffer's rows that any of the new rows sees
};

// The most pairs (rows times heads) of a task.
constexpr int kTreeAttentionPairs = 24;

namespace {

// Floats from one pair's scores to the next: an odd number of cache lines, so that they share no set of the cache.
inline int64_t tree_attention_stride(int64_t rows) { return ((rows + 15) / 16 * 16) | 16; }

// Floats of scratch, aligned to 64 bytes, that a task needs.
inline int64_t tree_attention_scratch(const TreeAttentionTask& task, int64_t head_dim) {
  return task.rows * task.heads * (tree_attention_stride(task.seen_rows) + 2 * ((head_dim + 15) / 16 * 16));
}

}  // namespace

using TreeAttentionKernel = void (*)(const TreeAttentionCall&, const TreeAttentionTask&, float* scratch);

void tree_attention_portable(const TreeAttentionCall&, const TreeAttentionTask&, float* scratch);
#if defined(__x86_64__)
void tree_attention_avx2(const TreeAttentionCall&, const TreeAttentionTask&, float* scratch);
void tree_attention_avx512(const TreeAttentionCall&, const TreeAttentionTask&, float* scratch);
#endif

}  // namespace eagle
