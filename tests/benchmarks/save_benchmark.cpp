// What saving costs a run: a pipeline of 100 MB of parameters (300 MB a save) with a save every 20
// steps, in turn with the same steps without saves; then the time to verify and to load one.
//   mpirun -n 2 save_benchmark --directory DIR [--json FILE] [--rounds N] [--steps N] [--layers N]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include <sluice/checkpoint.hpp>
#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
#include <sluice/transformer.hpp>

#include "comm/group/communicator.hpp"
#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/checkpoint/verify.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "tests/benchmarks/benchmark_report.hpp"
#include "tests/benchmarks/token_source.hpp"

namespace sluice::benchmarks {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Arguments {
  std::filesystem::path directory;
  int rounds = 0, steps = 0, layers = 0;
};

// `steps` steps; the first saves where `saver` is given, and the last waits until that is
// published. Returns the seconds of all, and in `blocked` those that saving held this rank.
double turn(Pipeline& pipeline, Checkpointer* saver, int steps, double& blocked) {
  PipelineAccess::world(pipeline).barrier();
  const double start = now();
  blocked = 0;
  for (int i = 0; i < steps; ++i) {
    const StepReport report = pipeline.train_step();
    if (saver == nullptr) continue;
    const double before = now();
    saver->after_step(report);
    blocked += now() - before;
  }
  return now() - start;
}

void measure(Communicator& comm, const Arguments& arguments, const std::string& json) {
  TransformerConfig model{.layers = arguments.layers, .heads = 8, .width = 512, .context = 128};
  const RandomTokens source(model.context, model.vocabulary);
  PipelineOptions options;
  options.shape.micro_batches = 4;
  options.training.learning_rate = {.peak = 1e-5};
  options.expert.save_copy = true;
  Pipeline pipeline(comm, Transformer(model), source, options);
  const auto every = static_cast<std::uint64_t>(arguments.steps);
  Checkpointer saver(pipeline,
                     {.directory = arguments.directory, .every_steps = every, .overwrite = true});
  double ignored = 0;
  turn(pipeline, nullptr, 3, ignored);
  pipeline.set_step(every - 1);  // so that the first step of a turn is the one that saves
  std::vector<double> with, without, shares;
  for (int round = 0; round < arguments.rounds; ++round) {
    double blocked = 0;
    with.push_back(turn(pipeline, &saver, arguments.steps, blocked));
    shares.push_back(blocked / with.back());
    saver.save_now();  // publishes what is open, outside of the turns
    pipeline.set_step(pipeline.step() - every);
    without.push_back(turn(pipeline, nullptr, arguments.steps, ignored));
  }
  std::vector<double> ratios;
  for (std::size_t i = 0; i < with.size(); ++i) ratios.push_back(with[i] / without[i]);
  saver.save_now();
  const Save save = scan_saves(arguments.directory).saves.front();
  double bytes = 0;
  for (const SavedFile& file : save.state.files) bytes += static_cast<double>(file.bytes);
  double start = now();
  if (comm.rank() == 0) {
    require_hashes(save.directory, save.state, hash_pieces(save.state));
  }
  const double verified = now() - start;
  std::vector<double> loads;
  for (const Verify verify : {Verify::kOff, Verify::kFull}) {
    PipelineAccess::world(pipeline).barrier();
    start = now();
    (void)load_checkpoint(pipeline, arguments.directory, verify);
    loads.push_back(now() - start);
  }
  if (comm.rank() != 0) return;
  Report report(fmt::format("Saving every {} steps, {} ranks", arguments.steps, comm.size()),
                {"MB a save", "s a step", "with/without", "blocked share", "verify s/GB",
                 "load s/GB", "load and verify s/GB"});
  report.row({bytes * 1e-6, median(without) / arguments.steps, median(ratios), median(shares),
              verified / bytes * 1e9, loads[0] / bytes * 1e9, loads[1] / bytes * 1e9});
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
    sluice::Communicator& world = sluice::communicator_of(ranks);
    const std::string directory = argument(argc, argv, "--directory", "");
    if (directory.empty()) {
      throw sluice::Error(sluice::ErrorCode::kUsage, "--directory DIR is missing: saves go there");
    }
    measure(world,
            {directory, number("--rounds", "5"), number("--steps", "20"), number("--layers", "8")},
            argument(argc, argv, "--json", ""));
  });
}
