// One row of a TopLogprobs call, as each instruction set runs it.
#pragma once

#include <cstdint>

namespace eagle {

// The `wanted` largest of a row, best first, a tie to the lower index; wanted <= columns.
struct TopLogprobsRow {
  const float* logits;  // [columns]
  int64_t columns, wanted;
  int64_t* indices;  // [wanted]
  float* logprobs;   // [wanted] the logits less the highest one
  float sum;         // of e^(logit - highest one) over the row: 1 or more; NaN where a logit is, or the highest is infinite
};

using TopLogprobsKernel = void (*)(TopLogprobsRow&);

void top_logprobs_portable(TopLogprobsRow& row);
#if defined(__x86_64__)
void top_logprobs_avx2(TopLogprobsRow& row);
void top_logprobs_avx512(TopLogprobsRow& row);
#endif

}  // namespace eagle
