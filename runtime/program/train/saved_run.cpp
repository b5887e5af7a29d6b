#include "runtime/program/train/saved_run.hpp"

#include <fmt/core.h>

#include <algorithm>

#include <sluice/error.hpp>

#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/group/collectives.hpp"
#include "comm/group/control.hpp"
#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/group/guard.hpp"

namespace sluice {
namespace {

namespace fs = std::filesystem;

// "run" of "run/step-00000002/", ".." of "."; of a link, that of the directory that it names.
fs::path parent_of(const fs::path& path) {
  const fs::path named = (path / "..").lexically_normal();
  const fs::path parent = named.has_filename() ? named : named.parent_path();
  std::error_code error;
  const fs::path real = fs::canonical(path, error).parent_path();
  return error || fs::equivalent(parent.empty() ? "." : parent, real, error) ? parent : real;
}

}  // namespace

std::optional<SavedRun> find_saved_run(const fs::path& path) {
  const SaveSelection found = select_saves(path);
  if (found.candidates.empty()) {
    if (found.broken.empty()) return std::nullopt;
    throw_error(ErrorCode::kWeights, "'{}' holds no save that can be read: {}", path.string(),
                joined(found.broken, "; "));
  }
  const auto& [directory, state] = newest_resumable(found);
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
                  .arithmetic = state.arithmetic,
                  .ranks = ranks != state.layout.end() ? ranks->second : 0,
                  .virtual_replicas = state.virtual_replicas(),
                  .tensor_shards = state.tensor_shards(),
                  .gradient_order = state.gradient_order()};
}

void with_newest_save(const fs::path& path, Communicator& world,
                      const std::function<void(const fs::path& save)>& body) {
  const std::unique_ptr<Communicator> comm = world.duplicate();
  ControlChannel control(*comm);
  Collectives collectives(*comm, 0, &control);
  const auto from_first = [&](const std::function<std::string()>& text) {
    std::string result;
    guarded(control, world.rank(), [&] {
      if (world.rank() == 0) result = text();
      result = collectives.broadcast_string(result, 0);
    });
    return result;
  };
  constexpr int kAttempts = 10;
  for (int attempt = 1;; ++attempt) {
    const fs::path save = from_first([&] { return newest_save(path).string(); });
    try {
      return body(save);
    } catch (const Error&) {
      std::error_code error;
      const std::string there = from_first(
          [&] { return fs::exists(save / "state.json", error) || !fs::exists(path) ? "yes" : ""; });
      if (!there.empty() || save == path || attempt == kAttempts) throw;
    }
  }
}

SaveState saved_state(const fs::path& save) {
  SaveSelection found = select_saves(save);
  return found.candidates.empty() ? SaveState() : std::move(found.candidates.front().state);
}

OptionValues data_identity(const TokenFile& file) {
  // Their names contain the path; there are two.
  const OptionValues values = file.identity("");
  return {{"tokens", values.at(0).second}, {"sha256", values.at(1).second}};
}

std::string data_difference(const OptionValues& saved, const OptionValues& now) {
  std::vector<std::string> parts;
  for (const auto& [name, value] : saved) {
    const auto other = std::ranges::find(now, name, &OptionValues::value_type::first);
    if (other == now.end() || other->second == value) continue;
    parts.push_back(fmt::format("{} {} -> {}", name, value, other->second));
  }
  return joined(parts, ", ");
}

}  // namespace sluice
