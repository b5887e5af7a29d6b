#include <string>
#include <vector>

#include <sluice/program.hpp>

#include "runtime/cli/commands.hpp"
#include "runtime/cli/trainer.hpp"

namespace sluice {

int train_command(int argc, char** argv) {
  ParsedTrain parsed;
  return run_command(
      "train", argc, argv,
      [&] {
        parsed = parse_train_options({argv, argv + argc});
        return parsed.help ? parsed.help_text : std::string();
      },
      [&](Communicator& world) { run_training(mpi_info(), world, parsed); });
}

}  // namespace sluice
