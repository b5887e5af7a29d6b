#include "runtime/checkpoint/save_files.hpp"

#include <algorithm>
#include <set>

#include "comm/base/index.hpp"
#include "runtime/files/checksum.hpp"

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

SaveParts save_parts(const std::vector<SavedParameter>& shares, const Topology& topology) {
  SaveParts parts;
  parts.part_of_rank.assign(at(topology.ranks()), -1);
  for (const SavedParameter& share : shares) {
    parts.part_of_rank[at(topology.rank_of(share.replica, share.rank))] = 0;
  }
  for (int rank = 0; rank < topology.pipeline; ++rank) {
    for (int replica = 0; replica < topology.replicas; ++replica) {
      int& part = parts.part_of_rank[at(topology.rank_of(replica, rank))];
      if (part == 0) part = parts.count++;
    }
  }
  return parts;
}

void write_save_file(const fs::path& directory, const std::string& name,
                     std::span<const NamedTensor> tensors,
                     const std::map<std::string, std::string>& metadata, SaveState& state) {
  FileHash hash;
  write_safetensors(directory / name, tensors, metadata,
                    [&](std::span<const std::byte> bytes) { hash.add(bytes); });
  state.files.push_back(hash.finish(name));
  for (const NamedTensor& named : tensors) {
    state.tensors.push_back(
        {named.name, name, named.tensor.spec, 0, named.tensor.spec.shape.elements()});
  }
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
  state.files.push_back(write_weights_index(directory, kind, file_of, bytes));
}

}  // namespace sluice
