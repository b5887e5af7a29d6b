// state.json: what Sluice knows about one save. One file holds all of it; a directory without it is
// no save. The names in it come from a file, so they are checked before use.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sluice/options.hpp>
#include <sluice/parameter.hpp>
#include <sluice/tensor.hpp>

namespace sluice {

// Bytes of a weights file per hash.
constexpr std::size_t kHashBlock = std::size_t{4} << 20;

// A file of the save. Hashes are XXH3-128 as 32 hexadecimal digits, as `xxhsum -H2` prints them.
struct SavedFile {
  std::string name;  // of a file in the save's directory; no path
  std::uint64_t bytes = 0;
  std::string hash;                 // of the whole file
  std::vector<std::string> blocks;  // of each kHashBlock bytes, the last one shorter; weights only
};

// What a tensor [count] holds that is a part of a larger one: elements [first, first + count) of a
// slice of the whole, or of all of it, in the order of its memory.
struct SavedRange {
  std::string whole;  // its name
  Shape shape;        // of the whole
  std::int64_t first = 0;
  Slice slice = {};
  friend bool operator==(const SavedRange&, const SavedRange&) = default;
};

// A tensor of a weights file.
struct SavedTensor {
  std::string name;  // a parameter's or the model's own, or "<kind>.<parameter>" of the optimizer
  std::string file = {};
  TensorSpec spec = {};
  // What it holds where it is not the parameter of its name: rows from first_row on.
  std::string parameter = {};
  std::int64_t first_row = 0, rows = 0;
  bool transposed = false;
  std::optional<SavedRange> range = {};  // or elements of a state, whose name differs from its own
};

inline constexpr const char* kMicroBatchOrder = "micro_batch_order";

struct SaveState {
  // Those that are read. A save is written in the oldest that has what it holds: 4 has ranges.
  static constexpr int kFormat = 4, kOldestFormat = 2;

  std::string save;            // random, of this save; 32 hexadecimal digits
  std::string run;             // random, of the run that began it; resumed runs keep it
  std::uint64_t sequence = 0;  // grows with every save in a directory: the newest has the largest
  std::uint64_t step = 0;
  std::string time;           // UTC, "2026-01-31T12:00:00Z"
  bool weights_only = false;  // no optimizer state: cannot be resumed
  // "ranks", "pipeline", "replicas", "stages", above 1 "tensor" and "tensor_shards", and, where
  // they are more than replicas, "virtual_replicas"; kMicroBatchOrder, 1, where that is the order.
  std::map<std::string, int> layout;
  std::vector<std::string> arithmetic;  // as JobLayout's, of all ranks; none: not recorded
  Facts options;                        // of the program, in the order of its help
  std::string model;                    // JSON text of what builds the model; may be empty
  Facts data;                           // TokenFile::identity() and the like
  std::vector<std::uint64_t> skipped;   // steps that changed nothing: their loss was not finite
  // JSON text by name, of the data source and of an embedding program; their tensors are in
  // user.safetensors as "<name>/<tensor>".
  std::map<std::string, std::string> user;
  std::vector<SavedFile> files;
  std::vector<SavedTensor> tensors;

  [[nodiscard]] int virtual_replicas() const;  // of `layout`; 0: not recorded
  [[nodiscard]] int tensor_shards() const;     // likewise; from 1
  [[nodiscard]] GradientOrder gradient_order() const;
};

// Files beside the weights that make a save a model's directory for other programs: config.json,
// tokenizer.json and the like.
[[nodiscard]] std::span<const std::string_view> model_file_names();

// Names that are legal for a file of a save: model.safetensors, model-00001-of-00002.safetensors,
// model.safetensors.index.json, likewise optimizer, user.safetensors, model_file_names().
// (state.json cannot name itself.)
[[nodiscard]] bool is_save_file_name(std::string_view name);

// A line where ranks that saved computed otherwise than `now`, which is JobLayout's; empty where
// all compute alike, or it was not recorded.
[[nodiscard]] std::string arithmetic_change(const std::vector<std::string>& saved,
                                            const std::map<std::string, std::vector<int>>& now);

// Whether `text` can be a value of SaveState::user: JSON of at most 100 levels and 4,000 keys an
// object.
[[nodiscard]] bool is_state_json(std::string_view text);

// Whether `text` can be SaveState::save or SaveState::run: 32 hexadecimal digits, as of a hash.
[[nodiscard]] bool is_id(std::string_view text);

[[nodiscard]] std::string to_json_text(const SaveState& state);
// Throws Error(kWeights) naming `path` and the field that is missing, of a wrong type or out of
// range; a file name that is_save_file_name() refuses; a file or tensor twice; a tensor in a file
// that is not listed; a range in a format without ranges, or beyond its slice or whole; hashes that
// do not number what `bytes` says; another format, saying which program would read it. Bounded:
// memory stays within a small multiple of the text.
[[nodiscard]] SaveState parse_save_state(std::string_view text, const std::filesystem::path& path);
// Reads and parses DIRECTORY/state.json. At most 1 GiB.
[[nodiscard]] SaveState read_save_state(const std::filesystem::path& directory);

}  // namespace sluice
