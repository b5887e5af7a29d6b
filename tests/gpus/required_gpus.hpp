// What a test that needs GPUs does where there are too few: it is skipped with the reason, or it
// fails where SLUICE_REQUIRE_GPUS=n says that a job has n of them. So a machine that is there for
// these tests does not pass without running them.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include <sluice/device.hpp>

namespace sluice {

// GPUs that every job has, by SLUICE_REQUIRE_GPUS; 0 where that is not set. Throws
// std::invalid_argument for anything but a positive number.
inline int required_gpus() {
  const char* text = std::getenv("SLUICE_REQUIRE_GPUS");
  if (text == nullptr || *text == '\0') return 0;
  char* end = nullptr;
  const long number = std::strtol(text, &end, 10);
  constexpr long kMost = 1 << 20;
  if (*end != '\0' || number < 1 || number > kMost) {
    throw std::invalid_argument("SLUICE_REQUIRE_GPUS='" + std::string(text) +
                                "'; legal: the number of GPUs that a job has, 1 or more");
  }
  return static_cast<int>(number);
}

// Why a case that needs so many GPUs cannot run where `found` are there; empty where it can.
inline std::string lack_of_gpus(int needed, int found) {
  if (found >= needed) return "";
  if (found == 0) return "no GPU: " + no_gpu_reason();
  return "needs " + std::to_string(needed) + " GPUs, this job has " + std::to_string(found);
}

}  // namespace sluice

// Ends a case that needs so many GPUs where fewer were `found`.
#define SLUICE_NEED_GPUS(needed, found)                                                   \
  if (const std::string lack = ::sluice::lack_of_gpus(needed, found); lack.empty()) {     \
  } else if (::sluice::required_gpus() >= (needed))                                       \
    GTEST_FAIL() << lack << ", but SLUICE_REQUIRE_GPUS is " << ::sluice::required_gpus(); \
  else                                                                                    \
    GTEST_SKIP() << lack

#define SLUICE_NEED_A_GPU() SLUICE_NEED_GPUS(1, ::sluice::device_count(::sluice::DeviceKind::kCuda))
