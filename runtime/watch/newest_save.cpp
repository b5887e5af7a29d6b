#include "runtime/watch/newest_save.hpp"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <exception>
#include <string>
#include <string_view>
#include <system_error>

namespace sluice {

namespace fs = std::filesystem;

std::uint64_t newest_save_plus_one(const fs::path& directory) noexcept {
  constexpr std::string_view kPrefix = "step-";
  std::uint64_t newest = 0;
  try {
    std::error_code error;
    for (fs::directory_iterator each(directory, error), end; !error && each != end;
         each.increment(error)) {
      const std::string name = each->path().filename().string();
      if (!name.starts_with(kPrefix)) continue;
      std::uint64_t step = 0;
      const char* const last = name.data() + name.size();
      const auto parsed = std::from_chars(name.data() + kPrefix.size(), last, step);
      if (parsed.ec != std::errc() || parsed.ptr != last || step < newest) continue;
      std::error_code ignored;
      if (fs::exists(each->path() / "state.json", ignored)) newest = step + 1;
    }
  } catch (const std::exception&) {  // out of memory: a report without it
  }
  return newest;
}

struct NewestSave::Answer {
  std::atomic<bool> there = false;
  std::atomic<std::uint64_t> value = 0;
};

void NewestSave::ask(Scribe& scribe, const fs::path& directory) {
  if (answer_ != nullptr) return;
  answer_ = std::make_shared<Answer>();
  scribe.run([answer = answer_, directory] {
    answer->value = newest_save_plus_one(directory);
    answer->there = true;
  });
}

std::optional<std::uint64_t> NewestSave::answer() const {
  if (answer_ == nullptr || !answer_->there) return std::nullopt;
  return answer_->value;
}

}  // namespace sluice
