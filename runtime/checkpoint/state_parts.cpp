#include "runtime/checkpoint/state_parts.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/pipeline_access.hpp"

namespace sluice {

std::vector<StatePart> state_parts(Pipeline& pipeline) {
  const JobLayout& layout = PipelineAccess::layout(pipeline);
  std::map<std::string, ElementRange> own;  // by parameter that replicas divide
  for (const StageEntry& stage : layout.parameters.stages) {
    for (const ParameterEntry& entry : stage.parameters) {
      if (entry.ends.empty() || entry.elements == 0) continue;
      own[entry.name] = entry.part(layout.place.here.replica);
    }
  }
  std::map<std::string, Shape> shapes;
  for (const Pipeline::Owned& owned : pipeline.parameters()) {
    shapes[owned.parameter->name] = owned.parameter->shape;
  }
  std::vector<StatePart> parts;
  for (const OptimizerState& state : pipeline.optimizer_state()) {
    const auto part = own.find(state.parameter);
    const bool divided = part != own.end();
    const std::int64_t elements = state.tensor.elements();
    const ElementRange legal = divided ? part->second : ElementRange{0, elements};
    if (state.first != legal.first || elements != legal.count) {
      throw_usage(
          "the optimizer's state '{}' of '{}' has {} elements from {} on; legal are the {} from {} "
          "on that its rank updates",
          state.kind, state.parameter, elements, state.first, legal.count, legal.first);
    }
    if (divided && elements == 0) continue;
    StatePart each{state.parameter,      state.kind + "." + state.parameter,
                   state.tensor.shape(), state.tensor,
                   state.first,          divided};
    if (divided) {
      each.shape = shapes[state.parameter];
      each.tensor.spec.shape = each.is_whole() ? each.shape : Shape{elements};
    }
    parts.push_back(std::move(each));
  }
  return parts;
}

RangeNames::RangeNames(std::span<const std::string> parameters, const FileLayout& layout) {
  const auto pass = [&](const std::string& name) {
    const std::size_t last = name.find_last_not_of(']');  // npos + 1 is 0
    brackets_ = std::max(brackets_, name.size() - (last + 1) + 1);
  };
  for (const std::string& parameter : parameters) pass(parameter);
  for (const auto& [parameter, file_parts] : layout) {
    for (const FilePart& part : file_parts) pass(part.name);
  }
}

std::string RangeNames::of(const SavedRange& range, std::int64_t count) const {
  return fmt::format("{}{}{}:{}{}", range.whole, std::string(brackets_, '['), range.first,
                     range.first + count, std::string(brackets_, ']'));
}

}  // namespace sluice
