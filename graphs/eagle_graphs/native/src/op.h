// How an op is written: a class with its ports, a constructor that reads the attributes, and compute().
//
//     struct Double {
//       static constexpr const char* kName = "Double";
//       static constexpr Port kInputs[] = {{kOrtFloat}};
//       static constexpr Port kOutputs[] = {{kOrtFloat}};
//       explicit Double(const Attributes& attributes);
//       void compute(Context& context) const;
//     };
//     static Op<Double> op(isa);
//
// Both may throw: what they throw becomes an error status that begins with the op's name.
//
// Sources of one instruction set must not include this header: an inline function compiled there could be the copy
// that the linker keeps for all.
#pragma once

#include <array>
#include <exception>
#include <initializer_list>
#include <iterator>
#include <mutex>
#include <new>
#include <string>

#include "cpu.h"
#include "error.h"
#include "ort_abi.h"

namespace eagle {

struct Port {
  OrtElementType type;
  OrtCharacteristic characteristic = kOrtRequired;
};

// Up to 6 dimensions.
class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<int64_t> sizes);

  size_t rank() const { return rank_; }
  int64_t operator[](size_t axis) const { return sizes_[axis]; }
  const int64_t* sizes() const { return sizes_.data(); }
  int64_t elements() const;
  Shape with_last(int64_t size) const;  // another size of the last dimension
  std::string text() const;  // [1, 2, 3]
  bool operator==(const Shape& other) const { return rank_ == other.rank_ && sizes_ == other.sizes_; }

 private:
  friend class Context;
  static constexpr size_t kMaxRank = 6;
  size_t rank_ = 0;
  std::array<int64_t, kMaxRank> sizes_{};
};

// An input.
template <class Element>
struct Tensor {
  const char* name = nullptr;
  bool given = false;  // an optional one may not be
  const Element* data = nullptr;
  Shape shape;

  void expect_rank(size_t rank) const {
    if (shape.rank() != rank) throw Error(name, " has the shape ", shape.text(), ", expected ", rank, " dimensions");
  }
  void expect_shape(const Shape& expected) const {
    if (!(shape == expected)) throw Error(name, " has the shape ", shape.text(), ", expected ", expected.text());
  }
};

// A node's attributes. Each reader throws where the attribute is of another type, or has no default and is missing.
class Attributes {
 public:
  Attributes(const Ort& ort, const OrtKernelInfo* info, Isa isa) : isa(isa), ort_(ort), info_(info) {}

  int64_t integer(const char* name) const;
  int64_t integer(const char* name, int64_t missing) const { return has(name) ? integer(name) : missing; }
  float number(const char* name) const;
  float number(const char* name, float missing) const { return has(name) ? number(name) : missing; }
  std::string text(const char* name) const;
  std::string text(const char* name, const char* missing) const { return has(name) ? text(name) : missing; }

  // Which kernels the op should run.
  const Isa isa;

 private:
  bool has(const char* name) const;
  void expect(const char* name, OrtStatus* status) const;
  const Ort& ort_;
  const OrtKernelInfo* info_;
};

// One call of an op.
class Context {
 public:
  Context(const Ort& ort, OrtKernelContext* context) : ort_(ort), context_(context) {}

  // ONNX Runtime has checked the type when it loaded the graph.
  template <class Element>
  Tensor<Element> input(size_t index, const char* name) const {
    Tensor<Element> tensor;
    tensor.name = name;
    const void* data = nullptr;
    tensor.given = read_input(index, name, &data, &tensor.shape);
    tensor.data = static_cast<const Element*>(data);
    return tensor;
  }
  template <class Element>
  Element* output(size_t index, const Shape& shape) const {
    return static_cast<Element*>(output_data(index, shape));
  }

  // task(index) for every index below `total`, on the session's threads; rethrows what a task threw.
  template <class Task>
  void parallel_for(size_t total, const Task& task) const {
    struct Run {
      const Task& task;
      std::mutex mutex;
      std::exception_ptr failure;
    } run{task, {}, nullptr};
    for_each(
        total,
        [](void* data, size_t index) {
          Run& run = *static_cast<Run*>(data);
          try {
            run.task(index);
          } catch (...) {
            const std::lock_guard<std::mutex> lock(run.mutex);
            run.failure = std::current_exception();
          }
        },
        &run);
    if (run.failure) std::rethrow_exception(run.failure);
  }

 private:
  bool read_input(size_t index, const char* name, const void** data, Shape* shape) const;
  void* output_data(size_t index, const Shape& shape) const;
  void for_each(size_t total, void (*task)(void*, size_t), void* data) const;
  const Ort& ort_;
  OrtKernelContext* context_;
};

// Throws what a status says, and releases it.
void check(const Ort& ort, OrtStatus* status);

// Calls `body` and makes a status of what it throws; the status of success is null.
template <class Body>
OrtStatus* status_of(const Ort& ort, const char* name, const Body& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const std::bad_alloc&) {
    return ort.create_status(kOrtFail, "out of memory");
  } catch (const std::exception& error) {
    try {
      return ort.create_status(kOrtInvalidArgument, (std::string(name) + ": " + error.what()).c_str());
    } catch (...) {
      return ort.create_status(kOrtFail, "out of memory");
    }
  }
}

template <class Kernel>
class Op : public OrtCustomOp {
 public:
  explicit Op(Isa isa) : isa_(isa) {
    GetName = [](const OrtCustomOp*) { return Kernel::kName; };
    GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };  // the CPU's
    GetInputTypeCount = [](const OrtCustomOp*) { return std::size(Kernel::kInputs); };
    GetInputType = [](const OrtCustomOp*, size_t index) { return Kernel::kInputs[index].type; };
    GetInputCharacteristic = [](const OrtCustomOp*, size_t index) { return Kernel::kInputs[index].characteristic; };
    GetInputMemoryType = [](const OrtCustomOp*, size_t) { return kOrtDefaultMemory; };
    GetOutputTypeCount = [](const OrtCustomOp*) { return std::size(Kernel::kOutputs); };
    GetOutputType = [](const OrtCustomOp*, size_t index) { return Kernel::kOutputs[index].type; };
    GetOutputCharacteristic = [](const OrtCustomOp*, size_t index) { return Kernel::kOutputs[index].characteristic; };
    GetVariadicInputMinArity = GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 0; };
    GetVariadicInputHomogeneity = GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
    GetStartVersion = GetEndVersion = [](const OrtCustomOp*) { return 1; };
    CreateKernelV2 = [](const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
      const Ort ort(api);
      return status_of(ort, Kernel::kName, [&] {
        *kernel = new Instance{ort, Kernel(Attributes(ort, info, static_cast<const Op*>(op)->isa_))};
      });
    };
    KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
      const Instance& instance = *static_cast<const Instance*>(kernel);
      return status_of(instance.ort, Kernel::kName, [&] {
        Context call(instance.ort, context);
        instance.kernel.compute(call);
      });
    };
    KernelDestroy = [](void* kernel) { delete static_cast<Instance*>(kernel); };
  }

 private:
  struct Instance {
    Ort ort;
    Kernel kernel;
  };
  Isa isa_;
};

}  // namespace eagle
