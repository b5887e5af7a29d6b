#include "runtime/guard.hpp"

#include <exception>
#include <new>

#include "comm/error.hpp"

namespace sluice {

void guarded(ControlChannel& control, int rank, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    throw control.report(
        error.rank() >= 0 ? error : Error(error.code(), error.what(), rank, error.location()));
  } catch (const std::bad_alloc&) {
    throw control.report(Error(ErrorCode::kDevice, "out of host memory", rank));
  } catch (const std::exception& error) {
    throw control.report(Error(ErrorCode::kInternal, error.what(), rank));
  }
}

}  // namespace sluice
