#include "runtime/checkpoint/save_files.hpp"

#include <algorithm>
#include <set>

#include "comm/base/index.hpp"
#include "runtime/files/atomic_file.hpp"
#include "runtime/files/checksum.hpp"
#include "runtime/weights/file_layout.hpp"

namespace sluice {
namespace fs = std::filesystem;
namespace {

// Hashes a file while it is written.
class FileHash {
 public:
  void add(std::span<const std::byte> bytes) {
    whole_.add(bytes);
    bytes_ += bytes.size();
    while (!bytes.empty()) {
      const auto piece = bytes.first(std::min(bytes.size(), kHashBlock - in_block_));
      block_.add(piece);
      in_block_ += piece.size();
      bytes = bytes.subspan(piece.size());
      if (in_block_ == kHashBlock) end_block();
    }
  }
  [[nodiscard]] SavedFile finish(std::string name) {
    if (in_block_ > 0) end_block();
    return {std::move(name), bytes_, whole_.finish(), std::move(blocks_)};
  }

 private:
  void end_block() {
    blocks_.push_back(block_.finish());
    in_block_ = 0;
  }

  Checksum whole_, block_;
  std::size_t in_block_ = 0;
  std::uint64_t bytes_ = 0;
  std::vector<std::string> blocks_;
};

}  // namespace

SaveParts save_parts(const std::vector<int>& tensors, const Topology& topology) {
  SaveParts parts;
  parts.part_of_rank.assign(at(topology.ranks()), -1);
  for (int pipeline = 0; pipeline < topology.size.pipeline; ++pipeline) {
    for (int replica = 0; replica < topology.size.replica; ++replica) {
      for (int tensor = 0; tensor < topology.size.tensor; ++tensor) {
        const std::size_t rank = at(topology.rank_of({pipeline, replica, tensor}));
        if (tensors[rank] > 0) parts.part_of_rank[rank] = parts.count++;
      }
    }
  }
  return parts;
}

SaveTensor save_tensor(const NamedTensor& named) {
  const std::span bytes(named.tensor.as<const std::byte>(), named.tensor.spec.bytes());
  return {{.name = named.name, .spec = named.tensor.spec},
          [bytes](std::vector<std::byte>&) { return bytes; }};
}

void add_parts(const NamedTensor& parameter, const FileLayout& layout, DType dtype,
               std::vector<SaveTensor>& tensors) {
  const Shape& shape = parameter.tensor.spec.shape;
  const std::span<const float> values(parameter.tensor.as<float>(),
                                      static_cast<std::size_t>(shape.elements()));
  const bool whole = !layout.contains(parameter.name);
  std::int64_t row = 0;
  std::size_t first = 0;
  for (const FilePart& part : parts_of(layout, parameter.name, shape)) {
    SaveTensor tensor;
    tensor.listed = {.name = part.name, .spec = {dtype, part_shape(part, shape)}};
    if (!whole) {
      tensor.listed.parameter = parameter.name;
      tensor.listed.first_row = row;
      tensor.listed.rows = part.rows;
      tensor.listed.transposed = part.transposed;
    }
    const std::span<const float> rows =
        values.subspan(first, static_cast<std::size_t>(tensor.listed.spec.shape.elements()));
    tensor.bytes = [part, rows, dtype](std::vector<std::byte>& scratch) {
      return write_part(part, rows, dtype, scratch);
    };
    tensors.push_back(std::move(tensor));
    row += part.rows;
    first += rows.size();
  }
}

void write_save_file(const fs::path& directory, const std::string& name,
                     std::span<const SaveTensor> tensors,
                     const std::map<std::string, std::string>& metadata, SaveState& state) {
  FileHash hash;
  std::vector<FileTensor> files;
  for (const SaveTensor& tensor : tensors) {
    files.push_back({tensor.listed.name, tensor.listed.spec, tensor.bytes});
  }
  write_safetensors(directory / name, files, metadata,
                    [&](std::span<const std::byte> bytes) { hash.add(bytes); });
  state.files.push_back(hash.finish(name));
  for (const SaveTensor& tensor : tensors) {
    state.tensors.push_back(tensor.listed);
    state.tensors.back().file = name;
  }
}

void write_save_text(const fs::path& directory, const std::string& name, std::string_view text,
                     SaveState& state) {
  write_file(directory / name, text);
  state.files.push_back(
      {name, text.size(), checksum_hex(std::as_bytes(std::span(text))), /*blocks=*/{}});
}

void write_save_index(const fs::path& directory, const std::string& kind, SaveState& state) {
  std::map<std::string, std::string> file_of;
  std::set<std::string> files;
  std::size_t bytes = 0;
  for (const SavedTensor& tensor : state.tensors) {
    if (!tensor.file.starts_with(kind)) continue;
    file_of[tensor.name] = tensor.file;
    files.insert(tensor.file);
    bytes += tensor.spec.bytes();
  }
  if (files.empty() || (files.size() == 1 && *files.begin() == weights_file_name(kind, 0, 1))) {
    return;
  }
  const std::string text = write_weights_index(directory, kind, file_of, bytes);
  state.files.push_back({weights_index_name(kind), text.size(),
                         checksum_hex(std::as_bytes(std::span(text))), /*blocks=*/{}});
}

}  // namespace sluice
