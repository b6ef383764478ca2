#include "lanes_portable.h"
#include "lanes_math.h"
#include "top_logprobs_kernel.h"
#include "top_logprobs_lanes.h"

void eagle::top_logprobs_portable(TopLogprobsRow& row) { top_logprobs(row); }
