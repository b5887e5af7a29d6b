// What --shard optimizer costs and saves: steps of a pipeline with shards in turn with the same
// steps without, and the CPU time that a rank's update of its part takes.
//   mpirun -n N shard_benchmark [--pipeline P] [--json FILE] [--rounds N] [--layers N] [--width N]
// N / P replicas; P is 1 by default.
#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <vector>

#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
#include <sluice/transformer.hpp>

#include "comm/group/communicator.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "stages/operators/optimizer.hpp"
#include "tests/benchmarks/benchmark_report.hpp"
#include "tests/benchmarks/token_source.hpp"

namespace sluice::benchmarks {
namespace {

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The parts that this rank updates; without shards whole parameters.
std::vector<ParameterSlice> slices_of(Pipeline& pipeline) {
  const JobLayout& layout = PipelineAccess::layout(pipeline);
  std::vector<ParameterSlice> slices;
  for (const Pipeline::Owned& each : pipeline.parameters()) {
    if (!each.owner) continue;
    const auto& entries = layout.parameters.stages[static_cast<std::size_t>(each.stage)].parameters;
    const auto entry = std::find_if(
        entries.begin(), entries.end(),
        [&](const ParameterEntry& other) { return other.name == each.parameter->name; });
    const ElementRange part = entry->part(layout.place.here.replica);
    if (part.count > 0) slices.push_back({each.parameter, part.first, part.count});
  }
  return slices;
}

void measure(Communicator& comm, int depth, int rounds, const TransformerConfig& model,
             const std::string& json) {
  const RandomTokens source(model.context, model.vocabulary);
  struct Side {
    std::unique_ptr<Pipeline> pipeline;
    std::unique_ptr<Optimizer> optimizer;  // another one over the same parts
    std::vector<double> steps, updates;    // seconds
  };
  std::vector<Side> sides(2);
  for (const ShardLevel shard : {ShardLevel::kNone, ShardLevel::kOptimizer}) {
    PipelineOptions options;
    options.shape.pipeline = depth;
    options.shape.replicas = comm.size() / depth;
    options.shape.micro_batches = 4;
    options.shape.shard = shard;
    options.training.learning_rate = {.peak = 1e-5};
    Side& side = sides[static_cast<std::size_t>(shard)];
    side.pipeline = std::make_unique<Pipeline>(comm, Transformer(model), source, options);
    side.optimizer = make_optimizer({}, slices_of(*side.pipeline), {});
  }
  for (int round = -3; round < rounds; ++round) {
    for (Side& side : sides) {
      PipelineAccess::world(*side.pipeline).barrier();
      const double step = side.pipeline->train_step().seconds;
      PipelineAccess::world(*side.pipeline).barrier();
      const double start = thread_seconds();
      side.optimizer->update(side.pipeline->compute(), 1, 0, 1);
      const double update = thread_seconds() - start;
      if (round < 0) continue;
      side.steps.push_back(step);
      side.updates.push_back(update);
    }
  }
  const auto ratio = [](const std::vector<double>& sharded, const std::vector<double>& plain) {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < plain.size(); ++i) ratios.push_back(sharded[i] / plain[i]);
    return median(ratios);
  };
  if (comm.rank() != 0) return;
  Report report(fmt::format("Optimizer in shards, {} ranks, {} stages", comm.size(), depth),
                {"replicas", "s a step", "step/plain", "s an update", "update/plain"});
  report.row({comm.size() / depth, median(sides[0].steps), ratio(sides[1].steps, sides[0].steps),
              median(sides[0].updates), ratio(sides[1].updates, sides[0].updates)});
  report.print();
  report.save(json);
}

}  // namespace
}  // namespace sluice::benchmarks

int main(int argc, char** argv) {
  using namespace sluice::benchmarks;
  const auto number = [&](const char* name, const char* otherwise) {
    return std::atoi(argument(argc, argv, name, otherwise).c_str());
  };
  return sluice::run_main(argc, argv, [&](sluice::World& ranks) {
    const sluice::TransformerConfig model{.layers = number("--layers", "4"),
                                          .heads = 8,
                                          .width = number("--width", "512"),
                                          .context = 128};
    measure(sluice::communicator_of(ranks), number("--pipeline", "1"), number("--rounds", "21"),
            model, argument(argc, argv, "--json", ""));
  });
}
