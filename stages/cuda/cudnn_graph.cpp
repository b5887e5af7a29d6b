#include "stages/cuda/cudnn_graph.hpp"

#include <algorithm>

#include "stages/cuda_context/check.hpp"

namespace sluice::cuda {

namespace {

constexpr std::int64_t kTensorAlignment = 16;

CudnnDescriptor operation_graph(const CudnnTarget& target,
                                std::span<const CudnnDescriptor> operations) {
  std::vector<cudnnBackendDescriptor_t> natives;
  natives.reserve(operations.size());
  for (const CudnnDescriptor& operation : operations) natives.push_back(operation.native());
  CudnnDescriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  if (target.handle != nullptr) {
    graph.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, target.handle);
  }
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
            static_cast<std::int64_t>(natives.size()), natives.data());
  graph.finalize("cudnnBackendFinalize of an operation graph");
  return graph;
}

// The configurations that the library's heuristic names for the graph, best first.
std::vector<CudnnDescriptor> configurations(const CudnnTarget& target,
                                            const CudnnDescriptor& graph) {
  CudnnDescriptor heuristic(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, CUDNN_HEUR_MODE_A);
#if CUDNN_VERSION >= 90800
  if (target.described != nullptr) {
    heuristic.set(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, *target.described);
  }
#endif
  if (heuristic.try_finalize() != CUDNN_STATUS_SUCCESS) return {};
  std::int64_t count = 0;
  check_cudnn(cudnnBackendGetAttribute(heuristic.native(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                       CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &count, nullptr),
              "cudnnBackendGetAttribute of a heuristic's results");
  std::vector<CudnnDescriptor> found;
  std::vector<cudnnBackendDescriptor_t> natives;
  for (std::int64_t i = 0; i < count; ++i) {
    natives.push_back(found.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR).native());
  }
  check_cudnn(
      cudnnBackendGetAttribute(heuristic.native(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                               CUDNN_TYPE_BACKEND_DESCRIPTOR, count, &count, natives.data()),
      "cudnnBackendGetAttribute of a heuristic's results");
  found.erase(found.begin() + count, found.end());
  return found;
}

// Whether the engine of a configuration computes the same bits every time.
bool repeatable(const CudnnDescriptor& configuration) {
  CudnnDescriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t native = engine.native();
  std::int64_t count = 0;
  if (cudnnBackendGetAttribute(configuration.native(), CUDNN_ATTR_ENGINECFG_ENGINE,
                               CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count,
                               &native) != CUDNN_STATUS_SUCCESS) {
    return false;
  }
  std::array<cudnnBackendNumericalNote_t, CUDNN_NUMERICAL_NOTE_TYPE_COUNT> notes = {};
  if (cudnnBackendGetAttribute(engine.native(), CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                               CUDNN_TYPE_NUMERICAL_NOTE, CUDNN_NUMERICAL_NOTE_TYPE_COUNT, &count,
                               notes.data()) != CUDNN_STATUS_SUCCESS) {
    return false;
  }
  const auto end = notes.begin() + std::min<std::int64_t>(count, notes.size());
  return std::find(notes.begin(), end, CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) == end;
}

CudnnDescriptor pointwise_mode(cudnnPointwiseMode_t mode, cudnnDataType_t type) {
  CudnnDescriptor made(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  made.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode);
  made.set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, type);
  return made;
}

}  // namespace

CudnnDescriptor::CudnnDescriptor(cudnnBackendDescriptorType_t type) {
  check_cudnn(cudnnBackendCreateDescriptor(type, &native_), "cudnnBackendCreateDescriptor");
}

CudnnDescriptor::~CudnnDescriptor() {
  if (native_ != nullptr) cudnnBackendDestroyDescriptor(native_);
}

void CudnnDescriptor::set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                          std::int64_t count, const void* values) {
  check_cudnn(cudnnBackendSetAttribute(native_, name, type, count, values),
              "cudnnBackendSetAttribute");
}

void CudnnDescriptor::finalize(std::string_view what) { check_cudnn(try_finalize(), what); }

CudnnDescriptor describe_device(std::string_view json) {
#if CUDNN_VERSION >= 90800
  CudnnDescriptor device(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
  device.set(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
             static_cast<std::int64_t>(json.size()), json.data());
  device.finalize("cudnnBackendFinalize of a device's description");
  return device;
#else
  static_cast<void>(json);
  check_cudnn(CUDNN_STATUS_NOT_SUPPORTED, "describing a device, which needs cuDNN 9.8");
  return CudnnDescriptor(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
#endif
}

CudnnLayout CudnnLayout::dense(std::int64_t samples, std::int64_t heads, std::int64_t rows,
                               std::int64_t columns) {
  return {{samples, heads, rows, columns}, {heads * rows * columns, rows * columns, columns, 1}};
}

CudnnLayout CudnnLayout::transposed() const {
  CudnnLayout result = *this;
  std::swap(result.sizes[2], result.sizes[3]);
  std::swap(result.strides[2], result.strides[3]);
  return result;
}

CudnnTensor CudnnGraph::add_tensor(const CudnnLayout& layout, cudnnDataType_t type, bool in_memory,
                                   bool by_value) {
  const CudnnTensor tensor = {static_cast<std::int64_t>(tensors_.size()) + 1};
  CudnnDescriptor& made = tensors_.emplace_back(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  made.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, tensor.id);
  made.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type);
  made.set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, layout.sizes.data());
  made.set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, layout.strides.data());
  made.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, kTensorAlignment);
  made.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, !in_memory && !by_value);
  made.set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, by_value);
  made.finalize("cudnnBackendFinalize of a tensor");
  return tensor;
}

CudnnTensor CudnnGraph::memory(const CudnnLayout& layout, cudnnDataType_t type) {
  return add_tensor(layout, type, true, false);
}

CudnnTensor CudnnGraph::intermediate(const CudnnLayout& layout, cudnnDataType_t type) {
  return add_tensor(layout, type, false, false);
}

CudnnTensor CudnnGraph::scalar(float value) {
  const CudnnTensor tensor = add_tensor({}, CUDNN_DATA_FLOAT, false, true);
  scalar_ids_.push_back(tensor.id);
  scalars_.push_back(value);
  return tensor;
}

void CudnnGraph::add_operation(CudnnDescriptor operation, std::string_view what) {
  operation.finalize(what);
  operations_.push_back(std::move(operation));
}

void CudnnGraph::matmul(CudnnTensor a, CudnnTensor b, CudnnTensor c) {
  CudnnDescriptor& description = parts_.emplace_back(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
  description.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  description.finalize("cudnnBackendFinalize of a matmul");
  CudnnDescriptor operation(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, at(a));
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, at(b));
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, at(c));
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_DESC, description);
  add_operation(std::move(operation), "cudnnBackendFinalize of a matmul's operation");
}

void CudnnGraph::add_pointwise(CudnnDescriptor mode, CudnnTensor x, std::optional<CudnnTensor> b,
                               std::optional<CudnnTensor> where, CudnnTensor y) {
  mode.finalize("cudnnBackendFinalize of an element-wise mode");
  CudnnDescriptor operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, mode);
  operation.set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, at(x));
  if (b) operation.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, at(*b));
  if (where) operation.set(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, at(*where));
  operation.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, at(y));
  parts_.push_back(std::move(mode));
  add_operation(std::move(operation), "cudnnBackendFinalize of an element-wise operation");
}

void CudnnGraph::pointwise(cudnnPointwiseMode_t mode, CudnnTensor x, std::optional<CudnnTensor> b,
                           CudnnTensor y, cudnnDataType_t type) {
  add_pointwise(pointwise_mode(mode, type), x, b, std::nullopt, y);
}

void CudnnGraph::select(CudnnTensor x, CudnnTensor otherwise, CudnnTensor where, CudnnTensor y) {
  add_pointwise(pointwise_mode(CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT), x, otherwise,
                where, y);
}

void CudnnGraph::index(CudnnTensor x, std::int64_t axis, CudnnTensor y) {
  // Float, not INT32: what the library's C++ front end asks for in a causal mask.
  CudnnDescriptor made = pointwise_mode(CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_FLOAT);
  made.set(CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, axis);
  add_pointwise(std::move(made), x, std::nullopt, std::nullopt, y);
}

void CudnnGraph::reduce(cudnnReduceTensorOp_t operation, CudnnTensor x, CudnnTensor y) {
  CudnnDescriptor& made = parts_.emplace_back(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
  made.set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, operation);
  made.set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  made.finalize("cudnnBackendFinalize of a reduction");
  CudnnDescriptor reduction(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
  reduction.set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, at(x));
  reduction.set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, at(y));
  reduction.set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, made);
  add_operation(std::move(reduction), "cudnnBackendFinalize of a reduction's operation");
}

void CudnnGraph::reshape(CudnnTensor x, CudnnTensor y) {
  CudnnDescriptor operation(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, at(x));
  operation.set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, at(y));
  add_operation(std::move(operation), "cudnnBackendFinalize of a reshape's operation");
}

std::vector<CudnnDescriptor> CudnnGraph::candidates(const CudnnTarget& target) {
  whole_ = operation_graph(target, operations_);
  std::vector<CudnnDescriptor> found = configurations(target, *whole_);
  std::erase_if(found, [](const CudnnDescriptor& each) { return !repeatable(each); });
  return found;
}

std::optional<CudnnPlan> CudnnGraph::plan(const CudnnTarget& target, std::string* why) && {
  *why = "no engine takes the graph and repeats its bits";
  for (CudnnDescriptor& configuration : candidates(target)) {
    CudnnDescriptor made(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    made.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration);
    if (target.handle != nullptr) {
      made.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, target.handle);
    }
#if CUDNN_VERSION >= 90800
    if (target.described != nullptr) {
      made.set(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, *target.described);
    }
#endif
    const cudnnStatus_t status = made.try_finalize();
    if (status != CUDNN_STATUS_SUCCESS) {
      *why = cuda::describe(status);
      continue;
    }
    CudnnPlan plan(std::move(made));
    std::int64_t bytes = 0, count = 0;
    check_cudnn(
        cudnnBackendGetAttribute(plan.plan_.native(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                 CUDNN_TYPE_INT64, 1, &count, &bytes),
        "cudnnBackendGetAttribute of a plan's workspace");
    plan.workspace_bytes_ = static_cast<std::size_t>(bytes);
    plan.scalar_ids_ = std::move(scalar_ids_);
    plan.scalars_ = std::move(scalars_);
    for (std::vector<CudnnDescriptor>* group : {&tensors_, &parts_, &operations_}) {
      std::move(group->begin(), group->end(), std::back_inserter(plan.parts_));
    }
    plan.parts_.push_back(std::move(*whole_));
    plan.parts_.push_back(std::move(configuration));
    return plan;
  }
  return std::nullopt;
}

void CudnnPlan::run(cudnnHandle_t handle, std::span<const Operand> operands,
                    void* workspace) const {
  std::array<std::int64_t, 16> ids = {};
  std::array<const void*, 16> pointers = {};
  std::size_t count = 0;
  for (const Operand& operand : operands) {
    ids.at(count) = operand.tensor.id;
    pointers.at(count++) = operand.data;
  }
  for (std::size_t i = 0; i < scalar_ids_.size(); ++i) {
    ids.at(count) = scalar_ids_[i];
    pointers.at(count++) = &scalars_[i];
  }
  CudnnDescriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, static_cast<std::int64_t>(count),
           ids.data());
  pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR,
           static_cast<std::int64_t>(count), pointers.data());
  pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, workspace);
  pack.finalize("cudnnBackendFinalize of a plan's operands");
  check_cudnn(cudnnBackendExecute(handle, plan_.native(), pack.native()), "cudnnBackendExecute");
}

}  // namespace sluice::cuda
