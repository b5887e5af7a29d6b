#include "comm/group/rethrow_from.hpp"

#include <exception>
#include <new>

#include <sluice/device.hpp>

namespace sluice {

Error caught_error(const std::string& prefix, int rank) {
  try {
    throw;
  } catch (const Error& error) {
    if (error.rank() >= 0) return error;
    return Error(error.code(), prefix + error.what(), rank, error.location());
  } catch (const std::bad_alloc&) {
    return Error(ErrorCode::kDevice, prefix + "out of host memory", rank);
  } catch (const std::exception& error) {
    return Error(code_of_foreign(error), prefix + error.what(), rank);
  } catch (...) {
    return Error(ErrorCode::kUser, prefix + "an exception that is not a std::exception", rank);
  }
}

void rethrow_from(const std::string& where) {
  try {
    throw;
  } catch (const OutOfMemory& error) {
    throw OutOfMemory(where + ": " + error.what(), error.location());
  } catch (...) {
    throw caught_error(where + ": ");
  }
}

}  // namespace sluice
