#include "stages/cpu/convolution.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <dnnl.hpp>
#include <utility>
#include <vector>

#include <sluice/device.hpp>
#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "stages/cpu/library_call.hpp"

namespace sluice {
namespace {

using Desc = dnnl::memory::desc;
using Dims = dnnl::memory::dims;
using Tag = dnnl::memory::format_tag;

std::string to_string(const ConvolutionShape& shape) {
  return fmt::format(
      "a convolution of {} x {} x {} x {} to {} channels, kernel {} x {}, stride {} x {}, padding "
      "{} x {}, {} groups",
      shape.samples, shape.in, shape.size[0], shape.size[1], shape.out, shape.kernel[0],
      shape.kernel[1], shape.stride[0], shape.stride[1], shape.padding[0], shape.padding[1],
      shape.groups);
}

// A primitive over operands in plain layouts: those that it wants otherwise are copied to scratch
// before it, or from there after it.
class PlainPrimitive {
 public:
  explicit PlainPrimitive(const dnnl::engine& engine) : engine_(engine) {}

  void input(int argument, const Desc& plain, const Desc& wanted) {
    add(argument, plain, wanted, plain, wanted, before_);
  }
  void output(int argument, const Desc& plain, const Desc& wanted) {
    add(argument, plain, wanted, wanted, plain, after_);
  }
  void finish(dnnl::primitive primitive, const Desc& scratchpad) {
    primitive_ = std::move(primitive);
    scratch_ = dnnl::memory(scratchpad, engine_, DNNL_MEMORY_NONE);
    scratch_offset_ = bytes_;
    bytes_ += round_up(scratchpad.get_size(), kBufferAlignment);
    arguments_.push_back({DNNL_ARG_SCRATCHPAD, scratch_.get()});
  }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

  // In the order of input() and output().
  void run(const dnnl::stream& stream, std::initializer_list<const float*> data,
           std::byte* scratch) {
    auto pointer = data.begin();
    for (Operand& operand : operands_) {
      // The library reads sources through non-const handles.
      operand.plain.set_data_handle(const_cast<float*>(*pointer++));
      if (operand.reordered) operand.inner.set_data_handle(scratch + operand.offset);
    }
    scratch_.set_data_handle(scratch + scratch_offset_);
    for (const Reorder& reorder : before_) execute(stream, reorder.primitive, reorder.arguments);
    execute(stream, primitive_, arguments_);
    for (const Reorder& reorder : after_) execute(stream, reorder.primitive, reorder.arguments);
  }

 private:
  struct Operand {
    dnnl::memory plain, inner;
    bool reordered = false;
    std::size_t offset = 0;
  };
  struct Reorder {
    dnnl::primitive primitive;
    std::vector<dnnl_exec_arg_t> arguments;
  };

  void add(int argument, const Desc& plain, const Desc& wanted, const Desc& from, const Desc& to,
           std::vector<Reorder>& reorders) {
    Operand operand;
    operand.plain = dnnl::memory(plain, engine_, DNNL_MEMORY_NONE);
    operand.reordered = plain != wanted;
    if (operand.reordered) {
      operand.inner = dnnl::memory(wanted, engine_, DNNL_MEMORY_NONE);
      operand.offset = bytes_;
      bytes_ += round_up(wanted.get_size(), kBufferAlignment);
      const bool is_input = from == plain;
      reorders.push_back({dnnl::reorder(dnnl::reorder::primitive_desc(engine_, from, engine_, to)),
                          {{DNNL_ARG_FROM, (is_input ? operand.plain : operand.inner).get()},
                           {DNNL_ARG_TO, (is_input ? operand.inner : operand.plain).get()}}});
    }
    arguments_.push_back({argument, (operand.reordered ? operand.inner : operand.plain).get()});
    operands_.push_back(std::move(operand));
  }

  static void execute(const dnnl::stream& stream, const dnnl::primitive& primitive,
                      const std::vector<dnnl_exec_arg_t>& arguments) {
    const dnnl_status_t status = execute_primitive(primitive, stream, arguments);
    if (status == dnnl_success) return;
    throw_error(ErrorCode::kDevice, "oneDNN: a convolution failed with status {}", int{status});
  }

  dnnl::engine engine_;
  dnnl::primitive primitive_;
  dnnl::memory scratch_;
  std::size_t scratch_offset_ = 0, bytes_ = 0;
  std::vector<Operand> operands_;
  std::vector<Reorder> before_, after_;
  std::vector<dnnl_exec_arg_t> arguments_;
};

Desc plain(const Dims& dims, Tag tag) { return {dims, dnnl::memory::data_type::f32, tag}; }

// The operands of all three primitives, in plain layouts and in those the library may choose.
struct Descs {
  explicit Descs(const ConvolutionShape& shape)
      : x(image(shape.samples, shape.in, shape.size[0], shape.size[1])),
        y(image(shape.samples, shape.out, shape.out_size(0), shape.out_size(1))),
        bias(plain({shape.out}, Tag::a)),
        strides{shape.stride[0], shape.stride[1]},
        padding{shape.padding[0], shape.padding[1]} {
    const std::int64_t in = shape.in / shape.groups;
    if (shape.groups == 1) {
      weight = both({shape.out, in, shape.kernel[0], shape.kernel[1]}, Tag::oihw);
    } else {
      weight = both({shape.groups, shape.out / shape.groups, in, shape.kernel[0], shape.kernel[1]},
                    Tag::goihw);
    }
  }

  struct Both {
    Desc plain, any;
  };
  static Both both(const Dims& dims, Tag tag) {
    return {sluice::plain(dims, tag), sluice::plain(dims, Tag::any)};
  }
  static Both image(std::int64_t n, std::int64_t c, std::int64_t h, std::int64_t w) {
    return both({n, c, h, w}, Tag::nchw);
  }

  Both x, y, weight;
  Desc bias;
  Dims strides, padding;
};

dnnl::primitive_attr user_scratch() {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attributes;
}

constexpr auto kDirect = dnnl::algorithm::convolution_direct;

dnnl::convolution_forward::primitive_desc forward_of(const dnnl::engine& engine, const Descs& d,
                                                     bool bias) {
  const Desc with = bias ? d.bias : Desc();
#if DNNL_VERSION_MAJOR >= 3
  return {engine,        dnnl::prop_kind::forward_training,
          kDirect,       d.x.any,
          d.weight.any,  with,
          d.y.any,       d.strides,
          d.padding,     d.padding,
          user_scratch()};
#else
  const dnnl::convolution_forward::desc operation(dnnl::prop_kind::forward_training, kDirect,
                                                  d.x.any, d.weight.any, with, d.y.any, d.strides,
                                                  d.padding, d.padding);
  return {operation, user_scratch(), engine};
#endif
}

// Gradient: dnnl::convolution_backward_data or _weights.
template <typename Gradient>
typename Gradient::primitive_desc gradient_of(
    const dnnl::engine& engine, const Descs& d,
    const dnnl::convolution_forward::primitive_desc& forward) {
#if DNNL_VERSION_MAJOR >= 3
  return {engine,    kDirect,   d.x.any,   d.weight.any, d.y.any,
          d.strides, d.padding, d.padding, forward,      user_scratch()};
#else
  const typename Gradient::desc operation(kDirect, d.x.any, d.weight.any, d.y.any, d.strides,
                                          d.padding, d.padding);
  return {operation, user_scratch(), engine, forward};
#endif
}

}  // namespace

struct Convolution::State {
  explicit State(const ConvolutionShape& shape) {
    const Descs d(shape);
    const auto made = forward_of(engine, d, shape.bias);
    forward.input(DNNL_ARG_SRC, d.x.plain, made.src_desc());
    forward.input(DNNL_ARG_WEIGHTS, d.weight.plain, made.weights_desc());
    if (shape.bias) forward.input(DNNL_ARG_BIAS, d.bias, d.bias);
    forward.output(DNNL_ARG_DST, d.y.plain, made.dst_desc());
    forward.finish(dnnl::convolution_forward(made), made.scratchpad_desc());

    const auto to_input = gradient_of<dnnl::convolution_backward_data>(engine, d, made);
    input_gradient.input(DNNL_ARG_DIFF_DST, d.y.plain, to_input.diff_dst_desc());
    input_gradient.input(DNNL_ARG_WEIGHTS, d.weight.plain, to_input.weights_desc());
    input_gradient.output(DNNL_ARG_DIFF_SRC, d.x.plain, to_input.diff_src_desc());
    input_gradient.finish(dnnl::convolution_backward_data(to_input), to_input.scratchpad_desc());

    const auto to_weight = gradient_of<dnnl::convolution_backward_weights>(engine, d, made);
    weight_gradient.input(DNNL_ARG_SRC, d.x.plain, to_weight.src_desc());
    weight_gradient.input(DNNL_ARG_DIFF_DST, d.y.plain, to_weight.diff_dst_desc());
    weight_gradient.output(DNNL_ARG_DIFF_WEIGHTS, d.weight.plain, to_weight.diff_weights_desc());
    weight_gradient.finish(dnnl::convolution_backward_weights(to_weight),
                           to_weight.scratchpad_desc());
  }

  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  PlainPrimitive forward{engine}, input_gradient{engine}, weight_gradient{engine};
};

Convolution::Convolution(const ConvolutionShape& shape) {
  try {
    state_ = std::make_unique<State>(shape);
  } catch (const dnnl::error& error) {
    throw_error(ErrorCode::kDevice, "oneDNN cannot compute {}: {}", to_string(shape), error.what());
  }
}

Convolution::~Convolution() = default;
Convolution::Convolution(Convolution&&) noexcept = default;
Convolution& Convolution::operator=(Convolution&&) noexcept = default;

std::size_t Convolution::scratch_bytes() const {
  return std::max(
      {state_->forward.bytes(), state_->input_gradient.bytes(), state_->weight_gradient.bytes()});
}

void Convolution::forward(const float* x, const float* weight, const float* bias, float* y,
                          std::byte* scratch) {
  if (bias == nullptr) return state_->forward.run(state_->stream, {x, weight, y}, scratch);
  state_->forward.run(state_->stream, {x, weight, bias, y}, scratch);
}

void Convolution::backward_input(const float* dy, const float* weight, float* dx,
                                 std::byte* scratch) {
  state_->input_gradient.run(state_->stream, {dy, weight, dx}, scratch);
}

void Convolution::backward_weight(const float* x, const float* dy, float* dweight,
                                  std::byte* scratch) {
  state_->weight_gradient.run(state_->stream, {x, dy, dweight}, scratch);
}

}  // namespace sluice
