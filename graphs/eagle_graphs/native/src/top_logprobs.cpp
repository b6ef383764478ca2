#include "top_logprobs.h"

#include <cmath>

namespace eagle {
namespace {

// Fewer logits are read sooner than threads start.
constexpr int64_t kLogitsWorthThreads = 1 << 15;

TopLogprobsKernel kernel_of(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return top_logprobs_avx512;
  if (isa == Isa::kAvx2) return top_logprobs_avx2;
#endif
  static_cast<void>(isa);
  return top_logprobs_portable;
}

}  // namespace

TopLogprobs::TopLogprobs(const Attributes& attributes)
    : kernel_(kernel_of(attributes.isa)), wanted_(attributes.integer("k")) {
  require(wanted_ > 0, "k is ", wanted_, ", expected more than 0");
}

void TopLogprobs::compute(const Context& context) const {
  const auto logits = context.input<float>(0, "logits");
  const auto table = context.input<int64_t>(1, "table");
  logits.expect_rank(2);
  const int64_t rows = logits.shape[0], columns = logits.shape[1];
  require(wanted_ <= columns, "k is ", wanted_, ", but a row has ", columns, " logits");
  if (table.given) table.expect_shape({columns});

  int64_t* ids = context.output<int64_t>(0, {rows, wanted_});
  float* logprobs = context.output<float>(1, {rows, wanted_});
  const auto run_row = [&](size_t index) {
    TopLogprobsRow row{};
    row.logits = logits.data + static_cast<int64_t>(index) * columns;
    row.columns = columns;
    row.wanted = wanted_;
    row.indices = ids + static_cast<int64_t>(index) * wanted_;
    row.logprobs = logprobs + static_cast<int64_t>(index) * wanted_;
    kernel_(row);
    const float log_sum = std::log(row.sum);
    for (int64_t i = 0; i < wanted_; ++i) {
      row.logprobs[i] -= log_sum;
      if (table.given) row.indices[i] = table.data[row.indices[i]];
    }
  };
  if (rows > 1 && rows * columns >= kLogitsWorthThreads) {
    context.parallel_for(static_cast<size_t>(rows), run_row);
  } else {
    for (int64_t row = 0; row < rows; ++row) run_row(static_cast<size_t>(row));
  }
}

}  // namespace eagle
