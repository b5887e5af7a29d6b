#include <fmt/format.h>

#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/files/sha256.hpp"
#include "runtime/models/model_tensors.hpp"
#include "runtime/options/option_table.hpp"
#include "runtime/options/process.hpp"
#include "runtime/saves/save_commands.hpp"

namespace sluice {
namespace {

constexpr const char* kAboutDigest =
    "Prints the SHA-256 of every parameter in DIR (the little-endian bytes of its fp32 values), "
    "one\n"
    "line '<sha256>  <name>' each, sorted by name; then '<sha256>  total', the SHA-256 of those\n"
    "lines. DIR is what 'sluice train --save DIR' wrote, of which it takes the newest step, one "
    "step,\n"
    "or a directory of Hugging Face. Two runs ended with the same parameters, to the bit, where "
    "the\n"
    "last lines agree. How the ranks that saved computed (kernels, matrix library, threads, blocks "
    "of\n"
    "rows) goes to standard error.";

}  // namespace

int digest_command(const std::vector<std::string>& arguments) {
  std::string directory;
  Verify verify = Verify::kFull;
  OptionTable table("sluice digest DIR [options]", kAboutDigest);
  table.add_argument("DIR", directory);
  table.add_choice("verify", verify, {{"full", Verify::kFull}, {"off", Verify::kOff}},
                   "what is compared with the hashes of a save: all its files, or nothing");
  return run_guarded(table, arguments, [&] {
    const std::filesystem::path save = newest_save(directory);
    SavedTensors tensors = open_model_tensors(save, verify);
    const SaveSelection found = select_saves(save);
    if (!found.candidates.empty()) {
      for (const std::string& arithmetic : found.candidates.front().state.arithmetic) {
        fmt::print(stderr, "computed with {}\n", arithmetic);
      }
    }
    tensors.prefer_masters();
    std::vector<ParameterDigest> digests;
    std::vector<float> values;
    for (const std::string& name : tensors.parameters()) {
      values.resize(static_cast<std::size_t>(tensors.find(name)->shape.elements()));
      tensors.read(name, values);
      digests.push_back({name, sha256_hex(std::as_bytes(std::span<const float>(values)))});
      fmt::print("{}  {}\n", digests.back().sha256, name);
    }
    fmt::print("{}  total\n", digest_all(digests));
  });
}

}  // namespace sluice
