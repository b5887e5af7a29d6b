#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include <sluice/error.hpp>

#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/checkpoint/verify.hpp"
#include "runtime/options/option_table.hpp"
#include "runtime/options/process.hpp"
#include "runtime/saves/save_commands.hpp"
#include "runtime/saves/sums.hpp"
#include "runtime/weights/weights.hpp"

namespace sluice {
namespace {

constexpr const char* kAboutVerify =
    "Compares the files of every save in DIR with the sizes and hashes that were recorded, and\n"
    "prints a line for each, the newest first. DIR is what 'sluice train --save DIR' wrote, or "
    "one\n"
    "step of it; of what 'sluice export' wrote the files are compared with SHA256SUMS. Ends with "
    "0\n"
    "where all are sound, else with 5. Changes nothing and needs no MPI.";

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What is broken; empty where nothing is.
std::string fault_of(const Save& save) {
  try {
    require_sound(save.directory, save.state);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

// Whether the directory still holds this save: a job may have removed or replaced it.
bool still_there(const Save& save) {
  try {
    return read_save_state(save.directory).save == save.state.save;
  } catch (const Error&) {
    std::error_code error;
    return std::filesystem::exists(save.directory, error);
  }
}

std::uint64_t bytes_of(const SaveState& state) {
  std::uint64_t bytes = 0;
  for (const SavedFile& file : state.files) bytes += file.bytes;
  return bytes;
}

// Of an export, of another program, or of version 0.1: a directory without state.json, or with one
// that has no hashes.
void verify_model(const std::string& directory) {
  for (const char* kind : {"model", "optimizer"}) {
    if (kind == std::string("optimizer") && !has_weights(directory, kind)) continue;
    (void)WeightsDirectory(directory, kind);
  }
  std::error_code error;
  if (std::filesystem::exists(std::filesystem::path(directory) / kSumsName, error)) {
    fmt::print("'{}': {} files are as {} says\n", directory, require_sums(directory), kSumsName);
    return;
  }
  fmt::print(
      "'{}' has no hashes to compare with: names, types, shapes and sizes are sound, values were "
      "not compared\n",
      directory);
}

}  // namespace

int verify_command(const std::vector<std::string>& arguments) {
  std::string directory;
  OptionTable table("sluice verify DIR", kAboutVerify);
  table.add_argument("DIR", directory);
  return run_guarded(table, arguments, [&] {
    const SaveSelection selection = select_saves(directory);
    if (selection.of_0_1) return verify_model(directory);
    if (selection.candidates.empty() && selection.broken.empty()) (void)newest_save(directory);
    std::size_t broken = selection.broken.size(), gone = 0;
    double bytes = 0;
    const double start = seconds();
    fmt::print("{:<20} {:<21} {:>10} {:>6}  {}\n", "save", "time", "MB", "files", "state");
    for (const Save& save : selection.candidates) {
      const std::string fault = fault_of(save);
      if (!fault.empty() && !still_there(save)) {
        ++gone;
        continue;
      }
      if (!fault.empty()) ++broken;
      const auto size = static_cast<double>(bytes_of(save.state));
      bytes += size;
      fmt::print("{:<20} {:<21} {:>10.1f} {:>6}  {}\n", step_directory_name(save.state.step),
                 save.state.time, size * 1e-6, save.state.files.size() + 1,
                 fault.empty() ? "ok" : fault);
    }
    for (const std::string& fault : selection.broken) fmt::print("broken: {}\n", fault);
    fmt::print("{:.1f} MB in {:.2f} s\n", bytes * 1e-6, seconds() - start);
    if (gone > 0) fmt::print("{} removed meanwhile by a job that saves there\n", gone);
    if (broken == 0) return;
    throw Error(ErrorCode::kWeights,
                fmt::format("{} of {} saves in '{}' {} broken", broken,
                            selection.candidates.size() + selection.broken.size(), directory,
                            broken == 1 ? "is" : "are"));
  });
}

}  // namespace sluice
