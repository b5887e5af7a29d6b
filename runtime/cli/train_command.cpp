#include <string>
#include <vector>

#include <sluice/program.hpp>

#include "runtime/cli/commands.hpp"
#include "runtime/cli/trainer.hpp"

namespace sluice {

int train_command(int argc, char** argv) {
  TrainOptions options;
  return run_command(
      "train", argc, argv,
      [&] {
        options = parse_train_options({argv, argv + argc});
        return options.help;
      },
      [&](Communicator& world) { run_training(mpi_info(), world, options); });
}

}  // namespace sluice
