#include "tests/emulated_cuda/fiber.hpp"

#include <boost/context/preallocated.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <mutex>
#include <utility>
#include <vector>

#if defined(__has_feature)  // clang
#if __has_feature(address_sanitizer)
#define SLUICE_ADDRESS_SANITIZER 1
#endif
#elif defined(__SANITIZE_ADDRESS__)  // gcc
#define SLUICE_ADDRESS_SANITIZER 1
#endif
#if defined(SLUICE_ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// The thread sanitizer's, null without it. This file is compiled without its instrumentation, which
// would count calls and returns on different stacks.
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming)
extern "C" {
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void __tsan_destroy_fiber(void* fiber);
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
}
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)

namespace sluice::emulated {

namespace {

// Instrumented frames are several times larger; untouched pages cost nothing.
constexpr std::size_t kStackBytes = 256 * 1024;

// Those that no fiber has: kept, since to map one and to touch its pages takes longer than most
// kernels. Never destroyed: threads outlive main().
struct FreeStacks {
  // Room for all at once: a thread that ends beside main() must not move the list while the leak
  // sanitizer reads it.
  FreeStacks() { stacks.reserve(std::size_t{1} << 14); }
  std::mutex mutex;
  std::vector<boost::context::stack_context> stacks;
};

FreeStacks& free_stacks() {
  static FreeStacks* const instance = new FreeStacks;
  return *instance;
}

struct Stacks {
  static boost::context::stack_context allocate() {
    {
      FreeStacks& free = free_stacks();
      const std::lock_guard lock(free.mutex);
      if (!free.stacks.empty()) {
        const boost::context::stack_context stack = free.stacks.back();
        free.stacks.pop_back();
        return stack;
      }
    }
    return boost::context::protected_fixedsize_stack(kStackBytes).allocate();
  }
  // Frames that never return leave the address sanitizer's marks behind; whoever is given these
  // addresses next would stumble over them.
  static void deallocate(const boost::context::stack_context& stack) {
#if defined(SLUICE_ADDRESS_SANITIZER)
    __asan_unpoison_memory_region(static_cast<char*>(stack.sp) - kStackBytes, kStackBytes);
#endif
    FreeStacks& free = free_stacks();
    const std::lock_guard lock(free.mutex);
    free.stacks.push_back(stack);
  }
};

}  // namespace

Fiber::Fiber(std::function<void()> body) : body_(std::move(body)) {
  const boost::context::stack_context stack = Stacks::allocate();
  stack_bytes_ = kStackBytes;
  stack_bottom_ = static_cast<char*>(stack.sp) - kStackBytes;
  inside_ = boost::context::fiber(std::allocator_arg,
                                  boost::context::preallocated(stack.sp, stack.size, stack),
                                  Stacks{}, [this](boost::context::fiber&& outside) {
                                    outside_ = std::move(outside);
                                    entered();
                                    body_();
                                    leave(nullptr);
                                    return std::move(outside_);
                                  });
  if (__tsan_create_fiber != nullptr) inner_context_ = __tsan_create_fiber(0);
}

Fiber::~Fiber() {
  if (inner_context_ != nullptr) __tsan_destroy_fiber(inner_context_);
}

void Fiber::resume() {
#if defined(SLUICE_ADDRESS_SANITIZER)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, stack_bottom_, stack_bytes_);
#endif
  if (inner_context_ != nullptr) {
    outer_context_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(inner_context_, 0);
  }
  inside_ = std::move(inside_).resume();
#if defined(SLUICE_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
}

void Fiber::suspend() {
  leave(&fake_stack_);
  outside_ = std::move(outside_).resume();
  entered();
}

void Fiber::leave([[maybe_unused]] void** fake_stack) {
#if defined(SLUICE_ADDRESS_SANITIZER)
  __sanitizer_start_switch_fiber(fake_stack, outer_bottom_, outer_bytes_);
#endif
  if (outer_context_ != nullptr) __tsan_switch_to_fiber(outer_context_, 0);
}

void Fiber::entered() {
#if defined(SLUICE_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(fake_stack_, &outer_bottom_, &outer_bytes_);
#endif
}

}  // namespace sluice::emulated
