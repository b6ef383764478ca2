#if defined(__x86_64__)

#include <immintrin.h>

#include "target.h"
#include "tree_attention_kernel.h"

EAGLE_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#include "lanes_avx512.h"
#include "lanes_math.h"
#include "rotary.h"
#include "tree_attention_lanes.h"

void eagle::tree_attention_avx512(const TreeAttentionCall& call, const TreeAttentionTask& task, float* scratch) {
  attend(call, task, scratch);
}
EAGLE_TARGET_END

#endif
