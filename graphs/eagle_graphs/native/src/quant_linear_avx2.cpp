#if defined(__x86_64__)

#include <immintrin.h>

#include "quant_linear_kernel.h"
#include "target.h"

EAGLE_TARGET_BEGIN("avx2,fma")
#include "lanes_avx2.h"
#include "lanes_math.h"
#include "dot_avx2.h"
#include "quant_linear_lanes.h"
EAGLE_TARGET_END

const eagle::QuantLinearKernel eagle::kQuantLinearAvx2 = {sizeof(Value), quantize_row, multiply};

#endif
