#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <span>
#include <string_view>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/parameter.hpp>

#include "comm/base/byte_sums.hpp"
#include "comm/base/cores.hpp"
#include "comm/base/throw_error.hpp"
#include "stages/tensor/slice_runs.hpp"

namespace sluice {

namespace {

struct UnitPair {
  double first, second;
};

// Two numbers in (0, 1) of 53 bits, the pair-th of the stream whose key philox_key() gave.
UnitPair unit_pair(const std::array<std::uint32_t, 2>& key, std::uint64_t pair) {
  const auto words = philox_block(
      {static_cast<std::uint32_t>(pair), static_cast<std::uint32_t>(pair >> 32), 0, 0}, key);
  const auto unit = [](std::uint32_t high, std::uint32_t low) {
    const std::uint64_t bits = (std::uint64_t{high} << 32 | low) >> 11;
    return (static_cast<double>(bits) + 0.5) * 0x1.0p-53;
  };
  return {unit(words[0], words[1]), unit(words[2], words[3])};
}

// Box and Muller's two normal numbers of that deviation.
UnitPair normal_pair(const UnitPair& unit, double deviation) {
  const double radius = deviation * std::sqrt(-2.0 * std::log(unit.first));
  const double angle = 2.0 * std::numbers::pi * unit.second;
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

// Elements of the stream from `first` on.
void draw_run(const Init& init, const std::array<std::uint32_t, 2>& key, std::uint64_t first,
              std::span<float> values) {
  std::uint64_t pair = first / 2;
  for (std::size_t i = 0; i < values.size(); ++pair) {
    const UnitPair unit = unit_pair(key, pair);
    const UnitPair drawn = init.kind == Init::Kind::kNormal
                               ? normal_pair(unit, init.value)
                               : UnitPair{init.value * (2.0 * unit.first - 1.0),
                                          init.value * (2.0 * unit.second - 1.0)};
    if (first + i == 2 * pair) values[i++] = static_cast<float>(drawn.first);
    if (i < values.size()) values[i++] = static_cast<float>(drawn.second);
  }
}

// On as many threads as this process has cores, each at least a quarter of a million elements (some
// milliseconds); an element depends only on its place in the whole parameter.
void draw(const Parameter& parameter, std::uint64_t seed, std::span<float> values) {
  constexpr std::size_t kLeast = std::size_t{1} << 18;
  if (parameter.init.kind == Init::Kind::kConstant) {
    std::fill(values.begin(), values.end(), static_cast<float>(parameter.init.value));
    return;
  }
  const auto key = philox_key({seed, hash_name(parameter.name), 0});
  const std::size_t parts = std::clamp<std::size_t>(values.size() / kLeast, 1,
                                                    static_cast<std::size_t>(affinity_cores()));
  const std::size_t each = round_up(values.size() / parts + 1, 2);
  const Shape whole = parameter.whole_shape();
  const std::vector<PlacedPart> placed =
      placed_parts(parameter.slice, parameter.parts, parameter.shape.elements());
  const auto draw_part = [&](std::size_t part) {
    const std::size_t first = std::min(part * each, values.size());
    const std::size_t count = std::min(each, values.size() - first);
    for_part_runs(whole, placed, static_cast<std::int64_t>(first), static_cast<std::int64_t>(count),
                  [&](std::int64_t here, std::int64_t in_whole, std::int64_t elements) {
                    draw_run(parameter.init, key, static_cast<std::uint64_t>(in_whole),
                             values.subspan(static_cast<std::size_t>(here),
                                            static_cast<std::size_t>(elements)));
                  });
  };
  std::vector<std::jthread> others;
  std::size_t part = 0;
  try {
    for (; part + 1 < parts; ++part) others.emplace_back(draw_part, part);
  } catch (const std::system_error&) {
    // The system has no more threads: this one draws the rest.
  }
  for (; part < parts; ++part) draw_part(part);
}

std::size_t padded_bytes(const Parameter& parameter) {
  return parameter_bytes(parameter.shape.elements());
}

void require_distinct(const std::deque<Parameter>& parameters) {
  std::unordered_map<std::string_view, const Parameter*> first_uses;
  for (const Parameter& parameter : parameters) {
    const auto [use, is_new] = first_uses.emplace(parameter.name, &parameter);
    if (is_new) {
      continue;
    }
    if (!parameter.tied || !use->second->tied) {
      throw_usage(
          "parameter {} is declared twice in one stage; give it another name, "
          "or declare both uses as tied",
          parameter.name);
    }
    if (parameter.shape != use->second->shape || parameter.slice != use->second->slice ||
        parameter.parts != use->second->parts) {
      throw_usage("tied parameter {} is used with shapes {} and {}; uses share a shape and a slice",
                  parameter.name, to_string(use->second->shape), to_string(parameter.shape));
    }
    if (to_string(parameter.init) != to_string(use->second->init)) {
      throw_usage(
          "tied parameter {} begins with {} and with {}; uses share initial "
          "values",
          parameter.name, to_string(use->second->init), to_string(parameter.init));
    }
  }
}

// Where in the memory of values each parameter lies, in bytes; at last, the bytes of all. `shared`:
// the uses of one name lie in the same place.
std::vector<std::size_t> offsets_of(const std::deque<Parameter>& parameters, bool shared) {
  std::unordered_map<std::string_view, std::size_t> first_uses;
  std::vector<std::size_t> offsets;
  std::size_t end = 0;
  for (const Parameter& parameter : parameters) {
    const auto [use, is_new] = first_uses.emplace(parameter.name, end);
    const bool lies_there = shared && !is_new;
    offsets.push_back(lies_there ? use->second : end);
    if (!lies_there) add_bytes(end, padded_bytes(parameter));
  }
  offsets.push_back(end);
  return offsets;
}

// One that values can be drawn from.
void require_init(const std::string& name, const Init& init) {
  const bool any_sign = init.kind == Init::Kind::kConstant;
  if (std::isfinite(init.value) && (any_sign || init.value >= 0)) return;
  throw_usage(
      "'{}' begins with {}; legal: a finite constant, or normal or uniform with a number from 0",
      name, to_string(init));
}

std::vector<Parameter*> pointers_to(std::deque<Parameter>& parameters) {
  std::vector<Parameter*> all;
  for (Parameter& each : parameters) all.push_back(&each);
  return all;
}

void require_slice(const std::string& name, const Shape& shape, const Slice& slice) {
  if (slice.all()) return;
  const bool known = slice.axis < shape.rank() && slice.whole == shape[slice.axis];
  if (known && slice.begin >= 0 && slice.length >= 0 && slice.length <= slice.whole - slice.begin) {
    return;
  }
  throw_usage(
      "parameter '{}' {} has a slice of {} of {} rows of dimension {}, from {} on; legal: rows of "
      "a "
      "dimension of the shape, and as many in the whole as the shape has",
      name, to_string(shape), slice.length, slice.whole, slice.axis, slice.begin);
}

Parameter& add_to(std::deque<Parameter>& parameters, std::string name, const Shape& shape,
                  Init init, const Slice& slice) {
  require_init(name, init);
  require_slice(name, shape, slice);
  Parameter& parameter = parameters.emplace_back();
  parameter.name = std::move(name);
  parameter.shape = slice_shape(shape, slice);
  parameter.init = init;
  parameter.slice = slice.all() ? Slice{} : slice;
  return parameter;
}

}  // namespace

std::string to_string(const Init& init) {
  constexpr const char* kKinds[] = {"constant", "normal", "uniform"};
  return fmt::format("{} {}", kKinds[static_cast<int>(init.kind)], init.value);
}

std::size_t parameter_bytes(std::int64_t elements) {
  return round_up(static_cast<std::size_t>(elements) * sizeof(float), kBufferAlignment);
}

Shape Parameter::whole_shape() const {
  return slice.all() ? shape : with_rows(shape, slice.axis, slice.whole);
}

Parameter& ParameterSet::add(std::string name, Shape shape, Init init, bool decay, bool tied,
                             const Slice& slice) {
  if (allocated_) {
    throw_usage("parameter {} is added after allocate(); add it before", name);
  }
  Parameter& parameter = add_to(parameters_, std::move(name), shape, init, slice);
  parameter.decay = decay;
  parameter.tied = tied;
  parameter.unit = unit_;
  return parameter;
}

Parameter& ParameterSet::add_parts(std::string name, Shape shape, Init init, bool decay, bool tied,
                                   std::vector<SlicePart> parts) {
  if (parts.empty()) throw_usage("parameter '{}' has no parts; legal: at least one", name);
  Slice all = parts.front().slice;
  all.length = 0;
  for (const SlicePart& part : parts) {
    require_slice(name, shape, part.slice);
    if (part.slice.axis != all.axis || part.slice.all()) {
      throw_usage("parts of parameter '{}' lie along dimensions {} and {}; legal: one dimension",
                  name, all.axis, part.slice.axis);
    }
    all.length += part.slice.length;
  }
  all.begin = std::min(all.begin, all.whole - all.length);
  Parameter& parameter = add(std::move(name), shape, init, decay, tied, all);
  parameter.parts = std::move(parts);
  return parameter;
}

void ParameterSet::begin_unit() {
  if (allocated_) throw_usage("a unit begins after allocate(); begin it before");
  if (!parameters_.empty()) unit_ = parameters_.back().unit + 1;
}

Parameter& ParameterSet::add_buffer(std::string name, Shape shape, Init init, ReplicaRule across,
                                    const Slice& slice) {
  if (allocated_) {
    throw_usage("buffer {} is added after allocate(); add it before", name);
  }
  Parameter& buffer = add_to(buffers_, std::move(name), shape, init, slice);
  buffer.decay = false;
  buffer.across = across;
  return buffer;
}

void ParameterSet::allocate(const DeviceMemory& memory, std::uint64_t seed, bool gradients,
                            const std::function<void(const Parameter&)>& drawn) {
  if (allocated_) {
    throw_usage(
        "ParameterSet::allocate() is called twice; legal: once, which a pipeline does before "
        "Stage::prepare(). A set is of one stage in one pipeline");
  }
  require_distinct(parameters_);
  const std::vector<std::size_t> offsets = offsets_of(parameters_, /*shared=*/!gradients);
  const std::size_t bytes = offsets.back();
  const Device device = memory.device();
  if (memory_->given == nullptr) {
    memory_->values = memory.allocate(bytes);
    values_ = memory_->values.data();
  }
  if (gradients && memory_->given_grads == nullptr) {
    memory_->grads = memory.allocate(bytes);
    grads_ = memory_->grads.data();
  }
  flat_floats_ = bytes / sizeof(float);
  const Stream stream(device);
  zero_grads(stream.view());
  stream.view().synchronize();

  auto offset = offsets.begin();
  for (Parameter& parameter : parameters_) {
    const TensorSpec spec{DType::kF32, parameter.shape};
    parameter.value = {values_ + *offset, spec};
    parameter.grad = {gradients ? grads_ + *offset : nullptr, spec};
    parameter.memory = memory_;
    ++offset;
  }
  if (gradients) allocate_shares(memory);
  draw_values(device, seed, drawn);
  allocate_buffers(memory, seed);
  if (memory_->given == nullptr) {
    memory_->bf16_copies = memory.allocate(bf16_copy_bytes(device.kind));
    bf16_copies_ = memory_->bf16_copies.data();
  }
  place_bf16_copies(device);
  mark_values_changed();
  allocated_ = true;
}

void ParameterSet::require_memory() const {
  if (allocated_ || (parameters_.empty() && buffers_.empty())) return;
  throw_usage(
      "parameters have no memory in or after prepare(); legal: those of a set that parameters() "
      "returns, or ParameterSet::allocate() by whoever calls prepare()");
}

void ParameterSet::allocate_shares(const DeviceMemory& memory) {
  std::size_t bytes = 0;
  for (const Parameter& parameter : parameters_) {
    for (int i = 0; i < parameter.shares; ++i) add_bytes(bytes, padded_bytes(parameter));
  }
  memory_->shares = memory.allocate(bytes);
  const Stream stream(memory.device());
  fill_zero_async(memory_->shares.data(), memory_->shares.size(), stream.view());
  stream.view().synchronize();
  std::byte* place = memory_->shares.data();
  for (int share = 0;; ++share) {
    const std::byte* const begin = place;
    for (Parameter& parameter : parameters_) {
      if (share >= parameter.shares) continue;
      parameter.share_grads.push_back({place, {DType::kF32, parameter.shape}});
      place += padded_bytes(parameter);
    }
    if (place == begin) return;
  }
}

std::span<float> ParameterSet::flat_shares(int share) const {
  int shares = 0;
  for (const Parameter& parameter : parameters_) shares = std::max(shares, parameter.shares);
  if (share >= shares || memory_->shares.data() == nullptr) return {};
  const std::size_t floats =
      memory_->shares.size() / sizeof(float) / static_cast<std::size_t>(shares);
  return {
      reinterpret_cast<float*>(memory_->shares.data()) + static_cast<std::size_t>(share) * floats,
      floats};
}

bool keeps_bf16(const Parameter& parameter, DeviceKind device) {
  return parameter.keeps_bf16 == Bf16Copy::kEverywhere ||
         (parameter.keeps_bf16 == Bf16Copy::kOnGpus && device != DeviceKind::kCpu);
}

static TensorSpec bf16_spec(const Parameter& parameter) { return {DType::kBf16, parameter.shape}; }

std::size_t ParameterSet::bf16_copy_bytes(DeviceKind device) const {
  std::size_t bytes = 0;
  for (const Parameter& parameter : parameters_) {
    if (!keeps_bf16(parameter, device)) continue;
    add_bytes(bytes, round_up(bf16_spec(parameter).bytes(), kBufferAlignment));
  }
  return bytes;
}

void ParameterSet::place_bf16_copies(Device device) {
  std::byte* place = bf16_copies_;
  for (Parameter& parameter : parameters_) {
    if (!keeps_bf16(parameter, device.kind)) continue;
    parameter.bf16_copy = {place, bf16_spec(parameter)};
    place += round_up(parameter.bf16_copy.spec.bytes(), kBufferAlignment);
  }
}

// In place on a CPU: a copy of the largest parameter would be the most that a pipeline for
// inference takes beside its values.
void ParameterSet::draw_values(Device device, std::uint64_t seed,
                               const std::function<void(const Parameter&)>& drawn) {
  std::vector<float> values;  // in host memory, with padding
  const std::byte* end = nullptr;
  for (Parameter& parameter : parameters_) {
    const auto* const place = parameter.value.as<const std::byte>();
    if (end != nullptr && place < end) continue;  // shared with an earlier use
    end = place + padded_bytes(parameter);
    if (device.kind == DeviceKind::kCpu) {
      const std::span<float> own = parameter.value.floats();
      draw(parameter, seed, own);
      std::fill(own.data() + own.size(), own.data() + padded_bytes(parameter) / sizeof(float), 0.F);
    } else {
      values.assign(padded_bytes(parameter) / sizeof(float), 0);
      draw(parameter, seed,
           std::span(values).first(static_cast<std::size_t>(parameter.shape.elements())));
      copy_now(device, parameter.value.data, values.data(), values.size() * sizeof(float));
    }
    if (drawn) drawn(parameter);
  }
}

void ParameterSet::allocate_buffers(const DeviceMemory& memory, std::uint64_t seed) {
  std::size_t bytes = 0;
  for (const Parameter& buffer : buffers_) {
    if (find(buffer.name) != nullptr) {
      throw_usage("buffer {} has the name of a parameter; give it another", buffer.name);
    }
    add_bytes(bytes, padded_bytes(buffer));
  }
  require_distinct(buffers_);
  if (buffers_.empty()) return;
  memory_->buffers = memory.allocate(bytes);
  buffer_floats_ = bytes / sizeof(float);
  std::vector<float> drawn(buffer_floats_);
  std::size_t offset = 0;
  for (Parameter& buffer : buffers_) {
    buffer.value = {memory_->buffers.data() + offset, {DType::kF32, buffer.shape}};
    buffer.memory = memory_;
    draw(buffer, seed,
         std::span(drawn).subspan(offset / sizeof(float),
                                  static_cast<std::size_t>(buffer.shape.elements())));
    offset += padded_bytes(buffer);
  }
  copy_now(memory.device(), memory_->buffers.data(), drawn.data(), bytes);
}

std::vector<Parameter*> ParameterSet::buffers() { return pointers_to(buffers_); }

std::span<float> ParameterSet::flat_buffers() const {
  return {reinterpret_cast<float*>(memory_->buffers.data()), buffer_floats_};
}

std::vector<Parameter*> ParameterSet::all() { return pointers_to(parameters_); }

Parameter* ParameterSet::find(std::string_view name) {
  const auto found = std::ranges::find(parameters_, name, &Parameter::name);
  return found == parameters_.end() ? nullptr : &*found;
}

std::span<float> ParameterSet::flat_grads() const {
  return {reinterpret_cast<float*>(grads_), grads_ == nullptr ? 0 : flat_floats_};
}

std::span<float> ParameterSet::flat_values() const {
  return {reinterpret_cast<float*>(values_), flat_floats_};
}

void ParameterSet::mark_values_changed() {
  ++version_;
  for (Parameter& parameter : parameters_) parameter.bf16_copy_is_current = false;
}

namespace {

// Whether `pattern`, in which '*' stands for any characters, is `text`. Goes back to the last '*'
// only, so its time is at most the product of the lengths.
bool matches(std::string_view pattern, std::string_view text) {
  std::size_t p = 0, t = 0, star = std::string_view::npos, resume = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace

const ParameterGroup* group_of(std::span<const ParameterGroup> groups, std::string_view name) {
  for (const ParameterGroup& group : groups) {
    if (matches(group.names, name)) return &group;
  }
  return nullptr;
}

double LearningRate::at(std::uint64_t step) const {
  if (step < warmup) {
    return peak * static_cast<double>(step) / static_cast<double>(warmup);
  }
  if (decay == Decay::kStep) {
    const std::uint64_t falls = every == 0 || step <= warmup ? 0 : (step - warmup - 1) / every;
    return peak * std::pow(factor, static_cast<double>(falls));
  }
  if (steps == 0) return peak;
  if (step >= steps) {
    return peak * (steps > warmup ? final_share : 1.0);
  }
  const double progress = static_cast<double>(step - warmup) / static_cast<double>(steps - warmup);
  const double share = decay == Decay::kLinear
                           ? 1.0 - progress
                           : 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return peak * (final_share + (1.0 - final_share) * share);
}

}  // namespace sluice
