// Which save of a directory is the newest complete one, for reports.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>

#include "runtime/watch/scribe.hpp"

namespace sluice {

// One more than the step of the newest save in a directory, 0 where there is none. A save is
// complete before it gets its name. Blocks as long as the disk does; throws nothing.
[[nodiscard]] std::uint64_t newest_save_plus_one(const std::filesystem::path& directory) noexcept;

// The same on the scribe's thread, for a thread that must not wait for a disk.
class NewestSave {
 public:
  // Asks once; the answer comes later.
  void ask(Scribe& scribe, const std::filesystem::path& directory);
  [[nodiscard]] std::optional<std::uint64_t> answer() const;

 private:
  struct Answer;
  std::shared_ptr<Answer> answer_;
};

}  // namespace sluice
