#include "quant_linear_kernel.h"

#include "lanes_portable.h"
#include "lanes_math.h"
#include "dot_portable.h"
#include "quant_linear_lanes.h"

const eagle::QuantLinearKernel eagle::kQuantLinearPortable = {sizeof(Value), quantize_row, multiply};
