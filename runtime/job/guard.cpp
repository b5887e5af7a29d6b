#include "runtime/job/guard.hpp"

#include <exception>
#include <new>

#include <sluice/error.hpp>

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
    throw control.report(Error(code_of_foreign(error), error.what(), rank));
  } catch (...) {
    throw control.report(Error(ErrorCode::kUser, kNoStdException, rank));
  }
}

}  // namespace sluice
