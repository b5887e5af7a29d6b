// Compares the files of a save with what its state.json says. No MPI.
#pragma once

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "runtime/checkpoint/save_state.hpp"

namespace sluice {

// Bytes [first, first + count) of a file, to be hashed as a whole. A file without blocks is one
// piece.
struct HashPiece {
  std::string file;
  std::uint64_t first = 0, count = 0;
  std::string expected;
};

// All pieces of a save, in order of file and position: blocks where a file has them.
[[nodiscard]] std::vector<HashPiece> hash_pieces(const SaveState& state);
// Those of the blocks that hold (a part of) one of `tensors`, and headers; files of no tensor (the
// index) whole. Opens the weights files that hold them.
[[nodiscard]] std::vector<HashPiece> hash_pieces_of(const std::filesystem::path& directory,
                                                    const SaveState& state,
                                                    const std::set<std::string>& tensors);

// Throws Error(kWeights): a file that is missing, is no regular file, or has another size than
// state.json says, naming file, expected and found. Reads no contents.
void require_complete(const std::filesystem::path& directory, const SaveState& state);
// Reads and hashes `pieces`. Throws Error(kWeights) for the first that differs: file, bytes, the
// tensors in it (where the file's header is sound), expected and found.
void require_hashes(const std::filesystem::path& directory, const SaveState& state,
                    const std::vector<HashPiece>& pieces);
// Throws Error(kWeights) where a weights file's own header disagrees with state.json's tensors:
// name, type, shape or file. Reads headers only, of `files` (all where empty).
void require_headers(const std::filesystem::path& directory, const SaveState& state,
                     const std::set<std::string>& files = {});
// All of these, of every file; the hashes only if asked to.
void require_sound(const std::filesystem::path& directory, const SaveState& state,
                   bool hashes = true);

}  // namespace sluice
