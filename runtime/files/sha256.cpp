#include "runtime/files/sha256.hpp"

#include <fmt/format.h>
#include <openssl/evp.h>

#include <array>

#include <sluice/error.hpp>

namespace sluice {

std::string sha256_hex(std::span<const std::byte> bytes) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest = {};
  unsigned int size = 0;
  if (EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, EVP_sha256(), nullptr) != 1) {
    throw Error(ErrorCode::kInternal, "the crypto library cannot compute SHA-256");
  }
  std::string hex;
  for (unsigned int i = 0; i < size; ++i) hex += fmt::format("{:02x}", digest[i]);
  return hex;
}

}  // namespace sluice
