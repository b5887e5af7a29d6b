// Feeds arbitrary bytes to the reader of option files, and what it accepts to a table with every
// kind of option. The values that the table then has must give the same values again. For one file
// in 64 the table also reads the file itself: Boost, which that runs through, is far slower
// than the rest.
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>

#include "runtime/program/options/option_table.hpp"
#include "tests/fuzz/fuzz_tools.hpp"

namespace sluice {
namespace {

enum class Letter : std::uint8_t { kA, kB, kC };

// A command's targets and its table. Neither copied nor moved: the table refers to the targets.
struct Command {
  Command() {
    table.allow_config_file();
    table.add_integer("steps", steps, 1, 1000, "of the run");
    table.add_integer("layers", layers, -5, std::numeric_limits<std::int64_t>::max(), "of it",
                      "auto", "all");
    table.add_integer("seed", seed, 0, std::numeric_limits<std::uint64_t>::max(), "of numbers");
    table.heading("Real numbers");
    table.add_real("dropout", dropout, {.low = 0, .high = 1, .high_open = true}, "share");
    table.add_real("learning-rate", rate, {.low = -1e300, .high = 1e300}, "of a step");
    table.heading("Words");
    table.add_text("save", save, "DIR", "where to");
    table.add_choice("optimizer", optimizer, {"sgd", "adamw"}, "which");
    table.add_choice("letter", letter,
                     {{"alpha", Letter::kA}, {"beta", Letter::kB}, {"gamma", Letter::kC}}, "one");
    table.add_flag("local", local, "a flag");
    table.add_flag("untie", tied, "a flag that clears", false);
  }
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  int steps = 10;
  std::int64_t layers = 0;
  std::uint64_t seed = 1;
  float dropout = 0.1f;
  double rate = 1e-3;
  std::string save, optimizer = "sgd";
  Letter letter = Letter::kB;
  bool local = false, tied = true;
  OptionTable table{"sluice fuzz [options]", "Reads options."};
};

void feed(std::string_view text) {
  static const MemoryDirectory directory;
  const std::string path = directory.write("options.conf", text).string();
  OptionValues lines;
  if (!accepts({ErrorCode::kUsage}, [&] { lines = read_option_file(path); })) return;
  Command under, again;
  const bool legal = accepts({ErrorCode::kUsage}, [&] { under.table.lay_under(lines, path); });
  if (std::hash<std::string_view>()(text) % 64 == 0) {
    Command from_file;
    require(legal == accepts({ErrorCode::kUsage}, [&] {
              from_file.table.parse({"--config", path});
            }));
    require(!legal || from_file.table.values() == under.table.values());
  }
  if (!legal) return;
  again.table.lay_under(under.table.values(), path);
  require(again.table.values() == under.table.values());
}

}  // namespace
}  // namespace sluice

// The name is libFuzzer's.
// NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  sluice::feed(sluice::as_text(data, size));
  return 0;
}
