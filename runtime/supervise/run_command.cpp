#include "runtime/supervise/run_command.hpp"

#include <algorithm>

#include "runtime/options/option_table.hpp"
#include "runtime/options/process.hpp"
#include "runtime/supervise/supervisor.hpp"

namespace sluice {
namespace {

constexpr int kMostRestarts = 1'000'000;
constexpr double kMostSeconds = 1e6;
constexpr const char* kAbout =
    "Starts a job, and starts it again when it ends by an error that a restart may mend:\n"
    "\n"
    "  sluice run -- mpirun -n 8 sluice train --pipeline 8 --save run --save-minutes 10 --resume "
    "auto\n"
    "\n"
    "It gives up when two restarts in a row make no progress. SIGINT, SIGTERM, SIGHUP and SIGUSR1 "
    "stop\n"
    "the job after its step, saved. With --hosts it leaves out a host that is lost twice, and "
    "with\n"
    "--layouts it takes the next layout that fits:\n"
    "\n"
    "  sluice run --hosts hosts --layouts 4x2,2x2 -- mpirun -n {ranks} --hostfile {hostfile} \\\n"
    "    sluice train --pipeline {pipeline} --replicas {replicas} --save run --resume auto\n"
    "\n"
    "Standard input of the job is empty.";

OptionTable make_table(SupervisorOptions& options) {
  OptionTable table("sluice run [options] -- COMMAND", kAbout);
  table.add_integer("restarts", options.restarts, 0, kMostRestarts, "at most, in all", "",
                    "unlimited");
  table.add_real("pause", options.pause, {.low = 0, .high = kMostSeconds},
                 "seconds before the first restart; twice as many, up to 60, after each start that "
                 "lasted less than a minute");
  table.add_real("grace", options.grace, {.low = 0, .high = kMostSeconds},
                 "seconds for a step and a save, after a request to stop, until the job is ended");
  table.add_text("hosts", options.hosts, "FILE", "a host file of mpirun, for {hostfile}");
  table.add_text("layouts", options.layouts, "LIST",
                 "pipeline x replicas, best first, such as 4x2,2x2, for {ranks}, {pipeline} and "
                 "{replicas}");
  table.add_flag("verbose", options.verbose, "show what the launcher says about the job's end");
  return table;
}

}  // namespace

// Options, then the command of the job behind "--".
int run_job_command(const std::vector<std::string>& arguments) {
  SupervisorOptions options;
  OptionTable table = make_table(options);
  const auto dashes = std::find(arguments.begin(), arguments.end(), "--");
  if (dashes != arguments.end()) options.command.assign(dashes + 1, arguments.end());
  int code = 0;
  const int refused =
      run_guarded(table, {arguments.begin(), dashes}, [&] { code = supervise(options); });
  return refused != 0 ? refused : code;
}

}  // namespace sluice
