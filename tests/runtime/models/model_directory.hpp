// Directories of models as transformers writes them, from golden.json.
#pragma once

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/tensor.hpp>

#include "runtime/weights/file_layout.hpp"
#include "tests/golden.hpp"
#include "tests/runtime/named_tensors.hpp"

namespace sluice::testing {

[[nodiscard]] inline const nlohmann::json& golden_models() {
  static const nlohmann::json golden = read_golden(SLUICE_GOLDEN_MODELS);
  return golden;
}

// The tensors of one model, to be written or damaged.
class ModelFiles {
 public:
  explicit ModelFiles(const nlohmann::json& golden) : config(golden.at("config")) {
    const std::string type = golden.at("dtype");
    dtype_ = type == "f32" ? DType::kF32 : type == "f16" ? DType::kF16 : DType::kBf16;
    for (const auto& [name, shape] : golden.at("tensors").items()) add(name, golden_shape(shape));
  }

  void add(const std::string& name, const Shape& shape) {
    HostTensor& tensor = tensors_[name];
    std::vector<float> values(static_cast<std::size_t>(shape.elements()));
    // values() of golden.py, whose formula knows a gain by "norm".
    const std::size_t norm = name.ends_with(".weight") ? name.find("ln_") : std::string::npos;
    fill_by_name(norm == std::string::npos ? name : std::string(name).replace(norm, 3, "norm_"),
                 values);
    tensor.spec = {dtype_, shape};
    tensor.bytes.resize(tensor.spec.bytes());
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (dtype_ == DType::kF32) std::memcpy(&tensor.bytes[i * 4], &values[i], 4);
      const F16 half = to_f16(values[i]);
      const Bf16 brain = to_bf16(values[i]);
      if (dtype_ == DType::kF16) std::memcpy(&tensor.bytes[i * 2], &half, 2);
      if (dtype_ == DType::kBf16) std::memcpy(&tensor.bytes[i * 2], &brain, 2);
    }
  }
  void remove(const std::string& name) { tensors_.erase(name); }
  [[nodiscard]] HostTensor& at(const std::string& name) { return tensors_.at(name); }

  // In `parts` files.
  void write(const std::filesystem::path& directory, int parts = 1) {
    std::filesystem::create_directories(directory);
    std::ofstream(directory / "config.json") << config.dump(2);
    std::map<std::string, std::string> file_of;
    std::size_t bytes = 0;
    for (int part = 0; part < parts; ++part) {
      std::vector<NamedTensor> named;
      std::size_t index = 0;
      const std::string file = weights_file_name("model", part, parts);
      for (auto& [name, tensor] : tensors_) {
        if (static_cast<int>(index++ % static_cast<std::size_t>(parts)) != part) continue;
        named.push_back({name, tensor.tensor()});
        file_of[name] = file;
        bytes += tensor.spec.bytes();
      }
      write_safetensors(directory / file, named, {{"format", "pt"}});
    }
    if (parts > 1) (void)write_weights_index(directory, "model", file_of, bytes);
  }

  nlohmann::json config;

 private:
  DType dtype_ = DType::kF32;
  std::map<std::string, HostTensor> tensors_;
};

}  // namespace sluice::testing
