#include "runtime/job/polled_device_wait.hpp"

#include <limits>

namespace sluice {

PolledDeviceWait::PolledDeviceWait(Interrupt& interrupt)
    : interrupt_(interrupt), waiter_(std::numeric_limits<int>::max()) {}

void PolledDeviceWait::until(const Event& event) {
  waiter_.reset();
  const WaitScope scope(&interrupt_, {WaitSubject::What::kDevice});
  while (!event.done()) {
    scope.poll();
    waiter_.pause();
  }
}

}  // namespace sluice
