#include "runtime/checkpoint/state_parts.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include <sluice/pipeline.hpp>

#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/pipeline_access.hpp"

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
  for (const OptimizerState& state : pipeline.optimizer_state()) {
    const Parameter& parameter = *parameters.at(state.parameter);
    StatePart each{.parameter = state.parameter,
                   .name = state.kind + "." + state.parameter,
                   .shape = state.tensor.shape(),
                   .slice = parameter.slice,
                   .tensor = state.tensor,
                   .first = state.first,
                   .divided = divided.contains(state.parameter)};
    if (each.divided || !each.slice.all()) {
      const std::int64_t elements = state.tensor.elements();
      each.shape = parameter.whole_shape();
      if (each.shape.elements() == 0) each.slice = {};  // a whole of nothing
      if (elements == 0 && !each.is_whole()) continue;
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
