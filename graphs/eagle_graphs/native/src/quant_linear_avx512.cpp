#if defined(__x86_64__)

#include <immintrin.h>

#include "quant_linear_kernel.h"
#include "target.h"

EAGLE_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#include "lanes_avx512.h"
#include "lanes_math.h"
#include "dot_avx512.h"
#include "quant_linear_lanes.h"
EAGLE_TARGET_END

const eagle::QuantLinearKernel eagle::kQuantLinearAvx512 = {sizeof(Value), quantize_row, multiply};

#endif
