#include "tests/emulated_cuda/fiber.hpp"

#include <boost/context/preallocated.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <utility>

#if defined(__has_feature)  // clang
#if __has_feature(address_sanitizer)
#define SLUICE_ADDRESS_SANITIZER 1
#endif
#if __has_feature(thread_sanitizer)
#define SLUICE_THREAD_SANITIZER 1
#endif
#elif defined(__SANITIZE_ADDRESS__)  // gcc
#define SLUICE_ADDRESS_SANITIZER 1
#elif defined(__SANITIZE_THREAD__)
#define SLUICE_THREAD_SANITIZER 1
#endif
#if defined(SLUICE_ADDRESS_SANITIZER)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(SLUICE_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
#endif

namespace sluice::emulated {

namespace {

// Instrumented frames are several times larger.
#if defined(SLUICE_ADDRESS_SANITIZER) || defined(SLUICE_THREAD_SANITIZER)
constexpr std::size_t kStackBytes = 256 * 1024;
#else
constexpr std::size_t kStackBytes = 64 * 1024;
#endif

}  // namespace

Fiber::Fiber(std::function<void()> body) : body_(std::move(body)) {
  boost::context::protected_fixedsize_stack allocator(kStackBytes);
  const boost::context::stack_context stack = allocator.allocate();
  stack_bytes_ = kStackBytes;
  stack_bottom_ = static_cast<char*>(stack.sp) - kStackBytes;
  inside_ = boost::context::fiber(std::allocator_arg,
                                  boost::context::preallocated(stack.sp, stack.size, stack),
                                  allocator, [this](boost::context::fiber&& outside) {
                                    outside_ = std::move(outside);
                                    entered();
                                    body_();
                                    leave(nullptr);
                                    return std::move(outside_);
                                  });
#if defined(SLUICE_THREAD_SANITIZER)
  inner_context_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#if defined(SLUICE_THREAD_SANITIZER)
  __tsan_destroy_fiber(inner_context_);
#endif
}

void Fiber::resume() {
#if defined(SLUICE_ADDRESS_SANITIZER)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, stack_bottom_, stack_bytes_);
#endif
#if defined(SLUICE_THREAD_SANITIZER)
  outer_context_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(inner_context_, 0);
#endif
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
#if defined(SLUICE_THREAD_SANITIZER)
  __tsan_switch_to_fiber(outer_context_, 0);
#endif
}

void Fiber::entered() {
#if defined(SLUICE_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(fake_stack_, &outer_bottom_, &outer_bytes_);
#endif
}

}  // namespace sluice::emulated
