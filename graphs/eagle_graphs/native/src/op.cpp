#include "op.h"

#include <algorithm>

namespace eagle {

Shape::Shape(std::initializer_list<int64_t> sizes) : rank_(sizes.size()) {
  require(rank_ <= kMaxRank, "a tensor has ", rank_, " dimensions, expected at most ", kMaxRank);
  std::copy(sizes.begin(), sizes.end(), sizes_.begin());
}

int64_t Shape::elements() const {
  int64_t product = 1;
  for (size_t axis = 0; axis < rank_; ++axis) product *= sizes_[axis];
  return product;
}

Shape Shape::with_last(int64_t size) const {
  Shape shape = *this;
  shape.sizes_[rank_ - 1] = size;
  return shape;
}

std::string Shape::text() const {
  std::string text = "[";
  for (size_t axis = 0; axis < rank_; ++axis) text += (axis ? ", " : "") + std::to_string(sizes_[axis]);
  return text + "]";
}

void check(const Ort& ort, OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = ort.get_error_message(status);
  ort.release_status(status);
  throw Error(message);
}

bool Attributes::has(const char* name) const {
  float number;
  int64_t integer;
  size_t size = 0;
  OrtStatus* const statuses[] = {ort_.get_attribute_float(info_, name, &number),
                                 ort_.get_attribute_int64(info_, name, &integer),
                                 ort_.get_attribute_string(info_, name, nullptr, &size)};
  bool found = false;
  for (OrtStatus* status : statuses) {
    found |= status == nullptr;
    if (status != nullptr) ort_.release_status(status);
  }
  return found;
}

void Attributes::expect(const char* name, OrtStatus* status) const {
  try {
    check(ort_, status);
  } catch (const Error& error) {
    throw Error("attribute ", name, ": ", error.what());
  }
}

int64_t Attributes::integer(const char* name) const {
  int64_t value = 0;
  expect(name, ort_.get_attribute_int64(info_, name, &value));
  return value;
}

float Attributes::number(const char* name) const {
  float value = 0;
  expect(name, ort_.get_attribute_float(info_, name, &value));
  return value;
}

std::string Attributes::text(const char* name) const {
  size_t size = 0;
  expect(name, ort_.get_attribute_string(info_, name, nullptr, &size));
  std::string value(size, '\0');
  expect(name, ort_.get_attribute_string(info_, name, value.data(), &size));
  value.resize(size - 1);
  return value;
}

bool Context::read_input(size_t index, const char* name, const void** data, Shape* shape) const {
  const OrtValue* value = nullptr;
  check(ort_, ort_.get_input(context_, index, &value));
  if (value == nullptr) return false;

  OrtShapeInfo* info = nullptr;
  check(ort_, ort_.get_shape_info(value, &info));
  OrtStatus* status = ort_.get_dimensions_count(info, &shape->rank_);
  const bool fits = shape->rank_ <= Shape::kMaxRank;
  if (status == nullptr && fits) status = ort_.get_dimensions(info, shape->sizes_.data(), shape->rank_);
  ort_.release_shape_info(info);
  check(ort_, status);
  require(fits, name, " has ", shape->rank_, " dimensions, expected at most ", Shape::kMaxRank);

  void* mutable_data = nullptr;
  check(ort_, ort_.get_tensor_data(const_cast<OrtValue*>(value), &mutable_data));
  *data = mutable_data;
  return true;
}

void* Context::output_data(size_t index, const Shape& shape) const {
  OrtValue* value = nullptr;
  check(ort_, ort_.get_output(context_, index, shape.sizes(), shape.rank(), &value));
  void* data = nullptr;
  check(ort_, ort_.get_tensor_data(value, &data));
  return data;
}

void Context::for_each(size_t total, void (*task)(void*, size_t), void* data) const {
  check(ort_, ort_.parallel_for(context_, task, total, 0, data));
}

}  // namespace eagle
