// `sluice train`.
#include <csignal>
#include <string>
#include <vector>

#include <sluice/program.hpp>

#include "runtime/cli/commands.hpp"
#include "runtime/options/process.hpp"
#include "runtime/train/train_options.hpp"
#include "runtime/train/training.hpp"

namespace sluice {
namespace {

// The exit code of a run that was asked to stop.
constexpr int kStopped = 12;

}  // namespace

int train_command(int argc, char** argv) {
  const std::vector<std::string> arguments(argv, argv + argc);
  TrainOptions options;
  bool stopped = false;
  StopRequest stop;
  const int code = run_command(
      "train", argc, argv,
      [&] {
        options = parse_train_options(arguments);
        // A reader of the output that goes, and a file that may not grow, are errors of writing.
        for (const int each : {SIGPIPE, SIGXFSZ}) (void)std::signal(each, SIG_IGN);
        if (!options.dry_run && options.help.empty()) stop.begin();
        return options.help;
      },
      [&](Communicator& world) {
        // Not every launcher tells the number of ranks before MPI starts.
        if (options.resume.from && world.size() != launched_size()) {
          options = parse_train_options(arguments, world.size());
        }
        const PlaceSignals place;
        Training training(world, options, stop);
        training.run();
        stopped = training.stopped();
      });
  return code == 0 && stopped ? kStopped : code;
}

}  // namespace sluice
