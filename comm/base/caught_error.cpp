#include "comm/base/caught_error.hpp"

#include <exception>
#include <filesystem>
#include <new>

namespace sluice {

Error caught_error(const std::string& prefix, int rank) {
  try {
    throw;
  } catch (const Error& error) {
    if (error.rank() >= 0) return error;
    return Error(error.code(), prefix + error.what(), rank, error.location());
  } catch (const std::bad_alloc&) {
    return Error(ErrorCode::kDevice, prefix + "out of host memory", rank);
  } catch (const std::filesystem::filesystem_error& error) {
    return Error(ErrorCode::kIo, prefix + error.what(), rank);
  } catch (const std::exception& error) {
    return Error(ErrorCode::kUser, prefix + error.what(), rank);
  } catch (...) {
    return Error(ErrorCode::kUser, prefix + "an exception that is not a std::exception", rank);
  }
}

}  // namespace sluice
