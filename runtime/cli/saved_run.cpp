#include "runtime/cli/saved_run.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <span>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "comm/group/collectives.hpp"
#include "comm/group/control.hpp"
#include "runtime/checkpoint/load_checkpoint.hpp"
#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/cli/model_config.hpp"
#include "runtime/files/checksum.hpp"
#include "runtime/job/guard.hpp"

namespace sluice {
namespace {

namespace fs = std::filesystem;

// "run" of "run/step-00000002/", ".." of ".".
fs::path parent_of(const fs::path& path) {
  const fs::path parent = (path / "..").lexically_normal();
  return parent.has_filename() ? parent : parent.parent_path();
}

OptionValues options_of_0_1(const fs::path& directory) {
  std::error_code ignored;
  const fs::path options = directory / "options.conf";
  return fs::exists(options, ignored) ? read_option_file(options.string()) : OptionValues();
}

SavedRun saved_by_0_1(const fs::path& directory) {
  SavedRun run;
  run.directory = run.root = directory;
  // Version 0.1 named no runs.
  const std::string name = directory.string();
  run.run = checksum_hex(std::as_bytes(std::span(name)));
  run.step = step_of_0_1(directory);
  std::error_code ignored;
  run.options = options_of_0_1(directory);
  if (fs::exists(directory / "config.json", ignored)) run.model = read_model_config(directory);
  return run;
}

}  // namespace

std::optional<SavedRun> find_saved_run(const fs::path& path) {
  const SaveSelection found = select_saves(path);
  if (found.of_0_1) return saved_by_0_1(path);
  if (found.candidates.empty()) {
    if (found.broken.empty()) return std::nullopt;
    throw_error(ErrorCode::kWeights, "'{}' holds no save that can be read: {}", path.string(),
                fmt::join(found.broken, "; "));
  }
  const auto& [directory, state] = found.candidates.front();
  if (state.weights_only) {
    throw_error(ErrorCode::kWeights,
                "'{}' holds weights only (--save-weights-only), which --resume cannot go on from",
                directory.string());
  }
  const auto ranks = state.layout.find("ranks");
  return SavedRun{.directory = directory,
                  .root = found.one_step ? parent_of(path) : path,
                  .run = state.run,
                  .step = state.step,
                  .options = state.options,
                  .data = state.data,
                  .model = {},
                  .ranks = ranks != state.layout.end() ? ranks->second : 0};
}

fs::path choose_save(const fs::path& path, Communicator& world) {
  const std::unique_ptr<Communicator> comm = world.duplicate();
  ControlChannel control(*comm);
  std::string save;
  guarded(control, world.rank(), [&] {
    if (world.rank() == 0) save = newest_save(path).string();
    save = Collectives(*comm, 0, &control).broadcast_string(save, 0);
  });
  return save;
}

OptionValues saved_options(const fs::path& save) {
  const SaveSelection found = select_saves(save);
  return found.candidates.empty() ? options_of_0_1(save) : found.candidates.front().state.options;
}

OptionValues data_identity(const TokenFile& file) {
  // Their names contain the path; there are two.
  const OptionValues values = file.identity("");
  return {{"tokens", values.at(0).second}, {"sha256", values.at(1).second}};
}

std::string data_difference(const OptionValues& saved, const OptionValues& now) {
  std::vector<std::string> parts;
  for (const auto& [name, value] : saved) {
    const auto same_name = [&name = name](const auto& other) { return other.first == name; };
    const auto other = std::find_if(now.begin(), now.end(), same_name);
    if (other == now.end() || other->second == value) continue;
    parts.push_back(fmt::format("{} {} -> {}", name, value, other->second));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

}  // namespace sluice
