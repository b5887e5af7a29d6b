// The JSON header of a safetensors file, read strictly and without recursion.
//
// Format: https://github.com/huggingface/safetensors (README, "Format"): an object that maps tensor
// names to {"dtype", "shape", "data_offsets"}, and "__metadata__" to an object of strings.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/tensor.hpp>

namespace sluice {

struct SafetensorsHeader {
  struct Entry {
    std::string name;
    TensorSpec spec;
    std::size_t begin = 0, end = 0;  // bytes, relative to the end of the header
  };
  std::vector<Entry> entries;  // by offset
  std::map<std::string, std::string> metadata;
};

// The format's name of a type ("F32"), and back; null for a type that DType lacks.
[[nodiscard]] const char* safetensors_name_of(DType dtype);
[[nodiscard]] const DType* dtype_of_safetensors(std::string_view name);

// Throws std::invalid_argument naming the fault: JSON, a key twice or unknown, a dtype or rank
// that Tensor lacks, a shape that overflows or does not fit its offsets, offsets that leave a gap,
// overlap, or do not end at `data_bytes`.
[[nodiscard]] SafetensorsHeader parse_safetensors_header(std::string_view text,
                                                         std::size_t data_bytes);

}  // namespace sluice
