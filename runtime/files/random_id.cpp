#include "runtime/files/random_id.hpp"

#include <fmt/format.h>
#include <openssl/rand.h>

#include <array>

#include <sluice/error.hpp>

namespace sluice {

std::string random_id() {
  std::array<unsigned char, 16> bytes = {};
  if (RAND_bytes(bytes.data(), static_cast<int>(bytes.size())) != 1) {
    throw Error(ErrorCode::kInternal, "the crypto library has no random numbers");
  }
  std::string id;
  for (const unsigned char byte : bytes) id += fmt::format("{:02x}", byte);
  return id;
}

}  // namespace sluice
