// The slice of ONNX Runtime's C ABI that these ops use.
//
// No package ships the headers, and the ABI only grows: a function keeps its index in the table of OrtApi, and a
// struct its leading members. So what is used is declared here, at level 17 (ONNX Runtime 1.17). Indices and members
// follow include/onnxruntime/core/session/onnxruntime_c_api.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace eagle {

constexpr uint32_t kOrtApiVersion = 17;

struct OrtStatus;
struct OrtValue;
struct OrtShapeInfo;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtApi;

enum OrtErrorCode : int { kOrtFail = 1, kOrtInvalidArgument = 2 };
enum OrtElementType : int { kOrtFloat = 1, kOrtUint8 = 2, kOrtInt32 = 6, kOrtInt64 = 7, kOrtBool = 9, kOrtBf16 = 16 };
enum OrtCharacteristic : int { kOrtRequired = 0, kOrtOptional = 1 };
enum OrtMemoryType : int { kOrtDefaultMemory = 0 };

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

struct OrtCustomOp {
  uint32_t version = kOrtApiVersion;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*) = nullptr;
  const char* (*GetName)(const OrtCustomOp*) = nullptr;
  const char* (*GetExecutionProviderType)(const OrtCustomOp*) = nullptr;
  OrtElementType (*GetInputType)(const OrtCustomOp*, size_t index) = nullptr;
  size_t (*GetInputTypeCount)(const OrtCustomOp*) = nullptr;
  OrtElementType (*GetOutputType)(const OrtCustomOp*, size_t index) = nullptr;
  size_t (*GetOutputTypeCount)(const OrtCustomOp*) = nullptr;
  void (*KernelCompute)(void* kernel, OrtKernelContext*) = nullptr;
  void (*KernelDestroy)(void* kernel) = nullptr;
  OrtCharacteristic (*GetInputCharacteristic)(const OrtCustomOp*, size_t index) = nullptr;
  OrtCharacteristic (*GetOutputCharacteristic)(const OrtCustomOp*, size_t index) = nullptr;
  OrtMemoryType (*GetInputMemoryType)(const OrtCustomOp*, size_t index) = nullptr;
  int (*GetVariadicInputMinArity)(const OrtCustomOp*) = nullptr;
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*) = nullptr;
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*) = nullptr;
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*) = nullptr;
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void** kernel) = nullptr;
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*) = nullptr;
  OrtStatus* (*InferOutputShape)(const OrtCustomOp*, void* context) = nullptr;
  int (*GetStartVersion)(const OrtCustomOp*) = nullptr;
  int (*GetEndVersion)(const OrtCustomOp*) = nullptr;
};

// The functions, by their index in OrtApi.
class Ort {
 public:
  explicit Ort(const OrtApi* api) : table_(reinterpret_cast<void* const*>(api)) {}

  OrtStatus* create_status(OrtErrorCode code, const char* message) const { return call<OrtStatus*>(0, code, message); }
  const char* get_error_message(const OrtStatus* status) const { return call<const char*>(2, status); }
  void release_status(OrtStatus* status) const { call<void>(93, status); }

  OrtStatus* create_custom_op_domain(const char* name, OrtCustomOpDomain** domain) const {
    return call<OrtStatus*>(26, name, domain);
  }
  OrtStatus* custom_op_domain_add(OrtCustomOpDomain* domain, const OrtCustomOp* op) const {
    return call<OrtStatus*>(27, domain, op);
  }
  OrtStatus* add_custom_op_domain(OrtSessionOptions* options, OrtCustomOpDomain* domain) const {
    return call<OrtStatus*>(28, options, domain);
  }

  OrtStatus* get_tensor_data(OrtValue* value, void** data) const { return call<OrtStatus*>(51, value, data); }
  OrtStatus* get_shape_info(const OrtValue* value, OrtShapeInfo** info) const {
    return call<OrtStatus*>(65, value, info);
  }
  OrtStatus* get_dimensions_count(const OrtShapeInfo* info, size_t* count) const {
    return call<OrtStatus*>(61, info, count);
  }
  OrtStatus* get_dimensions(const OrtShapeInfo* info, int64_t* sizes, size_t count) const {
    return call<OrtStatus*>(62, info, sizes, count);
  }
  void release_shape_info(OrtShapeInfo* info) const { call<void>(99, info); }

  OrtStatus* get_attribute_float(const OrtKernelInfo* info, const char* name, float* value) const {
    return call<OrtStatus*>(85, info, name, value);
  }
  OrtStatus* get_attribute_int64(const OrtKernelInfo* info, const char* name, int64_t* value) const {
    return call<OrtStatus*>(86, info, name, value);
  }
  // `size` counts the terminating zero; with a null `text` only the size is given.
  OrtStatus* get_attribute_string(const OrtKernelInfo* info, const char* name, char* text, size_t* size) const {
    return call<OrtStatus*>(87, info, name, text, size);
  }

  OrtStatus* get_input(const OrtKernelContext* context, size_t index, const OrtValue** value) const {
    return call<OrtStatus*>(90, context, index, value);
  }
  OrtStatus* get_output(OrtKernelContext* context, size_t index, const int64_t* sizes, size_t rank,
                        OrtValue** value) const {
    return call<OrtStatus*>(91, context, index, sizes, rank, value);
  }
  // Batches 0: ONNX Runtime's threads take one index after another.
  OrtStatus* parallel_for(const OrtKernelContext* context, void (*task)(void* data, size_t index), size_t total,
                          size_t batches, void* data) const {
    return call<OrtStatus*>(274, context, task, total, batches, data);
  }

 private:
  template <class Result, class... Arguments>
  Result call(size_t index, Arguments... arguments) const {
    return reinterpret_cast<Result (*)(Arguments...)>(table_[index])(arguments...);
  }

  void* const* table_;
};

}  // namespace eagle
