#include "quant_linear.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>

#include "quant_order.h"
#include "scratch.h"
#include "shared_range.h"

namespace eagle {
namespace {

constexpr int64_t kBlock = 16;  // columns of a block of the weight
// The most of K under one scale: 255 * 128 times as much is still an int32.
constexpr int64_t kMaxDepth = 65792;
// What a thread takes of the weight at a time: short enough that all end together.
constexpr int64_t kChunkBytes = 32 << 10;

const QuantLinearKernel& kernel_of(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return kQuantLinearAvx512;
  if (isa == Isa::kAvx2) return kQuantLinearAvx2;
#endif
  static_cast<void>(isa);
  return kQuantLinearPortable;
}

Prologue prologue_of(const std::string& name) {
  if (name == "none") return Prologue::kNone;
  if (name == "rms_norm") return Prologue::kRmsNorm;
  if (name == "silu_mul") return Prologue::kSiluMul;
  if (name == "gelu_tanh_mul") return Prologue::kGeluTanhMul;
  throw Error("prologue is '", name, "', expected none, rms_norm, silu_mul or gelu_tanh_mul");
}

int64_t round_up(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }

// `bytes` of scratch that the calling thread keeps: fresh memory at every call would cost more than a small layer.
char* kept_scratch(size_t bytes) {
  thread_local std::unique_ptr<Scratch> kept;
  thread_local size_t size = 0;
  if (bytes > size) {
    size = 0;
    kept.reset();
    kept = std::make_unique<Scratch>(bytes);
    size = bytes;
  }
  return kept ? kept->as<char>() : nullptr;
}

// The thread that has the last row may have been put aside, so a long wait lets others run.
void wait_for(const std::atomic<int64_t>& counter, int64_t value) {
  for (int turn = 0; counter.load(std::memory_order_acquire) < value; ++turn) {
    if (turn > 1000) std::this_thread::yield();
  }
}

}  // namespace

QuantLinear::QuantLinear(const Attributes& attributes)
    : kernel_(kernel_of(attributes.isa)),
      columns_(attributes.integer("N")),
      depth_(attributes.integer("K")),
      padded_depth_(round_up(depth_, 64)),
      wide_(attributes.integer("wide", 0)),
      prologue_(prologue_of(attributes.text("prologue", "none"))),
      epsilon_(prologue_ == Prologue::kRmsNorm ? attributes.number("epsilon") : 0.0f) {
  require(columns_ > 0 && depth_ > 0, "N is ", columns_, " and K ", depth_, ", expected more than 0");
  require(wide_ >= 0 && wide_ <= padded_depth_ && wide_ % 64 == 0, "wide is ", wide_,
          ", expected a multiple of 64 that is not above K ", depth_);
  require(padded_depth_ <= kMaxDepth, "K is ", depth_, ", expected at most ", kMaxDepth);
}

QuantLinearCall QuantLinear::checked_call(const Context& context) const {
  const auto x = context.input<float>(0, "x");
  const auto weight = context.input<uint8_t>(1, "weight");
  const auto weight_scale = context.input<float>(2, "weight_scale");
  const auto bias = context.input<float>(3, "bias");
  const auto residual = context.input<float>(4, "residual");
  const auto norm_weight = context.input<float>(5, "norm_weight");
  const auto order = context.input<int32_t>(6, "order");

  const bool halves = prologue_ == Prologue::kSiluMul || prologue_ == Prologue::kGeluTanhMul;
  const int64_t width = halves ? 2 * depth_ : depth_;
  if (x.shape.rank() == 0 || x.shape[x.shape.rank() - 1] != width) {
    throw Error("x has the shape ", x.shape.text(), ", expected ", width, " as the last dimension");
  }
  weight.expect_shape({round_up(columns_, kBlock) / kBlock, padded_depth_ / 4, kBlock, 4});
  weight_scale.expect_shape({columns_});
  const Shape out = x.shape.with_last(columns_);
  if (bias.given) bias.expect_shape({columns_});
  if (residual.given) residual.expect_shape(out);
  if (prologue_ == Prologue::kRmsNorm) {
    require(norm_weight.given, "norm_weight is missing, but the prologue is rms_norm");
    norm_weight.expect_shape({depth_});
  } else {
    require(!norm_weight.given, "norm_weight is given, but the prologue is not rms_norm");
  }

  QuantLinearCall call{};
  call.x = x.data;
  call.weight = weight.data;
  call.weight_scale = weight_scale.data;
  call.bias = bias.given ? bias.data : nullptr;
  call.residual = residual.given ? residual.data : nullptr;
  call.norm_weight = norm_weight.data;
  call.order = checked_order(order, depth_);
  call.y = context.output<float>(0, out);
  call.rows = out.elements() / columns_;
  require(call.rows <= UINT32_MAX, "x has ", call.rows, " rows, expected at most ", UINT32_MAX);
  call.columns = columns_;
  call.depth = depth_;
  call.padded_depth = padded_depth_;
  call.wide = wide_;
  call.prologue = prologue_;
  call.epsilon = epsilon_;
  return call;
}

void QuantLinear::compute(const Context& context) const {
  const QuantLinearCall call = checked_call(context);
  if (call.rows > 0) run(context, call);
}

// One start of the threads for both steps: each takes rows until all are quantized, then chunks of columns.
void QuantLinear::run(const Context& context, QuantLinearCall call) const {
  const int64_t blocks = round_up(columns_, kBlock) / kBlock;
  const int64_t chunks = std::clamp<int64_t>(blocks * kBlock * padded_depth_ / kChunkBytes, 1, blocks);
  static const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const size_t workers = std::min({cores, static_cast<size_t>(chunks), SharedRange::kMaxWorkers});

  const int64_t values_bytes = call.rows * (padded_depth_ + wide_) * kernel_.value_bytes;
  const int64_t numbers = 2 * padded_depth_;  // floats of a worker
  char* scratch = kept_scratch(values_bytes + (static_cast<int64_t>(workers) * numbers + 5 * call.rows) * sizeof(float));
  call.values = scratch;
  float* all_numbers = reinterpret_cast<float*>(scratch + values_bytes);
  call.scales = all_numbers + static_cast<int64_t>(workers) * numbers;
  call.offsets = reinterpret_cast<int32_t*>(call.scales + 2 * call.rows);

  SharedRange rows_left(workers, static_cast<uint32_t>(call.rows));
  SharedRange chunks_left(workers, static_cast<uint32_t>(chunks));
  std::atomic<int64_t> quantized{0};
  context.parallel_for(workers, [&](size_t worker) {
    float* own = all_numbers + static_cast<int64_t>(worker) * numbers;
    int64_t done = 0;
    for (uint32_t row; rows_left.take(worker, &row); ++done) kernel_.quantize_row(call, row, own);
    quantized.fetch_add(done, std::memory_order_release);
    wait_for(quantized, call.rows);
    for (uint32_t chunk; chunks_left.take(worker, &chunk);) {
      kernel_.multiply(call, chunk * blocks / chunks, (chunk + 1) * blocks / chunks);
    }
  });
}

}  // namespace eagle
