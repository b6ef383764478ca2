// Working memory of one task.
#pragma once

#include <cstddef>
#include <new>

namespace eagle {

class Scratch {
 public:
  explicit Scratch(size_t bytes) : data_(::operator new(bytes, kAlignment)) {}
  ~Scratch() { ::operator delete(data_, kAlignment); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  template <class Element>
  Element* as() {
    return static_cast<Element*>(data_);
  }

 private:
  static constexpr std::align_val_t kAlignment{64};  // a cache line
  void* data_;
};

}  // namespace eagle
