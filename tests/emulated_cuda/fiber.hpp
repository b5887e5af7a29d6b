// A function with a stack of its own that the thread which made it can resume and that can suspend
// itself. Tells the address and thread sanitizers about each change of stack.
#pragma once

#include <boost/context/fiber.hpp>
#include <cstddef>
#include <functional>

namespace sluice::emulated {

// Pinned to the thread that made it. Before it is destroyed, its body has returned.
class Fiber {
 public:
  // `body` starts with the first resume(); once it has returned there must be no further one.
  explicit Fiber(std::function<void()> body);
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  void resume();   // from outside: until it suspends itself
  void suspend();  // from inside

 private:
  // What a sanitizer has to be told on arrival inside the fiber, and before leaving it; null where
  // it is left for good.
  void entered();
  void leave(void** fake_stack);

  std::function<void()> body_;
  boost::context::fiber inside_;   // while suspended
  boost::context::fiber outside_;  // while running: who resumed it
  void* stack_bottom_ = nullptr;
  std::size_t stack_bytes_ = 0;
  // The address sanitizer's: the fake stack while suspended, and the resumer's stack.
  void* fake_stack_ = nullptr;
  [[maybe_unused]] const void* outer_bottom_ = nullptr;
  [[maybe_unused]] std::size_t outer_bytes_ = 0;
  // The thread sanitizer's.
  void* inner_context_ = nullptr;
  void* outer_context_ = nullptr;
};

}  // namespace sluice::emulated
