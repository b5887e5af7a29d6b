#include "runtime/job/guard.hpp"

#include <exception>
#include <new>

#include <sluice/device.hpp>
#include <sluice/error.hpp>

namespace sluice {
namespace {

constexpr const char* kForeign = "an exception that is not a std::exception";

}  // namespace

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
    throw control.report(Error(ErrorCode::kInternal, kForeign, rank));
  }
}

void rethrow_from(const std::string& where) {
  try {
    throw;
  } catch (const OutOfMemory& error) {
    throw OutOfMemory(where + ": " + error.what(), error.location());
  } catch (const Error& error) {
    if (error.rank() >= 0) throw;
    throw Error(error.code(), where + ": " + error.what(), -1, error.location());
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::kDevice, where + ": out of host memory");
  } catch (const std::exception& error) {
    throw Error(code_of_foreign(error), where + ": " + error.what());
  } catch (...) {
    throw Error(ErrorCode::kInternal, where + ": " + kForeign);
  }
}

}  // namespace sluice
