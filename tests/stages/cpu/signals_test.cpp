// Threads that compute take no signals within the library's kernels, whose stack pointer may point
// into the heap (stages/cpu/library_call.hpp).
#include <gtest/gtest.h>
#include <omp.h>
#include <pthread.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "stages/cpu/convolution.hpp"
#include "stages/cpu/matmul.hpp"
#include "stages/cpu/parallel.hpp"
#include "tests/stages/operators/operator_tools.hpp"

namespace sluice {
namespace {

constexpr int kSignal = SIGUSR1;

// What the handler reads and counts. Only a handler of the whole process can have no other place.
std::uintptr_t stack_begin = 0, stack_end = 0;
std::atomic<int> handled = 0, off_stack = 0;

void on_signal(int /*signal*/, siginfo_t* /*info*/, [[maybe_unused]] void* context) {
#ifdef __x86_64__
  const auto* const at = static_cast<const ucontext_t*>(context);
  const auto pointer = static_cast<std::uintptr_t>(at->uc_mcontext.gregs[REG_RSP]);
  if (pointer < stack_begin || pointer >= stack_end) ++off_stack;
#endif
  ++handled;
}

// Calls on_signal() for kSignal, on a stack of its own: nothing is destroyed where the stack
// pointer is in the heap.
class SignalsOnOwnStack {
 public:
  SignalsOnOwnStack() : stack_(std::size_t{256} << 10) {
    const stack_t mine = {.ss_sp = stack_.data(), .ss_flags = 0, .ss_size = stack_.size()};
    ::sigaltstack(&mine, &before_stack_);
    struct sigaction action {};
    action.sa_sigaction = &on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigemptyset(&action.sa_mask);
    ::sigaction(kSignal, &action, &before_);
    pthread_attr_t attributes;
    void* begin = nullptr;
    std::size_t size = 0;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &begin, &size);
    pthread_attr_destroy(&attributes);
    stack_begin = reinterpret_cast<std::uintptr_t>(begin);
    stack_end = stack_begin + size;
    handled = 0;
    off_stack = 0;
  }
  ~SignalsOnOwnStack() {
    ::sigaction(kSignal, &before_, nullptr);
    ::sigaltstack(&before_stack_, nullptr);
  }
  SignalsOnOwnStack(const SignalsOnOwnStack&) = delete;
  SignalsOnOwnStack& operator=(const SignalsOnOwnStack&) = delete;

 private:
  std::vector<std::byte> stack_;
  stack_t before_stack_{};
  struct sigaction before_ {};
};

// One thread computes, unless a case wants more.
class SignalsTest : public ::testing::Test {
 public:
  SignalsTest() { omp_set_num_threads(1); }
  ~SignalsTest() override { omp_set_num_threads(threads_before_); }

 private:
  int threads_before_ = omp_get_max_threads();
};

// Repeats `compute` until this thread has taken kSignals, which are sent at evenly spread moments
// of its time, or for a minute.
constexpr int kSignals = 200;
void compute_under_signals(const std::function<void()>& compute) {
  using Clock = std::chrono::steady_clock;
  compute();
  const Clock::time_point before = Clock::now();
  compute();
  const Clock::duration takes = Clock::now() - before;
  const SignalsOnOwnStack signals;
  std::atomic<int> round = 0;
  std::atomic<bool> end = false;
  std::thread sender([&, to = pthread_self()] {
    for (int sent = 0; sent < kSignals && !end; ++sent) {
      for (const int last = round; round == last && !end;) std::this_thread::yield();
      for (const auto when = Clock::now() + takes * sent / kSignals; Clock::now() < when;) continue;
      ::pthread_kill(to, kSignal);
      while (handled <= sent && !end) std::this_thread::yield();
    }
  });
  for (const auto deadline = Clock::now() + std::chrono::seconds(60);
       handled < kSignals && Clock::now() < deadline; ++round) {
    compute();
  }
  end = true;
  sender.join();
}

// As attention has them: the library takes one of those kernels for these strides.
constexpr MatmulSpec kMatmul = {.batches = 2,
                                .m = 128,
                                .n = 16,
                                .k = 256,
                                .a = {256, 1, 128 * 256},
                                .b = {96, 1, 16},
                                .c = {32, 1, 16}};

TEST_F(SignalsTest, NoneInterruptsAMatmul) {
  MatmulCache cache{Device{}};
  const Operand a = random_operand(DType::kF32, {2, 128, 256}, 1),
                b = random_operand(DType::kF32, {256, 96}, 2), c(DType::kF32, {128, 32});
  cache.prepare(kMatmul);
  compute_under_signals(
      [&] { cache.run(kMatmul, a.tensor.data, b.tensor.data, nullptr, c.tensor.data); });
  EXPECT_EQ(handled, kSignals);
  EXPECT_EQ(off_stack, 0);
}

// And for groups of few channels.
TEST_F(SignalsTest, NoneInterruptsAConvolution) {
  const ConvolutionShape shape = {.samples = 1,
                                  .in = 35,
                                  .out = 35,
                                  .groups = 5,
                                  .size = {12, 12},
                                  .kernel = {5, 5},
                                  .padding = {2, 2}};
  Convolution convolution(shape);
  const Operand x = random_operand(DType::kF32, {35 * 24 * 24}, 1),
                weight = random_operand(DType::kF32, {35 * 7 * 25}, 2),
                y(DType::kF32, {35 * 24 * 24});
  const Operand bias = random_operand(DType::kF32, {35}, 3);
  const Buffer scratch(Device{}, convolution.scratch_bytes());
  compute_under_signals([&] {
    convolution.forward(x.tensor.as<float>(), weight.tensor.as<float>(), bias.tensor.as<float>(),
                        y.tensor.as<float>(), const_cast<std::byte*>(scratch.data()));
  });
  EXPECT_EQ(handled, kSignals);
  EXPECT_EQ(off_stack, 0);
}

bool takes_signal() {
  sigset_t blocked;
  pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
  return sigismember(&blocked, kSignal) == 0;
}

// A signal to the process goes to any thread that takes it. A team that shrinks ends threads, and
// starts them anew when it grows: by Sluice's loops or by the library.
TEST_F(SignalsTest, ThreadsOfTheTeamTakeNone) {
  const auto takers = [main = std::this_thread::get_id()](int threads) {
    std::atomic<int> count = 0;
    parallel_range(threads, threads, 1, [&](std::int64_t /*begin*/, std::int64_t /*end*/) {
      if (std::this_thread::get_id() != main && takes_signal()) ++count;
    });
    return count.load();
  };
  omp_set_num_threads(4);
  MatmulCache cache{Device{}};
  const Operand a = random_operand(DType::kF32, {512, 512}, 1), c(DType::kF32, {512, 512});
  const MatmulSpec large = {
      .m = 512, .n = 512, .k = 512, .a = {.row = 512}, .b = {.row = 512}, .c = {.row = 512}};
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(takers(2), 0);
    EXPECT_EQ(takers(4), 0);
    EXPECT_EQ(takers(2), 0);
    cache.run(large, a.tensor.data, a.tensor.data, nullptr, c.tensor.data);
    EXPECT_EQ(takers(4), 0);
  }
  EXPECT_TRUE(takes_signal());
}

// The thread itself takes signals again.
TEST_F(SignalsTest, TheCallingThreadTakesThemAfterwards) {
  MatmulCache cache{Device{}};
  const Operand a = random_operand(DType::kF32, {2, 128, 256}, 1),
                b = random_operand(DType::kF32, {256, 96}, 2), c(DType::kF32, {128, 32});
  const SignalsOnOwnStack signals;
  cache.run(kMatmul, a.tensor.data, b.tensor.data, nullptr, c.tensor.data);
  EXPECT_EQ(handled, 0);
  ::raise(kSignal);
  EXPECT_EQ(handled, 1);
}

}  // namespace
}  // namespace sluice
