#include "runtime/files/keyed_digest.hpp"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <sluice/error.hpp>

namespace sluice {

SecretKey random_key() {
  SecretKey key{};
  if (RAND_bytes(key.data(), static_cast<int>(key.size())) != 1) {
    throw Error(ErrorCode::kInternal, "the crypto library has no random numbers");
  }
  return key;
}

SecretKey keyed_digest(const SecretKey& key, std::span<const std::byte> bytes) {
  SecretKey digest{};
  unsigned int size = 0;
  if (HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
           reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest.data(),
           &size) == nullptr ||
      size != digest.size()) {
    throw Error(ErrorCode::kInternal, "the crypto library cannot compute a keyed SHA-256");
  }
  return digest;
}

bool same_digest(std::span<const std::uint8_t> a, std::span<const std::uint8_t> b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace sluice
