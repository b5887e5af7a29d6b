#include "comm/group/rethrow_from.hpp"

#include <sluice/device.hpp>

#include "comm/base/caught_error.hpp"

namespace sluice {

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
