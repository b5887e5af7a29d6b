// The program `sluice-job`: every command of `sluice`, which becomes this program for all but
// `sluice schedule` and `sluice run` (runtime/program/dispatch/main.cpp).
#include <fmt/core.h>

#include <array>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "comm/base/joined.hpp"
#include "runtime/entry/command.hpp"
#include "runtime/group/build_name.hpp"
#include "runtime/process/process.hpp"
#include "runtime/program/cli/commands.hpp"
#include "runtime/program/explore/schedule_command.hpp"
#include "runtime/program/options/option_pages.hpp"
#include "runtime/program/options/option_table.hpp"
#include "runtime/program/saves/save_commands.hpp"
#include "runtime/program/supervise/run_command.hpp"
#include "runtime/program/train/training.hpp"

namespace sluice {
namespace {

struct Command {
  std::string_view name, summary;
  int (*run)(const std::vector<std::string>& arguments);
};

constexpr std::array kCommands = {
    Command{"train", "train a model over the ranks of an MPI job, or alone", train_command},
    Command{"run", "start a job, and start it again after failures (no MPI)", run_job_command},
    Command{"generate", "sample text from saved weights", generate_command},
    Command{"evaluate", "loss of saved weights on data", evaluate_command},
    Command{"schedule", "prove, simulate and draw a schedule (no MPI)", schedule_command},
    Command{"digest", "SHA-256 of every saved parameter (no MPI)", digest_command},
    Command{"verify", "compare saves with their hashes (no MPI)", verify_command},
    Command{"inspect", "list the tensors of a model's files (no MPI)", inspect_command},
    Command{"export", "write a model as a Hugging Face directory (no MPI)", export_command},
    Command{"doctor", "where ranks run, and what looks wrong", doctor_command},
};

constexpr const char* kExitCodes =
    "0 done, 2 usage, 3 data, 4 output, 5 weights, 6 ranks disagree, 7 loss not finite,\n"
    "8 schedule, 9 MPI, 10 device, 11 a peer died, 12 stopped as asked,\n"
    "13 an exception of other code, 70 internal error.";

std::string overview() {
  std::string text = "Usage: sluice <command> [options]\n\nCommands:\n";
  for (const Command& command : kCommands) {
    text += fmt::format("  {:<10}{}\n", command.name, command.summary);
  }
  return text +
         fmt::format(
             "\n'sluice <command> --help' lists a command's options. 'sluice --version' prints the "
             "version.\n\nExit codes: {}\n",
             kExitCodes);
}

std::string unknown_command(const std::string& name) {
  std::vector<std::string> names;
  for (const Command& command : kCommands) names.emplace_back(command.name);
  return fmt::format("unknown command '{}'{} commands: {}", name, suggestion(name, names, ";"),
                     joined(names, ", "));
}

// The whole manual page ("man") or completion ("bash"), for the build; the commands print their
// parts.
int print_page(const std::string& kind) {
  const bool man = kind == "man";
  std::vector<CommandSummary> commands;
  for (const Command& command : kCommands) commands.emplace_back(command.name, command.summary);
  const std::string name = build_name();
  const std::string version = name.substr(0, name.find(' '));
  fmt::print("{}", man ? man_head(version, commands) : bash_head(commands));
  for (const Command& command : kCommands) {
    std::vector<std::vector<std::string>> forms = {{}};
    if (command.name == "schedule") forms = {{}, {"auto"}, {"compare"}};
    for (std::vector<std::string>& arguments : forms) {
      arguments.push_back("--help=" + kind);
      const int code = command.run(arguments);
      if (code != 0) return code;
    }
  }
  return run_guarded([&] { fmt::print("{}", man ? man_tail(kExitCodes) : bash_tail()); });
}

int run_program(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  if (name == "--help" || name == "-h" || name == "--version") {
    return run_guarded([&] {
      if (!first_of_job()) return;
      fmt::print("{}", name == "--version" ? "sluice " + build_name() + "\n" : overview());
    });
  }
  if (name == "--help=man" || name == "--help=bash") return print_page(name.substr(7));
  for (const Command& command : kCommands) {
    if (command.name == name) return command.run({argv + 2, argv + argc});
  }
  if (!name.empty()) {
    const auto refuse = [&]() -> std::string {
      throw Error(ErrorCode::kUsage, unknown_command(name));
    };
    return run_command(name, refuse, [](Communicator&) {});
  }
  if (first_of_job()) fmt::print(stderr, "{}", overview());
  return exit_code(ErrorCode::kUsage);
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) { return sluice::run_program(argc, argv); }
