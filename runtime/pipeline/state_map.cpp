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
#include "stages/tensor/slice_runs.hpp"

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

std::vector<PlacedPart> placed_of(const Parameter& parameter) {
  return placed_parts(parameter.slice, parameter.parts, parameter.shape.elements());
}

// What a rank says of a parameter before its values.
std::string describe(const Parameter& parameter) {
  const Shape whole = parameter.whole_shape();
  nlohmann::json dims = nlohmann::json::array(), parts = nlohmann::json::array();
  for (int d = 0; d < whole.rank(); ++d) dims.push_back(whole[d]);
  for (const PlacedPart& part : placed_of(parameter)) {
    const Slice& slice = part.slice;
    parts.push_back({slice.axis, slice.begin, slice.length, slice.whole});
  }
  return dump_json(nlohmann::json::array({parameter.name, dims, parts}));
}

// Where the bytes of what a rank has lie in it, in order, and in the whole.
template <typename Visit>
void for_bytes(const Shape& whole, std::span<const PlacedPart> parts, const Visit& visit) {
  const auto bytes = [](std::int64_t elements) {
    return static_cast<std::size_t>(elements) * sizeof(float);
  };
  for_part_runs(whole, parts, 0, whole.elements(),
                [&](std::int64_t here, std::int64_t in_whole, std::int64_t elements) {
                  visit(bytes(here), bytes(in_whole), bytes(elements));
                });
}

// What a rank has of a tensor of `all`, by what it says of it.
struct Described {
  Described(std::map<std::string, HostTensor>& all, const std::string& text) {
    const auto json = parse_json(text);
    whole = &all[json[0].get<std::string>()];
    whole->spec = {DType::kF32, Shape(json[1].get<std::vector<std::int64_t>>())};
    whole->bytes.resize(whole->spec.bytes());
    for (const auto& each : json[2]) {
      const Slice slice = {.axis = each[0].get<int>(),
                           .begin = each[1].get<std::int64_t>(),
                           .length = each[2].get<std::int64_t>(),
                           .whole = each[3].get<std::int64_t>()};
      parts.push_back({slice, 0, elements(), slice_shape(whole->spec.shape, slice).elements()});
    }
  }
  [[nodiscard]] std::int64_t elements() const { return parts.empty() ? 0 : parts.back().end(); }
  HostTensor* whole = nullptr;
  std::vector<PlacedPart> parts;
};

void require_fitting(Pipeline& pipeline, const std::map<std::string, HostTensor>& values) {
  for (const Parameter* parameter : owned_values(pipeline)) {
    const auto found = values.find(parameter->name);
    if (found == values.end()) {
      throw_usage("set_state(): the values have no '{}'", parameter->name);
    }
    const HostTensor& tensor = found->second;
    const TensorSpec needed{DType::kF32, parameter->whole_shape()};
    if (tensor.spec != needed || tensor.bytes.size() != tensor.spec.bytes()) {
      throw_usage("set_state(): '{}' is {} of {} bytes, but the model has {}", parameter->name,
                  to_string(tensor.spec), tensor.bytes.size(), to_string(needed));
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
    std::vector<Parameter*> mine = owned_values(*this);
    // The ranks that share a stage have the same of what they do not divide: the first one's
    // counts.
    if (layout.place.here.tensor > 0) {
      std::erase_if(mine, [](const Parameter* each) { return each->slice.all(); });
    }
    std::vector<std::byte> values;
    const Topology& topology = layout.place.topology;
    for (Place place; place.pipeline < topology.size.pipeline; ++place.pipeline) {
      for (const int root : topology.group(Axis::kTensor, place)) {
        const bool here = world.communicator().rank() == root;
        // The root's stages and slices, in any replica.
        const bool lends = topology.place_of(root).tensor == layout.place.here.tensor &&
                           place.pipeline == layout.place.here.pipeline;
        std::uint64_t count = mine.size();
        world.broadcast(object_bytes(count), root);
        for (std::uint64_t i = 0; i < count; ++i) {
          const Described described(
              all, world.broadcast_string(here ? describe(*mine[i]) : std::string(), root));
          values.resize(static_cast<std::size_t>(described.elements()) * sizeof(float));
          if (lends) PipelineAccess::lend(*this, *mine[i]);
          if (here) std::ranges::copy(mirror.read_back(mine[i]->value), values.begin());
          if (lends) PipelineAccess::give_back(*this, *mine[i]);
          world.broadcast(values, root);
          for_bytes(described.whole->spec.shape, described.parts,
                    [&](std::size_t from, std::size_t to, std::size_t bytes) {
                      std::copy_n(&values[from], bytes, &described.whole->bytes[to]);
                    });
        }
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
      const HostTensor& whole = values.at(parameter->name);
      const std::span<std::byte> mine = mirror.writable_host_copy(parameter->value);
      for_bytes(whole.spec.shape, placed_of(*parameter),
                [&](std::size_t to, std::size_t from, std::size_t bytes) {
                  std::copy_n(&whole.bytes[from], bytes, &mine[to]);
                });
      mirror.write_back();
      PipelineAccess::give_back(*this, *parameter);
    }
    compute().wait();  // before the mirror goes
  });
  values_changed();
}

}  // namespace sluice
