// The program `sluice`. It has `sluice schedule` and `sluice run` itself, which so need neither MPI
// nor CUDA and start in milliseconds, and becomes the program `sluice-job` for everything else:
// that one lies beside it in a build folder, and in libexec/sluice of an installation.
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <string>
#include <system_error>

#include <sluice/error.hpp>

#include "runtime/program/explore/schedule_command.hpp"
#include "runtime/program/supervise/run_command.hpp"

namespace sluice {
namespace {

namespace fs = std::filesystem;

// Where the file of this program lies. Links are followed.
fs::path own_folder(const char* name) {
  std::error_code error;
  fs::path self = fs::read_symlink("/proc/self/exe", error);
  if (error) self = fs::weakly_canonical(name, error);
  return self.parent_path();
}

// Returns only where that fails.
int become_job(char** argv) {
  const fs::path folder = own_folder(argv[0]);
  const fs::path installed = (folder / SLUICE_JOB_FROM_BIN).lexically_normal();
  for (const fs::path& program : {folder / "sluice-job", installed}) {
    execv(program.c_str(), argv);
    if (errno == ENOENT) continue;
    std::fprintf(stderr, "sluice: error: cannot start '%s': %s\n", program.c_str(),
                 std::generic_category().message(errno).c_str());
    return exit_code(ErrorCode::kInternal);
  }
  std::fprintf(
      stderr,
      "sluice: error: there is no 'sluice-job', which has all commands but 'schedule' and 'run': "
      "neither beside this program, in '%s', nor '%s'; a copy of 'sluice' needs one of "
      "them\n",
      folder.c_str(), installed.c_str());
  return exit_code(ErrorCode::kInternal);
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  if (command == "schedule") return sluice::schedule_command({argv + 2, argv + argc});
  if (command == "run") return sluice::run_job_command({argv + 2, argv + argc});
  return sluice::become_job(argv);
}
