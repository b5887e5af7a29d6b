#include "runtime/process/supervisor_events.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <string_view>

namespace sluice {

bool is_supervised() noexcept {
  return std::getenv(kSupervised) != nullptr || std::getenv(kSupervisedByMpi) != nullptr;
}

void tell_supervisor(const std::string& json) noexcept {
  if (!is_supervised()) return;
  try {
    const std::string line = "sluice-event " + json + "\n";
    (void)!::write(STDERR_FILENO, line.data(), line.size());
  } catch (...) {
    return;  // out of memory: the supervisor goes by the exit code
  }
}

namespace {

constexpr std::chrono::seconds kApart(1);

void tell(const char* event, std::uint64_t step) {
  tell_supervisor(fmt::format(R"({{"event":"{}","step":{}}})", event, step));
}

void tell(const char* event, std::uint64_t step, double seconds) {
  tell_supervisor(
      fmt::format(R"({{"event":"{}","step":{},"seconds":{:.3f}}})", event, step, seconds));
}

}  // namespace

void RunEvents::start(std::uint64_t step, const std::filesystem::path& save) {
  save_ = save;
  step_ = step;
  tell("start", step);
}

void RunEvents::step(std::uint64_t step, double seconds) {
  step_ = step;
  seconds_ += seconds;
  const auto now = std::chrono::steady_clock::now();
  if (now - told_ < kApart) return;
  told_ = now;
  tell("step", step, seconds_);
}

void RunEvents::save(const std::filesystem::path& save) {
  if (save == save_) return;
  save_ = save;
  const std::string name = save.filename().string();
  const std::string_view digits = std::string_view(name).substr(name.find('-') + 1);
  std::uint64_t step = 0;
  const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (result.ec != std::errc()) return;
  tell("step", step_, seconds_);
  tell("save", step);
}

void RunEvents::end(std::uint64_t step) { tell("end", step, seconds_); }

}  // namespace sluice
