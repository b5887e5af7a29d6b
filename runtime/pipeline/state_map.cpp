// Pipeline::state() and set_state(): all values of a model by name, on every rank.
#include <algorithm>
#include <cstring>

#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/job/host_mirror.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "runtime/pipeline/refusal.hpp"

namespace sluice {
namespace {

std::vector<Parameter*> owned_values(Pipeline& pipeline) {
  std::vector<Parameter*> all;
  for (const Pipeline::Owned& owned : pipeline.parameters()) {
    if (owned.owner) all.push_back(owned.parameter);
  }
  for (const Pipeline::Owned& owned : pipeline.buffers()) all.push_back(owned.parameter);
  return all;
}

// Name, dimensions and values, in this machine's byte order: all ranks run the same build.
std::string pack(const Parameter& parameter, HostMirror& mirror) {
  std::string text = parameter.name + '\0';
  const Shape& shape = parameter.value.shape();
  std::vector<std::int64_t> dims;
  for (int d = 0; d < shape.rank(); ++d) dims.push_back(shape[d]);
  text += static_cast<char>(dims.size());
  text.append(reinterpret_cast<const char*>(dims.data()), dims.size() * sizeof(std::int64_t));
  const std::span<const std::byte> values = mirror.read_back(parameter.value);
  return text.append(reinterpret_cast<const char*>(values.data()), values.size());
}

// Requires what pack() made.
void unpack(const std::string& text, std::map<std::string, HostTensor>& into) {
  const std::size_t name = text.find('\0');
  std::vector<std::int64_t> dims(static_cast<std::size_t>(text[name + 1]));
  std::memcpy(dims.data(), text.data() + name + 2, dims.size() * sizeof(std::int64_t));
  const std::size_t header = name + 2 + dims.size() * sizeof(std::int64_t);
  HostTensor& tensor = into[text.substr(0, name)];
  tensor.spec = {DType::kF32, Shape(std::span<const std::int64_t>(dims))};
  tensor.bytes.resize(text.size() - header);
  std::memcpy(tensor.bytes.data(), text.data() + header, tensor.bytes.size());
}

void require_fitting(Pipeline& pipeline, const std::map<std::string, HostTensor>& values) {
  for (const Parameter* parameter : owned_values(pipeline)) {
    const auto found = values.find(parameter->name);
    if (found == values.end()) {
      throw_usage("set_state(): the values have no '{}'", parameter->name);
    }
    const HostTensor& tensor = found->second;
    if (tensor.spec != parameter->value.spec || tensor.bytes.size() != tensor.spec.bytes()) {
      throw_usage("set_state(): '{}' is {} of {} bytes, but the model has {}", parameter->name,
                  to_string(tensor.spec), tensor.bytes.size(), to_string(parameter->value.spec));
    }
  }
}

}  // namespace

std::map<std::string, HostTensor> Pipeline::state() {
  std::map<std::string, HostTensor> all;
  PipelineAccess::run_call(*this, Call::kState, "the values of all ranks", [&] {
    const JobLayout& layout = PipelineAccess::layout(*this);
    Collectives& world = PipelineAccess::world(*this);
    HostMirror mirror(compute());
    const std::vector<Parameter*> mine = owned_values(*this);
    for (int rank = 0; rank < layout.place.topology.pipeline; ++rank) {
      const int root = layout.place.topology.rank_of(0, rank);
      const bool here = world.communicator().rank() == root;
      std::uint64_t count = mine.size();
      world.broadcast(std::as_writable_bytes(std::span(&count, 1)), root);
      for (std::uint64_t i = 0; i < count; ++i) {
        unpack(world.broadcast_string(here ? pack(*mine[i], mirror) : std::string(), root), all);
      }
    }
  });
  return all;
}

void Pipeline::set_state(const std::map<std::string, HostTensor>& values) {
  PipelineAccess::run_call(*this, Call::kSetState, "new values", [&] {
    on_all_ranks(PipelineAccess::world(*this), [&] { require_fitting(*this, values); });
    HostMirror mirror(compute());
    for (const Parameter* parameter : owned_values(*this)) {
      const std::vector<std::byte>& bytes = values.at(parameter->name).bytes;
      std::copy(bytes.begin(), bytes.end(), mirror.writable_host_copy(parameter->value).begin());
      mirror.write_back();
    }
    compute().wait();  // before the mirror goes
  });
  values_changed();
}

}  // namespace sluice
