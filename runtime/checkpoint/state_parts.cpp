#include "runtime/checkpoint/state_parts.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include <sluice/pipeline.hpp>

#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "stages/tensor/slice_runs.hpp"

namespace sluice {

std::vector<StatePart> state_parts(Pipeline& pipeline) {
  std::set<std::string> divided;
  for (const StageEntry& stage : PipelineAccess::layout(pipeline).parameters.stages) {
    for (const ParameterEntry& entry : stage.parameters) {
      if (!entry.ends.empty() && entry.elements > 0) divided.insert(entry.name);
    }
  }
  std::map<std::string, const Parameter*> parameters;
  for (const Pipeline::Owned& owned : pipeline.parameters()) {
    parameters[owned.parameter->name] = owned.parameter;
  }
  std::vector<StatePart> parts;
  for (const OptimizerState& state : PipelineAccess::optimizer_state(pipeline)) {
    const Parameter& parameter = *parameters.at(state.parameter);
    const Shape whole = parameter.whole_shape();
    StatePart each{.parameter = state.parameter,
                   .name = state.kind + "." + state.parameter,
                   .shape = state.tensor.shape(),
                   .slice = {},
                   .tensor = state.tensor,
                   .first = state.first,
                   .divided = divided.contains(state.parameter)};
    if (whole.elements() == 0 || (!each.divided && parameter.slice.all())) {
      if (!parameter.slice.all()) each.shape = each.tensor.spec.shape = whole;  // of nothing
      parts.push_back(std::move(each));
      continue;
    }
    each.shape = whole;
    const std::int64_t end = state.first + state.tensor.elements();
    for (const PlacedPart& part :
         placed_parts(parameter.slice, parameter.parts, parameter.shape.elements())) {
      const std::int64_t first = std::max(state.first, part.first);
      const std::int64_t count = std::min(end, part.end()) - first;
      if (count <= 0) continue;
      each.slice = part.slice;
      each.first = first - part.first;
      each.tensor = elements_of(state.tensor, {first - state.first, count});
      if (each.is_whole()) each.tensor.spec.shape = whole;
      parts.push_back(each);
    }
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
  const auto add = [this](const std::string& to, const std::string& axes, std::int64_t first,
                          std::int64_t elements) {
    return fmt::format("{}{}{}{}:{}{}", to, std::string(brackets_, '['), axes, first,
                       first + elements, std::string(brackets_, ']'));
  };
  std::string name = range.whole, axes;
  for (int axis = 0; axis < range.slice.axis; ++axis) axes += ":,";
  if (!range.slice.all()) name = add(name, axes, range.slice.begin, range.slice.length);
  return add(name, "", range.first, count);
}

}  // namespace sluice
