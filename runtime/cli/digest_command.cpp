#include <fmt/format.h>

#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/checkpoint/weights.hpp"
#include "runtime/cli/commands.hpp"
#include "runtime/options/option_table.hpp"
#include "runtime/options/process.hpp"

namespace sluice {
namespace {

constexpr const char* kAbout =
    "Prints the SHA-256 of every parameter saved in DIR (its little-endian bytes), one line\n"
    "'<sha256>  <name>' each, sorted by name; then '<sha256>  total', the SHA-256 of those lines.\n"
    "DIR is what 'sluice train --save DIR' wrote, of which it takes the newest step, or one step.\n"
    "Two runs ended with the same parameters, to the bit, where the last lines agree.";

}  // namespace

int digest_command(const std::vector<std::string>& arguments) {
  std::string directory;
  OptionTable table("sluice digest DIR", kAbout);
  table.add_argument("DIR", directory);
  return run_guarded(table, arguments, [&] {
    const auto digests = digest_parameters(WeightsDirectory(newest_save(directory), "model"));
    for (const ParameterDigest& digest : digests) {
      fmt::print("{}  {}\n", digest.sha256, digest.name);
    }
    fmt::print("{}  total\n", digest_all(digests));
  });
}

}  // namespace sluice
