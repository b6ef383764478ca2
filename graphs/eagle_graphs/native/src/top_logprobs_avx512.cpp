#if defined(__x86_64__)

#include <immintrin.h>

#include "target.h"
#include "top_logprobs_kernel.h"

EAGLE_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl")
#include "lanes_avx512.h"
#include "lanes_math.h"
#include "top_logprobs_lanes.h"

void eagle::top_logprobs_avx512(TopLogprobsRow& row) { top_logprobs(row); }
EAGLE_TARGET_END

#endif
