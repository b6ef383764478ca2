// The op TopLogprobs: the best tokens of each row of logits, and their log-probabilities.
//
//     ids, logprobs = TopLogprobs(logits, table?)
//
//     logits    [R, V]
//     table     [V] int64: what to give for each column; left out: its number
//     ids       [R, k] int64, the row's k largest logits, best first, a tie to the lower column
//     logprobs  [R, k] their logarithms of softmax, never above 0; NaN in all of a row with a NaN
//
//     attributes    k
#pragma once

#include "op.h"
#include "top_logprobs_kernel.h"

namespace eagle {

class TopLogprobs {
 public:
  static constexpr const char* kName = "TopLogprobs";
  static constexpr Port kInputs[] = {{kOrtFloat}, {kOrtInt64, kOrtOptional}};
  static constexpr Port kOutputs[] = {{kOrtInt64}, {kOrtFloat}};

  explicit TopLogprobs(const Attributes& attributes);
  void compute(const Context& context) const;

 private:
  TopLogprobsKernel kernel_;
  int64_t wanted_;
};

}  // namespace eagle
