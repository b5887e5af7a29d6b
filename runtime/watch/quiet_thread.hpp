// Threads that the program's signals do not reach.
#pragma once

#include <pthread.h>

#include <csignal>
#include <thread>
#include <utility>

namespace sluice {

// Runs `body` on a thread that takes no signal but those of its own faults.
template <typename Body>
[[nodiscard]] std::thread start_thread(Body body) {
  sigset_t none, before;
  sigfillset(&none);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&none, fault);
  pthread_sigmask(SIG_SETMASK, &none, &before);
  std::thread thread(std::move(body));  // inherits the mask
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace sluice
