// Linked with an example's own objects, takes the place of the calls to Pipeline that
// record_calls() in tests/runtime/CMakeLists.txt lists (ld's --wrap): the program stays as it is,
// and a test learns every number that its pipelines compute, to the bit.
//
// SLUICE_EXAMPLE_ORDERS, such as "1 looped-bfs 2 2 zb-h1 1", is a list of numbers of ranks,
// schedules, and stages of each rank. run_main() runs the program's body over as many of the first
// ranks, once for each. A program with a main of its own has one order. When a pipeline ends, rank
// 0 of its communicator prints "recorded N calls DIGEST": of losses, gradient norms and outputs of
// all calls, and of the parameters and buffers at the end.
#include <fmt/core.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include <sluice/options.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
#include <sluice/world.hpp>

#include "runtime/files/sha256.hpp"
#include "runtime/pipeline/pipeline_access.hpp"

namespace sluice {
namespace {

struct Record {
  World* world = nullptr;
  int calls = 0;
  std::string numbers = {};  // the same on all ranks
  std::string outputs = {};  // where there are any
};

Record& record_of(const Pipeline* pipeline) {
  static std::map<const Pipeline*, Record> records;
  return records[pipeline];
}

std::string digest_of(const Tensor& tensor) {
  return sha256_hex({tensor.as<std::byte>(), tensor.spec.bytes()});
}

void add(const Pipeline* pipeline, double loss, double norm) {
  Record& record = record_of(pipeline);
  ++record.calls;
  record.numbers += fmt::format("{:a} {:a}\n", loss, norm);
}

struct Order {
  int ranks = 0;
  PipelineOptions::Order order = {};
};

std::vector<Order> wanted_orders() {
  const char* const wanted = std::getenv("SLUICE_EXAMPLE_ORDERS");
  std::istringstream text(wanted == nullptr ? "" : wanted);
  std::vector<Order> orders;
  for (Order next; text >> next.ranks >> next.order.schedule >> next.order.chunks;) {
    orders.push_back(next);
  }
  return orders;
}

// The order now.
Order& present_order() {
  static Order order = wanted_orders().at(0);
  return order;
}

PipelineOptions with_order(PipelineOptions options) {
  options.shape.pipeline = 0;  // all ranks
  options.order = present_order().order;
  return options;
}

void print(Pipeline& pipeline) {
  Record record = record_of(&pipeline);
  for (auto& [name, value] : pipeline.state()) {
    record.numbers += name + " " + digest_of(value.tensor()) + "\n";
  }
  // Outputs are on one rank, or the same on several.
  std::set<std::string> outputs;
  for (const std::string& each :
       PipelineAccess::world(pipeline).all_gather_strings(record.outputs)) {
    outputs.insert(each);
  }
  for (const std::string& each : outputs) record.numbers += each;
  if (record.world->rank() != 0) return;
  std::printf("recorded %d calls %s\n", record.calls,
              sha256_hex(std::as_bytes(std::span(record.numbers))).c_str());
  std::fflush(stdout);
}

}  // namespace

// Each pair: what the program calls, and what it meant to.
#define SLUICE_REAL(symbol) asm("__real_" symbol)
#define SLUICE_WRAP(symbol) asm("__wrap_" symbol)

#define SLUICE_SYMBOL \
  "_ZN6sluice8PipelineC1ERNS_5WorldERKNS_12StageFactoryERKNS_9BatchSpecERKNS_15PipelineOptionsE"
void real_construct(Pipeline*, World&, const StageFactory&, const BatchSpec&,
                    const PipelineOptions&) SLUICE_REAL(SLUICE_SYMBOL);
void wrap_construct(Pipeline*, World&, const StageFactory&, const BatchSpec&,
                    const PipelineOptions&) SLUICE_WRAP(SLUICE_SYMBOL);
void wrap_construct(Pipeline* self, World& world, const StageFactory& make_stage,
                    const BatchSpec& batches, const PipelineOptions& options) {
  real_construct(self, world, make_stage, batches, with_order(options));
  record_of(self) = Record{.world = &world};
}
#undef SLUICE_SYMBOL

#define SLUICE_SYMBOL "_ZN6sluice8run_mainEiPPcRKSt8functionIFvRNS_5WorldEEE"
using Body = std::function<void(World&)>;
int real_run_main(int, char**, const Body&) SLUICE_REAL(SLUICE_SYMBOL);
int wrap_run_main(int, char**, const Body&) SLUICE_WRAP(SLUICE_SYMBOL);
int wrap_run_main(int argc, char** argv, const Body& body) {
  return real_run_main(argc, argv, [&](World& world) {
    for (const Order& order : wanted_orders()) {
      present_order() = order;
      const bool takes_part = world.rank() < order.ranks;
      const auto ranks = world.split(takes_part ? 0 : 1, world.rank());
      if (takes_part) body(*ranks);
      if (world.rank() == 0) std::printf("end of order\n");
      std::fflush(stdout);
    }
  });
}
#undef SLUICE_SYMBOL

#define SLUICE_SYMBOL "_ZN6sluice8PipelineD1Ev"
void real_destroy(Pipeline*) SLUICE_REAL(SLUICE_SYMBOL);
void wrap_destroy(Pipeline*) SLUICE_WRAP(SLUICE_SYMBOL);
void wrap_destroy(Pipeline* self) {
  if (std::uncaught_exceptions() == 0) print(*self);
  real_destroy(self);
}
#undef SLUICE_SYMBOL

// Member functions of a batch that return a StepReport.
#define SLUICE_STEP(name, symbol)                                      \
  StepReport real_##name(Pipeline*, const Batch&) SLUICE_REAL(symbol); \
  StepReport wrap_##name(Pipeline*, const Batch&) SLUICE_WRAP(symbol); \
  StepReport wrap_##name(Pipeline* self, const Batch& batch) {         \
    StepReport report = real_##name(self, batch);                      \
    add(self, report.loss, report.grad_norm);                          \
    return report;                                                     \
  }
SLUICE_STEP(train_step, "_ZN6sluice8Pipeline10train_stepERKNS_5BatchE")
SLUICE_STEP(forward_backward, "_ZN6sluice8Pipeline16forward_backwardERKNS_5BatchE")

#define SLUICE_SYMBOL "_ZN6sluice8Pipeline14optimizer_stepEv"
StepReport real_optimizer_step(Pipeline*) SLUICE_REAL(SLUICE_SYMBOL);
StepReport wrap_optimizer_step(Pipeline*) SLUICE_WRAP(SLUICE_SYMBOL);
StepReport wrap_optimizer_step(Pipeline* self) {
  StepReport report = real_optimizer_step(self);
  add(self, report.loss, report.grad_norm);
  return report;
}
#undef SLUICE_SYMBOL

#define SLUICE_SYMBOL "_ZN6sluice8Pipeline8evaluateERKNS_5BatchE"
EvaluationReport real_evaluate(Pipeline*, const Batch&) SLUICE_REAL(SLUICE_SYMBOL);
EvaluationReport wrap_evaluate(Pipeline*, const Batch&) SLUICE_WRAP(SLUICE_SYMBOL);
EvaluationReport wrap_evaluate(Pipeline* self, const Batch& batch) {
  const EvaluationReport report = real_evaluate(self, batch);
  add(self, report.loss, report.targets);
  return report;
}
#undef SLUICE_SYMBOL

#define SLUICE_SYMBOL "_ZN6sluice8Pipeline5inferERKNS_5BatchERKNS_12InferOptionsE"
std::span<const Tensor> real_infer(Pipeline*, const Batch&, const InferOptions&)
    SLUICE_REAL(SLUICE_SYMBOL);
std::span<const Tensor> wrap_infer(Pipeline*, const Batch&, const InferOptions&)
    SLUICE_WRAP(SLUICE_SYMBOL);
std::span<const Tensor> wrap_infer(Pipeline* self, const Batch& batch,
                                   const InferOptions& options) {
  Record& record = record_of(self);
  ++record.calls;
  const auto take = [&](std::span<const Tensor> outputs) {
    for (const Tensor& each : outputs) record.outputs += digest_of(each) + "\n";
  };
  InferOptions mine = options;
  if (options.on_outputs) {
    mine.on_outputs = [&](SampleRange samples, std::span<const Tensor> outputs) {
      take(outputs);
      options.on_outputs(samples, outputs);
    };
  }
  const std::span<const Tensor> outputs = real_infer(self, batch, mine);
  take(outputs);
  return outputs;
}

}  // namespace sluice
