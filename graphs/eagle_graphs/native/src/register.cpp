// The library's entry point, by the name that ONNX Runtime looks for.

#include "cpu.h"
#include "op.h"
#include "ort_abi.h"
#include "quant_embedding.h"
#include "quant_linear.h"
#include "top_logprobs.h"
#include "tree_attention.h"

namespace eagle {
namespace {

constexpr const char* kDomain = "eagle.cpu";

// The ops of one instruction set. ONNX Runtime keeps pointers to them while a session lives.
class Domain {
 public:
  Domain(const Ort& ort, Isa isa)
      : tree_attention_(isa),
        tree_attention_bf16_(isa),
        quant_linear_(isa),
        quant_embedding_(isa),
        top_logprobs_(isa) {
    check(ort, ort.create_custom_op_domain(kDomain, &handle));
    check(ort, ort.custom_op_domain_add(handle, &tree_attention_));
    check(ort, ort.custom_op_domain_add(handle, &tree_attention_bf16_));
    check(ort, ort.custom_op_domain_add(handle, &quant_linear_));
    check(ort, ort.custom_op_domain_add(handle, &quant_embedding_));
    check(ort, ort.custom_op_domain_add(handle, &top_logprobs_));
  }

  OrtCustomOpDomain* handle = nullptr;

 private:
  Op<TreeAttention<float>> tree_attention_;
  Op<TreeAttention<Bf16>> tree_attention_bf16_;
  Op<QuantLinear> quant_linear_;
  Op<QuantEmbedding> quant_embedding_;
  Op<TopLogprobs> top_logprobs_;
};

template <Isa isa>
OrtCustomOpDomain* domain(const Ort& ort) {
  static const Domain domain(ort, isa);
  return domain.handle;
}

void register_ops(const Ort& ort, OrtSessionOptions* options) {
  OrtCustomOpDomain* ops = nullptr;
  switch (isa_from_environment()) {
    case Isa::kPortable: ops = domain<Isa::kPortable>(ort); break;
    case Isa::kAvx2: ops = domain<Isa::kAvx2>(ort); break;
    case Isa::kAvx512: ops = domain<Isa::kAvx512>(ort); break;
  }
  check(ort, ort.add_custom_op_domain(options, ops));
}

}  // namespace
}  // namespace eagle

extern "C" __attribute__((visibility("default"))) eagle::OrtStatus* RegisterCustomOps(
    eagle::OrtSessionOptions* options, const eagle::OrtApiBase* base) {
  using namespace eagle;
  const OrtApi* api = base->GetApi(kOrtApiVersion);
  if (api == nullptr) {
    const Ort first(base->GetApi(1));  // any version makes statuses
    return first.create_status(kOrtFail, "eagle.cpu needs ONNX Runtime 1.17 or later: upgrade onnxruntime");
  }
  const Ort ort(api);
  return status_of(ort, kDomain, [&] { register_ops(ort, options); });
}
