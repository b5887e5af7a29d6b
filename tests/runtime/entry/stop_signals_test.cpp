// Each case is a process of its own: signals end it, or its exit code says what it saw.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/program.hpp>

namespace sluice::testing {
namespace {

using ::testing::ExitedWithCode;
using ::testing::KilledBySignal;

// Ends the process: 0 where `body` returns true.
template <typename Body>
[[noreturn]] void exit_with(const Body& body) {
  ::setenv("OMPI_COMM_WORLD_RANK", "3", 1);
  std::signal(SIGHUP, SIG_DFL);  // nohup may have started this program
  std::_Exit(body() ? 0 : 1);
}

TEST(StopSignalsDeathTest, TheFirstSignalIsARequestAndNamesStepAndSave) {
  const auto stopped = [](int signal, std::uint64_t steps) {
    exit_with([=] {
      std::atomic<int> calls = 0;
      StopSignals signals([&]() noexcept { ++calls; });
      for (std::uint64_t step = 1; step <= steps; ++step) {
        signals.describe(step, step == 1 ? "" : "runs/k/step-" + std::to_string(step - 1));
      }
      const bool before = signals.requested();
      ::raise(signal);
      signals.describe(99, "other");
      return !before && signals.requested() && calls == 1;
    });
  };
  EXPECT_EXIT(stopped(SIGTERM, 0), ExitedWithCode(0),
              "^sluice: rank 3: SIGTERM before the first step; it stops once all ranks have ended "
              "the step\n$");
  EXPECT_EXIT(stopped(SIGINT, 1), ExitedWithCode(0),
              "^sluice: rank 3: SIGINT during step 1; it stops once all ranks have ended the "
              "step\n$");
  EXPECT_EXIT(stopped(SIGTERM, 8), ExitedWithCode(0),
              "^sluice: rank 3: SIGTERM during step 8; it stops once all ranks have ended the "
              "step; last complete save: runs/k/step-7\n$");
  EXPECT_EXIT(stopped(SIGHUP, 1), ExitedWithCode(0), "^sluice: rank 3: SIGHUP during step 1; it ");
  EXPECT_EXIT(stopped(SIGUSR1, 8), ExitedWithCode(0), "^$");
}

TEST(StopSignalsDeathTest, TheSecondSignalOfAnyKindEndsTheProcess) {
  for (const int first : {SIGTERM, SIGINT, SIGUSR1}) {
    for (const int second : {SIGTERM, SIGINT, SIGUSR1}) {
      EXPECT_EXIT(exit_with([=] {
                    const StopSignals signals;
                    ::raise(first);
                    ::raise(second);
                    return true;
                  }),
                  KilledBySignal(second), "");
    }
  }
}

// A terminal that closes sends it up to twice; nohup starts a program with it ignored.
TEST(StopSignalsDeathTest, AHangupIsNeitherTheSecondSignalNorARequestUnderNohup) {
  const auto hung_up_twice = [] {
    const StopSignals signals;
    ::raise(SIGHUP);
    ::raise(SIGHUP);
    return signals.requested();
  };
  EXPECT_EXIT(exit_with(hung_up_twice), ExitedWithCode(0), "SIGHUP before the first step");
  EXPECT_EXIT(exit_with([&] {
                std::signal(SIGHUP, SIG_IGN);
                return !hung_up_twice();
              }),
              ExitedWithCode(0), "^$");
}

TEST(StopSignalsDeathTest, TheLongestPathStaysOneLine) {
  EXPECT_EXIT(exit_with([] {
                StopSignals signals;
                signals.describe(~std::uint64_t{0}, std::string(9000, 'x'));
                ::raise(SIGTERM);
                return signals.requested();
              }),
              ExitedWithCode(0), "last complete save: x*\n$");
}

std::atomic<int> earlier_calls = 0;

TEST(StopSignalsDeathTest, TheEndRestoresEarlierActions) {
  const auto earlier = [](int) { ++earlier_calls; };
  EXPECT_EXIT(exit_with([&] {
                std::signal(SIGTERM, earlier);
                std::signal(SIGINT, SIG_IGN);
                for (int i = 0; i < 2; ++i) {
                  const StopSignals signals;
                  if (i == 1) ::raise(SIGUSR1);
                }
                ::raise(SIGTERM);
                ::raise(SIGINT);
                return earlier_calls == 1;
              }),
              ExitedWithCode(0), "^$");
}

// The stack of code that computes may be no place for a handler (stages/cpu/library_call.hpp).
TEST(StopSignalsDeathTest, TheHandlerRunsOnTheAlternateStackOfTheThread) {
  EXPECT_EXIT(exit_with([] {
                std::vector<char> own(std::size_t{256} << 10);
                const stack_t stack = {.ss_sp = own.data(), .ss_flags = 0, .ss_size = own.size()};
                ::sigaltstack(&stack, nullptr);
                std::atomic<bool> inside = false;
                const StopSignals signals([&]() noexcept {
                  const void* const here = __builtin_frame_address(0);  // locals may be elsewhere
                  inside = std::greater_equal<const void*>()(here, own.data()) &&
                           std::less<const void*>()(here, own.data() + own.size());
                });
                ::raise(SIGUSR1);
                return inside.load();
              }),
              ExitedWithCode(0), "^$");
}

TEST(StopSignalsDeathTest, OnlyOneMayExist) {
  EXPECT_EXIT(exit_with([] {
                const StopSignals first;
                try {
                  const StopSignals second;
                  return false;
                } catch (const Error& error) {
                  if (error.code() != ErrorCode::kUsage) return false;
                }
                ::raise(SIGUSR1);  // the first one still has it
                return first.requested();
              }),
              ExitedWithCode(0), "^$");
}

// A signal comes at any instruction of describe(), on this thread or another.
TEST(StopSignalsDeathTest, AlwaysWritesAWholeLine) {
  for (int round = 0; round < 20; ++round) {
    EXPECT_EXIT(exit_with([] {
                  StopSignals signals;
                  const ::pid_t process = ::getpid();
                  std::thread sender([process] {
                    ::usleep(300);
                    ::kill(process, SIGTERM);
                  });
                  for (std::uint64_t step = 1; !signals.requested(); ++step) {
                    const std::string digits = std::to_string(step);
                    std::string path = digits + "/";
                    path.append(500, 'x').append("/").append(digits);
                    signals.describe(step, path);
                  }
                  sender.join();
                  return true;
                }),
                ExitedWithCode(0),
                "^sluice: rank 3: SIGTERM (before the first step; it stops once all ranks have "
                "ended the step|during step [0-9]+; .*: [0-9]+/x+/[0-9]+)\n$");
  }
}

}  // namespace
}  // namespace sluice::testing
