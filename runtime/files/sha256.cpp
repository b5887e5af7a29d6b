#include "runtime/files/sha256.hpp"

#include <fmt/core.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <sluice/error.hpp>

namespace sluice {
namespace {

void require(bool done, const char* what) {
  if (!done) throw Error(ErrorCode::kInternal, fmt::format("the crypto library {}", what));
}

std::string hex(std::span<const unsigned char> bytes) {
  std::string text;
  for (const unsigned char byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

void randomize(std::span<unsigned char> bytes) {
  require(RAND_bytes(bytes.data(), static_cast<int>(bytes.size())) == 1, "has no random numbers");
}

}  // namespace

std::string sha256_hex(std::span<const std::byte> bytes) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest = {};
  unsigned int size = 0;
  require(EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, EVP_sha256(), nullptr) == 1,
          "cannot compute SHA-256");
  return hex(std::span(digest).first(size));
}

std::string random_id() {
  std::array<unsigned char, 16> bytes = {};
  randomize(bytes);
  return hex(bytes);
}

SecretKey random_key() {
  SecretKey key{};
  randomize(key);
  return key;
}

SecretKey keyed_digest(const SecretKey& key, std::span<const std::byte> bytes) {
  SecretKey digest{};
  unsigned int size = 0;
  const bool done = HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
                         reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(),
                         digest.data(), &size) != nullptr;
  require(done && size == digest.size(), "cannot compute a keyed SHA-256");
  return digest;
}

bool same_digest(std::span<const std::uint8_t> a, std::span<const std::uint8_t> b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace sluice
