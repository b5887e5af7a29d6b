#include "comm/device/hardware_queues.hpp"

#include <charconv>
#include <cstdlib>
#include <string_view>

namespace sluice::cuda {

namespace {

constexpr const char* kVariable = "CUDA_DEVICE_MAX_CONNECTIONS";
constexpr int kMost = 32;  // of CUDA
static_assert(5 + 3 * (2 * kMostNcclPartners + 1) == kMost);

}  // namespace

void ask_for_hardware_queues() {
  static const bool asked = [] {
    return ::setenv(kVariable, std::to_string(kMost).c_str(), /*overwrite=*/0) == 0;
  }();
  static_cast<void>(asked);
}

std::string too_few_hardware_queues() {
  const char* const set = std::getenv(kVariable);
  if (set == nullptr) return "";
  const std::string_view text = set;
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && end == text.data() + text.size() && number >= kMost) return "";
  return std::string(kVariable) + "='" + set +
         "' lets streams share hardware queues, and a kernel may stand behind a receive that waits "
         "for it; legal: " +
         std::to_string(kMost) + ", or not set";
}

}  // namespace sluice::cuda
