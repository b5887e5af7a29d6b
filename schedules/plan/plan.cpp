#include <array>

#include <sluice/plan.hpp>

#include "schedules/model/actions.hpp"
#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"

namespace sluice {
namespace {

constexpr std::array<std::string_view, 9> kOpNames = {"post",        "wait",        "send",
                                                      "wait-sent",   "compute",     "release",
                                                      "reduce-grad", "reduce-tied", "optimizer"};
constexpr std::array<std::string_view, kBufferKinds> kBufferNames = {
    "input", "output", "grad-output", "grad-input", "state"};

}  // namespace

std::string_view name_of(BufferKind kind) { return kBufferNames[at(kind)]; }

std::string to_string(const PlanOp& op) {
  std::string text(kOpNames[at(op.kind)]);
  text += ' ' + to_string(make_action(op.action, op.stage, op.micro_batch));
  if (op.kind == OpKind::kReduceTied) {
    text += concat(" group ", op.channel);
  } else if (op.channel >= 0) {
    text += concat(" channel ", op.channel);
  }
  if (op.with_previous) text += " with-previous";
  if (op.sums != 0) text += concat(" sums ", op.sums);
  for (std::size_t kind = 0; kind < op.slots.size(); ++kind) {
    if (op.slots[kind] < 0) continue;
    text += concat(' ', kBufferNames[kind], '[', op.slots[kind], ']');
  }
  return text;
}

}  // namespace sluice
