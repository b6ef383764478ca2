// The op eagle.cpu::TreeAttention.
//
//     out, present_key, present_value = TreeAttention(query, key?, value?, past_key, past_value, tree_mask, kv_length,
//                                                     cos?, sin?, sinks?)
//
// Defined by eagle_graphs/tree_attention.py, but for layouts and rotary:
//
//     query          [B, Q, Hq*D], or without key and value [B, Q, (Hq + 2*Hkv)*D]: queries, keys, values
//     key, value     [B, Q, Hkv*D]
//     past_key       [B, Hkv, C/16, D, 16]  row r of the cache is lane r % 16 of block r / 16
//     past_value     [B, Hkv, C, D]
//     tree_mask      [B, Q, S] bool
//     kv_length      [B] int64
//     cos, sin       [B, Q, R/2]  rotate the first R numbers of every query's and key's head
//     sinks          [Hq]
//     out            [B, Q, Hq*D]
//     present_*      as past_*; where both are one buffer the new rows are written in place
//
// The caches are float or bfloat16, to which new rows are rounded before any row sees them; all else is float.
#pragma once

#include <vector>

#include "bf16.h"
#include "op.h"
#include "tree_attention_kernel.h"

namespace eagle {

// The paths of all new rows, read from the mask once for all heads.
struct TreeAttentionPaths {
  std::vector<RowPath> rows;       // [B, Q]
  std::vector<int64_t> seen_rows;  // [B, Q] the end of the buffer's rows that each sees
  std::vector<int32_t> branches;   // what `rows` points to
};

template <class Cache>
class TreeAttention {
 public:
  static constexpr const char* kName = "TreeAttention";
  static constexpr OrtElementType kCache = sizeof(Cache) == sizeof(float) ? kOrtFloat : kOrtBf16;
  static constexpr Port kInputs[] = {
      {kOrtFloat},               // query
      {kOrtFloat, kOrtOptional}, // key
      {kOrtFloat, kOrtOptional}, // value
      {kCache},                  // past_key
      {kCache},                  // past_value
      {kOrtBool},                // tree_mask
      {kOrtInt64},               // kv_length
      {kOrtFloat, kOrtOptional}, // cos
      {kOrtFloat, kOrtOptional}, // sin
      {kOrtFloat, kOrtOptional}, // sinks
  };
  static constexpr Port kOutputs[] = {{kOrtFloat}, {kCache}, {kCache}};

  explicit TreeAttention(const Attributes& attributes);
  void compute(const Context& context) const;

 private:
  struct Inputs;
  Inputs checked_inputs(const Context& context) const;
  void append_rows(const Context& context, const Inputs& in, Cache* keys, Cache* values) const;
  std::vector<TreeAttentionTask> cut(const Inputs& in, const TreeAttentionPaths& paths) const;

  TreeAttentionKernel kernel_;
  int64_t heads_, kv_heads_, window_;
  float scale_, softcap_;
  bool interleaved_;
};

extern template class TreeAttention<float>;
extern template class TreeAttention<Bf16>;

}  // namespace eagle
