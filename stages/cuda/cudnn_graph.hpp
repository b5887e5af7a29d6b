// Graphs of operations for cuDNN, through the C interface of its backend, which every installation
// of the library has: the C++ front end would be a second package to find, for two graphs.
//
// A graph is described tensor by tensor and operation by operation, then made into a plan: the
// first engine in the order of the library's heuristic (never timed) that computes the same bits
// every time and accepts the graph. Internal to stages/cuda; only with cuDNN. Descriptors are
// owned.
#pragma once

#include <cudnn.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sluice::cuda {

// Owns one backend descriptor. Every call throws Error(kDevice) naming what failed.
class CudnnDescriptor {
 public:
  explicit CudnnDescriptor(cudnnBackendDescriptorType_t type);
  CudnnDescriptor(CudnnDescriptor&& other) noexcept
      : native_(std::exchange(other.native_, nullptr)) {}
  CudnnDescriptor& operator=(CudnnDescriptor&& other) noexcept {
    std::swap(native_, other.native_);
    return *this;
  }
  CudnnDescriptor(const CudnnDescriptor&) = delete;
  CudnnDescriptor& operator=(const CudnnDescriptor&) = delete;
  ~CudnnDescriptor();

  [[nodiscard]] cudnnBackendDescriptor_t native() const { return native_; }
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::int64_t count,
           const void* values);
  template <typename Value>
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, Value value) {
    set(name, type, 1, &value);
  }
  void set(cudnnBackendAttributeName_t name, const CudnnDescriptor& other) {
    set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, other.native_);
  }
  void finalize(std::string_view what);
  // The library's status, instead of an error.
  [[nodiscard]] cudnnStatus_t try_finalize() { return cudnnBackendFinalize(native_); }

 private:
  cudnnBackendDescriptor_t native_ = nullptr;
};

// What a plan is made for: the device of a handle, on which it then runs; or a device that is only
// described (CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, cuDNN 9.8 and newer), to learn without it
// whether the library accepts a graph.
struct CudnnTarget {
  cudnnHandle_t handle = nullptr;
  const CudnnDescriptor* described = nullptr;
};

// A device as the library writes one down.
[[nodiscard]] CudnnDescriptor describe_device(std::string_view json);

// A tensor of a graph; valid in the graph that named it.
struct CudnnTensor {
  std::int64_t id = -1;
};

// Sizes and strides in elements: [samples, heads, rows, columns].
struct CudnnLayout {
  std::array<std::int64_t, 4> sizes = {1, 1, 1, 1};
  std::array<std::int64_t, 4> strides = {1, 1, 1, 1};
  [[nodiscard]] static CudnnLayout dense(std::int64_t samples, std::int64_t heads,
                                         std::int64_t rows, std::int64_t columns);
  [[nodiscard]] CudnnLayout transposed() const;  // rows and columns change places
};

class CudnnPlan {
 public:
  struct Operand {
    CudnnTensor tensor;
    const void* data;  // device memory at a multiple of 16 bytes
  };
  [[nodiscard]] std::size_t workspace_bytes() const { return workspace_bytes_; }
  // Puts the graph on the handle's stream; every tensor in memory needs an operand.
  void run(cudnnHandle_t handle, std::span<const Operand> operands, void* workspace) const;

 private:
  friend class CudnnGraph;
  explicit CudnnPlan(CudnnDescriptor plan) : plan_(std::move(plan)) {}
  CudnnDescriptor plan_;
  std::vector<CudnnDescriptor> parts_;  // what the plan was made of
  std::vector<std::int64_t> scalar_ids_;
  std::deque<float> scalars_;
  std::size_t workspace_bytes_ = 0;
};

class CudnnGraph {
 public:
  // In device memory, at a multiple of 16 bytes.
  CudnnTensor memory(const CudnnLayout& layout, cudnnDataType_t type);
  // Lives within the kernel only.
  CudnnTensor intermediate(const CudnnLayout& layout, cudnnDataType_t type = CUDNN_DATA_FLOAT);
  CudnnTensor scalar(float value);

  // c = a b over the last two dimensions; heads of b are shared where it has fewer. Sums in f32.
  void matmul(CudnnTensor a, CudnnTensor b, CudnnTensor c);
  // y = mode(x, b); a size of 1 is repeated. Computed in `type`.
  void pointwise(cudnnPointwiseMode_t mode, CudnnTensor x, std::optional<CudnnTensor> b,
                 CudnnTensor y, cudnnDataType_t type = CUDNN_DATA_FLOAT);
  // y = where ? x : otherwise
  void select(CudnnTensor x, CudnnTensor otherwise, CudnnTensor where, CudnnTensor y);
  // y = the index along `axis` of each element of x
  void index(CudnnTensor x, std::int64_t axis, CudnnTensor y);
  // Over the dimensions in which y has size 1, or over groups of heads; f32, in a fixed order.
  void reduce(cudnnReduceTensorOp_t operation, CudnnTensor x, CudnnTensor y);
  // y has x's elements under its own sizes and strides.
  void reshape(CudnnTensor x, CudnnTensor y);

  // The engines that accept the graph and compute the same bits every time, configured, in the
  // order of the library's heuristic. Once per graph.
  [[nodiscard]] std::vector<CudnnDescriptor> candidates(const CudnnTarget& target);
  // The first candidate that can be made; empty where none can, and `why` says what the library
  // said. Compiles kernels: up to seconds.
  [[nodiscard]] std::optional<CudnnPlan> plan(const CudnnTarget& target, std::string* why) &&;

 private:
  CudnnTensor add_tensor(const CudnnLayout& layout, cudnnDataType_t type, bool in_memory,
                         bool by_value);
  void add_pointwise(CudnnDescriptor mode, CudnnTensor x, std::optional<CudnnTensor> b,
                     std::optional<CudnnTensor> where, CudnnTensor y);
  void add_operation(CudnnDescriptor operation, std::string_view what);
  [[nodiscard]] const CudnnDescriptor& at(CudnnTensor tensor) const {
    return tensors_[static_cast<std::size_t>(tensor.id - 1)];
  }

  std::vector<CudnnDescriptor> tensors_;  // by id - 1
  std::vector<CudnnDescriptor> parts_;    // what operations refer to
  std::vector<CudnnDescriptor> operations_;
  std::optional<CudnnDescriptor> whole_;  // made by candidates()
  std::vector<std::int64_t> scalar_ids_;
  std::deque<float> scalars_;
};

}  // namespace sluice::cuda
