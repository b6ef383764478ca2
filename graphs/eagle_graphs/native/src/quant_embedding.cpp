#include "quant_embedding.h"

#include "quant_order.h"

namespace eagle {

QuantEmbedding::QuantEmbedding(const Attributes& attributes)
    : rows_(attributes.integer("N")), depth_(attributes.integer("K")) {
  require(rows_ > 0 && depth_ > 0, "N is ", rows_, " and K ", depth_, ", expected more than 0");
}

void QuantEmbedding::compute(const Context& context) const {
  const auto ids = context.input<int64_t>(0, "ids");
  const auto weight = context.input<uint8_t>(1, "weight");
  const auto weight_scale = context.input<float>(2, "weight_scale");
  const int32_t* order = checked_order(context.input<int32_t>(3, "order"), depth_);
  const int64_t steps = (depth_ + 63) / 64 * 16;
  ids.expect_rank(2);
  weight.expect_shape({(rows_ + 15) / 16, steps, 16, 4});
  weight_scale.expect_shape({rows_});

  float* y = context.output<float>(0, {ids.shape[0], ids.shape[1], depth_});
  for (int64_t i = 0; i < ids.shape.elements(); ++i, y += depth_) {
    const int64_t id = ids.data[i];
    require(id >= 0 && id < rows_, "id ", id, " is not in the vocabulary of ", rows_);
    const uint8_t* row = weight.data + id / 16 * steps * 64 + id % 16 * 4;
    const float scale = weight_scale.data[id];
    for (int64_t k = 0; k < depth_; ++k) {
      y[order ? order[k] : k] = static_cast<float>(row[k / 4 * 64 + k % 4] - 128) * scale;
    }
  }
}

}  // namespace eagle
