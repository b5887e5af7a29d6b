#include "comm/group/rethrow_from.hpp"

#include <exception>
#include <new>

#include <sluice/device.hpp>
#include <sluice/error.hpp>

namespace sluice {

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
    throw Error(ErrorCode::kUser, where + ": " + kNoStdException);
  }
}

}  // namespace sluice
