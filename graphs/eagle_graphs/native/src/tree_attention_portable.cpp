#include "lanes_portable.h"
#include "lanes_math.h"
#include "rotary.h"
#include "tree_attention_kernel.h"
#include "tree_attention_lanes.h"

void eagle::tree_attention_portable(const TreeAttentionCall& call, const TreeAttentionTask& task, float* scratch) {
  attend(call, task, scratch);
}
