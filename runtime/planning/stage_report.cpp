#include "runtime/planning/stage_report.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/byte_sums.hpp"
#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/group/transport.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/group/guard.hpp"
#include "schedules/plan/collectives.hpp"

namespace sluice {

using Json = nlohmann::json;

// Found by the library by their names.
static void to_json(Json& json, const Shape& shape) {
  json = Json::array();
  for (int d = 0; d < shape.rank(); ++d) json.push_back(shape[d]);
}
static void from_json(const Json& json, Shape& shape) {
  const auto dims = json.get<std::vector<std::int64_t>>();
  shape = Shape(std::span(dims));
}
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TensorSpec, dtype, shape)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Slice, axis, begin, length, whole)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SlicePart, slice, shard)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PlannedCollective, axis, kind, bytes, type)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StageCollectives, forward, loss, answer, backward_input,
                                   backward_weight, recompute)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ParameterEntry, name, elements, tied, use, unit, slice, parts,
                                   shares, copied, overwritten, by_loss, whole_elements)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StateBytes, until_input, until_weight, gradients, alignment)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StageEntry, parameters, buffers, state, shared_gradient_bytes,
                                   workspace_bytes, copy_bytes, operator_bytes, table_bytes,
                                   own_memory, state_moves, uses_units, weight_reads, recomputes,
                                   note, collectives)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StageReport, entry, outputs, input_gradients, answers,
                                   gives_answers)

namespace {

// `text` with U+FFFD in place of bytes that are not UTF-8.
std::string quoted(const std::string& text) {
  return dump_json(Json(text), -1, InvalidUtf8::replace);
}

bool is_utf8(const std::string& text) {
  return quoted(text) == dump_json(Json(text), -1, InvalidUtf8::ignore);
}

// One that is a key in files, and fits into a message of one line.
void require_legal_name(const std::string& name, int index) {
  if (!is_utf8(name)) {
    throw_usage("stage {} has a parameter whose name {} is not UTF-8", index, quoted(name));
  }
  const bool printable = std::none_of(name.begin(), name.end(), [](char c) {
    return static_cast<unsigned char>(c) < ' ' || c == '\x7F';
  });
  if (printable && !name.empty() && name != "__metadata__") return;
  throw_usage(
      "stage {} has a parameter named {}; legal: at least one character, none of them a control "
      "character, and not \"__metadata__\"",
      index, quoted(name));
}

void require_legal_shares(const std::vector<Parameter*>& parameters, int index) {
  int shares = 0;
  for (const Parameter* each : parameters) {
    if (each->shares == 0) continue;
    if (shares == 0) shares = each->shares;
    if (each->shares > 0 && each->shares == shares && each->slice.all()) continue;
    throw_usage(
        "stage {} has {} shares of the gradient of '{}'{}; legal: 0, or of what a rank has whole, "
        "one for each of its shards",
        index, each->shares, each->name, each->slice.all() ? "" : ", of which a rank has a part");
  }
}

void require_legal(const TensorSpec& output, int index) {
  bool legal = output.shape.rank() <= kMaxDims;
  for (int d = 0; d < output.shape.rank(); ++d) {
    legal = legal && output.shape[d] >= 0 &&
            output.shape[d] <= std::numeric_limits<std::int32_t>::max();
  }
  if (legal) return;
  throw_usage(
      "stage {} describes an output of shape {}; at most {} dimensions, each from 0 to 2147483647",
      index, to_string(output.shape), kMaxDims);
}

// Buffers have the size of the largest micro-batch, so the others must not need more.
void require_like(const std::vector<TensorSpec>& largest, const std::vector<TensorSpec>& outputs,
                  int index) {
  bool fits = largest.size() == outputs.size();
  for (std::size_t i = 0; fits && i < outputs.size(); ++i) {
    fits = outputs[i].dtype == largest[i].dtype &&
           outputs[i].shape.rank() == largest[i].shape.rank() &&
           outputs[i].bytes() <= largest[i].bytes();
  }
  if (fits) return;
  throw_usage(
      "stage {} describes other outputs for a smaller micro-batch than for the largest; their "
      "number, dtypes and ranks must agree and their bytes may not grow",
      index);
}

void require_legal_outputs(const std::vector<TensorSpec>& outputs, int index) {
  if (outputs.empty() || outputs.size() > 65535) {
    throw_usage("stage {} describes {} outputs; legal: 1 to 65535", index, outputs.size());
  }
  for (const TensorSpec& output : outputs) require_legal(output, index);
}

std::string to_text(const std::vector<TensorSpec>& specs) {
  std::vector<std::string> texts;
  for (const TensorSpec& spec : specs) texts.push_back(to_string(spec));
  return specs.empty() ? "none" : joined(texts, ", ");
}

void require_targets(const std::vector<TensorSpec>& given, const StageDescription& description,
                     int index) {
  if (description.targets.empty() || given == description.targets) return;
  throw_usage("the data has targets {}; legal with the outputs of stage {}, {}: {}", to_text(given),
              index, to_text(description.outputs), to_text(description.targets));
}

StageDescription description_of(const Stage& stage, int index,
                                const std::vector<TensorSpec>& inputs, ComputeContext& compute) {
  try {
    return stage.describe(inputs, compute);
  } catch (...) {
    rethrow_from(fmt::format("stage {}, describe() of {}", index, to_text(inputs)));
  }
}

// Empty: a rank passes whole values, and to each rank as many where it has a part for each.
std::string why_uneven(const PlannedCollective& each, const StagePeers& peers) {
  const int ranks = peers.ranks[at(static_cast<int>(each.axis))];
  const bool splits =
      each.kind == CollectiveKind::kReduceScatter || each.kind == CollectiveKind::kAllToAll;
  const std::size_t unit = size_of(each.type) * (splits ? at(ranks) : 1);
  if (each.bytes % unit == 0) return {};
  return fmt::format("{}, {} in number; legal: a multiple of {} bytes", in_sentence(each), ranks,
                     unit);
}

void set_collectives(StageEntry& entry, const StageDescription& description, bool first, int index,
                     const StagePeers& peers) {
  const StageCollectives& made = description.collectives;
  if (!peers.last && !(made.loss.empty() && made.answer.empty())) {
    throw_usage("stage {} describes collectives.{}; legal: of the last stage alone", index,
                made.loss.empty() ? "answer" : "loss");
  }
  if (std::ranges::any_of(made.answer, [&](const PlannedCollective& each) {
        return description.answers.empty() || each.axis != CollectiveAxis::kTensor;
      })) {
    throw_usage(
        "stage {} describes collectives.answer; legal: of a stage with answers, over the ranks "
        "that share it",
        index);
  }
  if (first) entry.collectives = made;
  const StageCollectives& largest = entry.collectives;
  const auto require = [&](std::string_view where, const std::vector<PlannedCollective>& list,
                           const std::vector<PlannedCollective>& most) {
    for (const PlannedCollective& each : list) {
      std::string why(why_illegal(each));
      if (why.empty()) why = why_uneven(each, peers);
      if (why.empty()) continue;
      throw_usage("stage {} describes a collective of its {} that cannot be: {}", index, where,
                  why);
    }
    const std::string why = why_unlike(most, list);
    if (why.empty()) return;
    throw_usage(
        "stage {} describes other collectives of its {} for a smaller micro-batch than for the "
        "largest: {}; legal: the same with no more bytes",
        index, where, why);
  };
  require("forward", made.forward, largest.forward);
  require("loss", made.loss, largest.loss);
  require("answer", made.answer, largest.answer);
  require("input gradient", made.backward_input, largest.backward_input);
  require("weight gradient", made.backward_weight, largest.backward_weight);
  require("recomputation", made.recompute, largest.recompute);
}

// Which inputs need a gradient: what the stage says, else every input of a float type.
std::vector<bool> gradients_of(const StageDescription& description,
                               const std::vector<TensorSpec>& inputs, int index) {
  std::vector<bool> gradients = description.input_gradients;
  if (gradients.empty()) {
    for (const TensorSpec& spec : inputs) {
      gradients.push_back(is_float(spec.dtype));
    }
  }
  if (gradients.size() == inputs.size()) return gradients;
  throw_usage("stage {} says for {} inputs whether they need gradients, but has {}", index,
              gradients.size(), inputs.size());
}

// ParameterEntry::use.
std::string use_of(const Parameter& parameter) {
  return fmt::format("{}, initially {}", to_string(parameter.whole_shape()),
                     to_string(parameter.init));
}

// An entry has the maximum over all sizes of micro-batches.
void raise(StageEntry& entry, const StageDescription& description) {
  const auto raise_to = [](std::size_t& to, std::size_t bytes) { to = std::max(to, bytes); };
  raise_to(entry.state.until_input, description.state_bytes_until_input);
  raise_to(entry.state.until_weight, description.state_bytes_until_weight);
  raise_to(entry.state.gradients, description.gradient_bytes_until_weight);
  raise_to(entry.shared_gradient_bytes, description.shared_gradient_bytes);
  raise_to(entry.workspace_bytes, description.workspace_bytes);
  raise_to(entry.copy_bytes, description.copy_bytes);
  raise_to(entry.operator_bytes, description.operator_bytes);
  raise_to(entry.table_bytes, description.table_bytes);
  entry.own_memory = entry.own_memory || description.own_memory;
  entry.recomputes = entry.recomputes || description.recomputes;
}

// What holds for every size of micro-batch.
void join_promises(StageEntry& entry, const StageDescription& description, bool first) {
  entry.state_moves =
      (first || entry.state_moves) && description.state_moves && !description.own_memory;
  entry.uses_units = (first || entry.uses_units) && description.uses_units;
  entry.weight_reads = (!first && entry.weight_reads) || description.weight_reads;
}

}  // namespace

StageReport report_of(Stage& stage, int index, const std::vector<std::vector<TensorSpec>>& inputs,
                      const std::vector<std::vector<TensorSpec>>& targets, const StagePeers& peers,
                      ComputeContext& compute) {
  StageReport report;
  const auto* const loss = dynamic_cast<const LossStage*>(&stage);
  for (const std::vector<TensorSpec>& specs : inputs) {
    const StageDescription description = description_of(stage, index, specs, compute);
    require_legal_outputs(description.outputs, index);
    if (!targets.empty()) require_targets(targets[report.outputs.size()], description, index);
    set_collectives(report.entry, description, report.outputs.empty(), index, peers);
    if (report.outputs.empty()) {
      report.entry.note = description.note;
      report.model = description.model;
    } else {
      require_like(report.outputs.front(), description.outputs, index);
    }
    report.outputs.push_back(description.outputs);
    if (!description.answers.empty() && loss == nullptr) {
      throw_usage("stage {} describes answers; legal: of a LossStage", index);
    }
    for (const TensorSpec& answer : description.answers) require_legal(answer, index);
    report.answers.push_back(description.answers);
    report.input_gradients.push_back(gradients_of(description, specs, index));
    raise(report.entry, description);
    join_promises(report.entry, description, report.outputs.size() == 1);
  }
  if (loss != nullptr && peers.ranks[static_cast<std::size_t>(CollectiveAxis::kTensor)] > 1) {
    try {
      report.gives_answers = loss->why_no_answers().empty();
    } catch (...) {
      rethrow_from(fmt::format("stage {}, why_no_answers()", index));
    }
  }
  ParameterSet* parameters = nullptr;
  try {
    parameters = stage.parameters();
  } catch (...) {
    rethrow_from(fmt::format("stage {}, parameters()", index));
  }
  if (parameters != nullptr) {
    const auto list = [&](const std::vector<Parameter*>& from, std::vector<ParameterEntry>& to) {
      for (const Parameter* p : from) {
        require_legal_name(p->name, index);
        to.push_back({.name = p->name,
                      .elements = p->shape.elements(),
                      .tied = p->tied,
                      .use = use_of(*p),
                      .unit = p->unit,
                      .slice = p->slice,
                      .parts = p->parts,
                      .shares = p->shares,
                      .copied = keeps_bf16(*p, compute.device().kind),
                      .overwritten = p->asks_next_write && stage.overwrites_gradients(),
                      .by_loss = p->written_by_loss,
                      .whole_elements = p->whole_shape().elements()});
      }
    };
    require_legal_shares(parameters->all(), index);
    list(parameters->all(), report.entry.parameters);
    list(parameters->buffers(), report.entry.buffers);
  }
  return report;
}

void require_prepared(const StageBinding& binding, const StageEntry& described) {
  const auto compare = [&](const std::vector<Parameter*>& now,
                           const std::vector<ParameterEntry>& then, const char* what) {
    const bool same = std::equal(now.begin(), now.end(), then.begin(), then.end(),
                                 [](const Parameter* parameter, const ParameterEntry& entry) {
                                   return parameter->name == entry.name &&
                                          parameter->shape.elements() == entry.elements &&
                                          parameter->slice == entry.slice &&
                                          parameter->parts == entry.parts &&
                                          parameter->shares == entry.shares;
                                 });
    if (same) return;
    throw_usage("stage {} has other {} after prepare() than when it was described: {}, then {}",
                binding.index, what, then.size(), now.size());
  };
  ParameterSet none;
  ParameterSet& set = binding.parameters == nullptr ? none : *binding.parameters;
  compare(set.all(), described.parameters, "parameters");
  compare(set.buffers(), described.buffers, "buffers");
  calling(fmt::format("stage {}", binding.index), [&] { set.require_memory(); });
}

std::string to_text(const StageReport& report) {
  return dump_json(Json(report), -1, InvalidUtf8::replace);
}

StageReport report_from(const std::string& text) { return parse_json(text).get<StageReport>(); }

}  // namespace sluice
