// Pipeline::state() and set_state(): all values of a model by name, on every rank.
#include <algorithm>
#include <nlohmann/json.hpp>

#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/group/host_mirror.hpp"
#include "runtime/pipeline/call.hpp"
#include "runtime/pipeline/pipeline_access.hpp"

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

// What a rank says of a parameter before its values.
std::string describe(const Parameter& parameter) {
  nlohmann::json dims = nlohmann::json::array();
  for (int d = 0; d < parameter.shape.rank(); ++d) dims.push_back(parameter.shape[d]);
  return dump_json(nlohmann::json::array({parameter.name, dims}));
}

HostTensor& add(std::map<std::string, HostTensor>& to, const std::string& described) {
  const auto json = parse_json(described);
  HostTensor& tensor = to[json[0].get<std::string>()];
  tensor.spec = {DType::kF32, Shape(json[1].get<std::vector<std::int64_t>>())};
  tensor.bytes.resize(tensor.spec.bytes());
  return tensor;
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
    for (int rank = 0; rank < layout.place.topology.size.pipeline; ++rank) {
      const int root = layout.place.topology.rank_of({.pipeline = rank});
      const bool here = world.communicator().rank() == root;
      std::uint64_t count = mine.size();
      world.broadcast(object_bytes(count), root);
      for (std::uint64_t i = 0; i < count; ++i) {
        HostTensor& tensor =
            add(all, world.broadcast_string(here ? describe(*mine[i]) : std::string(), root));
        if (here) std::ranges::copy(mirror.read_back(mine[i]->value), tensor.bytes.begin());
        world.broadcast(tensor.bytes, root);
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
