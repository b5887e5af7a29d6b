#include <fmt/format.h>
#include <openssl/evp.h>

#include <array>
#include <span>

#include "comm/error.hpp"
#include "runtime/weights.hpp"

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

std::vector<ParameterDigest> digest_parameters(const WeightsDirectory& weights) {
  std::vector<ParameterDigest> digests;
  for (const std::string& name : weights.names()) {
    digests.push_back({name, sha256_hex(weights.find(name)->bytes)});
  }
  return digests;
}

std::string digest_all(std::span<const ParameterDigest> parameters) {
  std::string lines;
  for (const ParameterDigest& parameter : parameters) {
    lines += fmt::format("{}  {}\n", parameter.sha256, parameter.name);
  }
  return sha256_hex(std::as_bytes(std::span<const char>(lines)));
}

}  // namespace sluice
