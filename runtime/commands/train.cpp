#include <string>
#include <vector>

#include "runtime/program.hpp"
#include "runtime/trainer.hpp"

namespace sluice {

int train_command(int argc, char** argv) {
  ParsedTrain parsed;
  return run_command(
      "train", argc, argv,
      [&] {
        parsed = parse_train_options({argv, argv + argc});
        return parsed.help ? parsed.help_text : std::string();
      },
      [&](MpiSession& session, Communicator& world) {
        run_training(session.info(), world, parsed);
      });
}

}  // namespace sluice
