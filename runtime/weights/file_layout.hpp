// Parameters in files that call and lay them out in another way (FileLayout): shapes, and values
// between a parameter's f32 rows and a file's bytes.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <sluice/parameter.hpp>
#include <sluice/tensor.hpp>

namespace sluice {

// The parts of a parameter of this shape: those of the layout, or the parameter itself. Throws
// Error(kUsage) where they have other rows than the parameter, or a part that is no matrix is
// transposed.
[[nodiscard]] std::vector<FilePart> parts_of(const FileLayout& layout, const std::string& parameter,
                                             const Shape& shape);
// Throws Error(kUsage) where the files of a model with these parameters would have two tensors of
// one name, or where a part has no name.
void require_own_names(const FileLayout& layout, std::span<const std::string> parameters);

// What the file holds of a part.
[[nodiscard]] Shape part_shape(const FilePart& part, const Shape& parameter);
// The shape of a parameter whose first part lies in the file with this shape.
[[nodiscard]] Shape parameter_shape(std::span<const FilePart> parts, const Shape& first);

// Writes the part's values to `rows`, which begins at its first row of the parameter. `bytes` may
// lie anywhere. Requires: a type that is_float() but f64, bytes of part_shape().
void read_part(const FilePart& part, std::span<const std::byte> bytes, DType dtype,
               std::span<float> rows);

// The other way, in a type that is f32 or bf16. Returns bytes of `rows` itself or of `scratch`.
[[nodiscard]] std::span<const std::byte> write_part(const FilePart& part,
                                                    std::span<const float> rows, DType dtype,
                                                    std::vector<std::byte>& scratch);

}  // namespace sluice
