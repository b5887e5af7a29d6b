// The other side of safetensors_test.py: `write FILE` writes known tensors; `read DIRECTORY` prints
// a line of name, type, shape and SHA-256 per tensor.
#include <array>
#include <cstdio>
#include <filesystem>
#include <string>

#include <sluice/error.hpp>

#include "runtime/files/sha256.hpp"
#include "tests/runtime/named_tensors.hpp"

namespace sluice {
namespace {

void write(const std::filesystem::path& path) {
  std::array<float, 6> f32 = {0, 1, 2, 3, 4, 5};
  std::array<std::int32_t, 2> i32 = {-7, 1 << 30};
  std::array<std::uint8_t, 3> u8 = {1, 2, 255};
  std::array<double, 1> f64 = {0.1};
  const std::vector<NamedTensor> tensors = {
      {"u8", {u8.data(), {DType::kU8, {3}}}},
      {"block.0.f32", {f32.data(), {DType::kF32, {2, 3}}}},
      {"i32 \"\xc3\xa4\"", {i32.data(), {DType::kI32, {2, 1}}}},
      {"f64", {f64.data(), {DType::kF64, {}}}},
      {"empty", {nullptr, {DType::kF32, {0, 4}}}}};
  write_safetensors(path, tensors, {{"step", "3"}});
}

void read(const std::filesystem::path& directory) {
  const WeightsDirectory weights(directory, "model");
  for (const std::string& name : weights.names()) {
    const SafetensorsFile::Entry& entry = *weights.find(name);
    std::printf("%s\t%s\t%s\n", name.c_str(), to_string(entry.spec).c_str(),
                sha256_hex(entry.bytes).c_str());
  }
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  const std::string command = argc == 3 ? argv[1] : "";
  try {
    if (command == "write") {
      sluice::write(argv[2]);
    } else if (command == "read") {
      sluice::read(argv[2]);
    } else {
      std::fprintf(stderr, "usage: safetensors_exchange write FILE | read DIRECTORY\n");
      return 2;
    }
  } catch (const sluice::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return sluice::exit_code(error.code());
  }
  return 0;
}
