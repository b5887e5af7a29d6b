// Arrays in memory: sources and data sets of them, and their values in another type.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include <sluice/data.hpp>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

TensorSpec one_sample(const TensorSpec& all) {
  std::vector<std::int64_t> dims;
  for (int d = 1; d < all.shape.rank(); ++d) dims.push_back(all.shape[d]);
  return {all.dtype, Shape(std::span<const std::int64_t>(dims))};
}

class ArrayDataset final : public Dataset {
 public:
  ArrayDataset(std::vector<HostTensor> inputs, std::vector<HostTensor> targets)
      : inputs_(std::move(inputs)), targets_(std::move(targets)) {
    if (inputs_.empty()) throw_usage("a data set needs an array of inputs, got none");
    for (const auto* arrays : {&inputs_, &targets_}) {
      for (const HostTensor& array : *arrays) require_sensible(array);
    }
  }

  [[nodiscard]] std::int64_t size() const override { return inputs_[0].spec.shape[0]; }
  [[nodiscard]] BatchSpec spec() const override {
    BatchSpec spec;
    for (const HostTensor& array : inputs_) spec.inputs.push_back(one_sample(array.spec));
    for (const HostTensor& array : targets_) spec.targets.push_back(one_sample(array.spec));
    return spec;
  }
  void get(const ItemRequest& item, std::span<const Tensor> inputs,
           std::span<const Tensor> targets) const override {
    copy(item.index, inputs_, inputs);
    copy(item.index, targets_, targets);
  }

 private:
  void require_sensible(const HostTensor& array) const {
    if (array.spec.shape.rank() == 0 || array.spec.shape[0] < 1) {
      throw_usage("array {} of a data set has no samples in its first dimension",
                  to_string(array.spec));
    }
    if (array.bytes.size() != array.spec.bytes()) {
      throw_usage("array {} of a data set has {} bytes; legal: {}", to_string(array.spec),
                  array.bytes.size(), array.spec.bytes());
    }
    if (array.spec.shape[0] == size()) return;
    throw_usage("the arrays of a data set have different numbers of samples: {} and {}",
                to_string(inputs_[0].spec), to_string(array.spec));
  }

  static void copy(std::int64_t index, const std::vector<HostTensor>& arrays,
                   std::span<const Tensor> into) {
    for (std::size_t i = 0; i < into.size(); ++i) {
      const std::size_t bytes = into[i].spec.bytes();
      if (bytes == 0) continue;
      std::memcpy(into[i].data, arrays[i].bytes.data() + static_cast<std::size_t>(index) * bytes,
                  bytes);
    }
  }

  std::vector<HostTensor> inputs_, targets_;
};

struct Rows {
  std::vector<float> values;
  std::int64_t width = 1;

  [[nodiscard]] std::int64_t count() const {
    return static_cast<std::int64_t>(values.size()) / width;
  }
  // Rows [first, first + count), modulo the number of rows.
  void copy(std::int64_t first, std::int64_t rows, float* into) const {
    for (std::int64_t i = 0; i < rows; ++i) {
      const auto from = values.begin() + ((first + i) % count()) * width;
      std::copy(from, from + width, into + i * width);
    }
  }
};

class ArraySource : public DataSource {
 public:
  ArraySource(Rows inputs, Rows targets, std::int64_t batch_size)
      : inputs_(std::move(inputs)), targets_(std::move(targets)), batch_size_(batch_size) {}

  std::vector<TensorSpec> input_specs(std::int64_t samples) const override {
    return {{DType::kF32, Shape{samples, inputs_.width}}};
  }
  std::vector<TensorSpec> target_specs(std::int64_t samples) const override {
    return {{DType::kF32, Shape{samples, targets_.width}}};
  }
  void inputs(Phase phase, std::uint64_t step, SampleRange range,
              std::span<const Tensor> into) const override {
    inputs_.copy(first_row(phase, step, range), range.count, into[0].as<float>());
  }
  void targets(Phase phase, std::uint64_t step, SampleRange range,
               std::span<const Tensor> into) const override {
    targets_.copy(first_row(phase, step, range), range.count, into[0].as<float>());
  }

 private:
  [[nodiscard]] std::int64_t first_row(Phase phase, std::uint64_t step, SampleRange range) const {
    if (phase != Phase::kTrain || step == 0) return range.first;
    const auto batches =
        static_cast<std::int64_t>((step - 1) % static_cast<std::uint64_t>(inputs_.count()));
    return (batches * batch_size_) % inputs_.count() + range.first;
  }

  Rows inputs_, targets_;
  std::int64_t batch_size_;
};

template <typename T>
double to_double(T value) {
  if constexpr (std::is_same_v<T, Bf16> || std::is_same_v<T, F16>) {
    return static_cast<double>(to_float(value));
  } else {
    return static_cast<double>(value);
  }
}

// The float next to `value` towards zero, with its last bit set where that is another number. A
// type with at least two bits less gets the nearest number from it, as if it were rounded once:
// Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008.
float to_odd(double value) {
  const auto near = static_cast<float>(value);
  if (!(std::abs(value) <= std::numeric_limits<double>::max())) return near;  // NaN, infinity
  if (static_cast<double>(near) == value) return near;
  auto bits = std::bit_cast<std::uint32_t>(near);
  if (std::abs(static_cast<double>(near)) > std::abs(value)) --bits;
  return std::bit_cast<float>(bits | 1U);
}

template <typename T>
T from_double(double value, std::size_t index) {
  if constexpr (std::is_same_v<T, Bf16>) {
    return to_bf16(to_odd(value));
  } else if constexpr (std::is_same_v<T, F16>) {
    return to_f16(to_odd(value));
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(value);
  } else {
    const double rounded = std::nearbyint(value);
    const double low = static_cast<double>(std::numeric_limits<T>::min());
    const double end = std::ldexp(1.0, std::numeric_limits<T>::digits);
    if (!(rounded >= low && rounded < end)) {
      throw_usage("value {} at index {} does not fit the type {}", value, index,
                  name_of(dtype_of<T>()));
    }
    return static_cast<T>(rounded);
  }
}

// Calls `body` with a value of the type.
template <typename Body>
void with_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kF32:
      return body(float{});
    case DType::kBf16:
      return body(Bf16{});
    case DType::kI32:
      return body(std::int32_t{});
    case DType::kU8:
      return body(std::uint8_t{});
    case DType::kF64:
      return body(double{});
    case DType::kF16:
      return body(F16{});
    case DType::kI64:
      return body(std::int64_t{});
  }
  throw_usage("a tensor's type is number {}; legal: 0 to {}", static_cast<int>(dtype), kDTypes - 1);
}

}  // namespace

HostTensor host_copy(const Tensor& values) {
  if (values.data == nullptr && values.spec.bytes() > 0) {
    throw_usage("a copy of {} whose data is null; legal: values in host memory",
                to_string(values.spec));
  }
  const auto* const first = static_cast<const std::byte*>(values.data);
  return {.spec = values.spec, .bytes = {first, first + values.spec.bytes()}};
}

std::shared_ptr<Dataset> make_array_dataset(std::vector<HostTensor> inputs,
                                            std::vector<HostTensor> targets) {
  return std::make_shared<ArrayDataset>(std::move(inputs), std::move(targets));
}

std::unique_ptr<DataSource> make_array_source(std::vector<float> inputs, std::int64_t input_width,
                                              std::vector<float> targets, std::int64_t target_width,
                                              std::int64_t batch_size) {
  const auto rows = [](const std::vector<float>& values, std::int64_t width, const char* what) {
    const auto size = static_cast<std::int64_t>(values.size());
    if (width < 1 || size == 0 || size % width != 0) {
      throw_usage("{} {} do not make rows of {}", size, what, width);
    }
    return size / width;
  };
  const std::int64_t samples = rows(inputs, input_width, "inputs");
  if (rows(targets, target_width, "targets") != samples || batch_size < 1) {
    throw_usage(
        "{} samples of inputs need as many of targets and batches of at least "
        "one; got {} target values in rows of {}, batches of {}",
        samples, targets.size(), target_width, batch_size);
  }
  return std::make_unique<ArraySource>(Rows{std::move(inputs), input_width},
                                       Rows{std::move(targets), target_width}, batch_size);
}

HostTensor converted(const HostTensor& from, DType to, double scale, double offset) {
  if (from.bytes.size() != from.spec.bytes()) {
    throw_usage("tensor {} has {} bytes; legal: {}", to_string(from.spec), from.bytes.size(),
                from.spec.bytes());
  }
  HostTensor result{.spec = {to, from.spec.shape}, .bytes = {}};
  if (from.spec.dtype == to && scale == 1 && offset == 0) return from;
  result.bytes.resize(result.spec.bytes());
  const auto elements = static_cast<std::size_t>(from.spec.shape.elements());
  with_type(from.spec.dtype, [&]<typename From>(From) {
    with_type(to, [&]<typename To>(To) {
      for (std::size_t i = 0; i < elements; ++i) {
        From value;
        std::memcpy(&value, from.bytes.data() + i * sizeof(From), sizeof(From));
        const To made = from_double<To>(to_double(value) * scale + offset, i);
        std::memcpy(result.bytes.data() + i * sizeof(To), &made, sizeof(To));
      }
    });
  });
  return result;
}

}  // namespace sluice
