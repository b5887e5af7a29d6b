#include <fmt/format.h>

#include <stdexcept>

#include <sluice/error.hpp>
#include <sluice/schedule_file.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/explore/schedule_report.hpp"
#include "runtime/files/mapped_file.hpp"

namespace sluice {
namespace {

LoadedSchedule load_csv(std::string_view text, const std::filesystem::path& path,
                        CsvAlphabet alphabet) {
  PytorchCsv csv = parse_pytorch_csv(text, path.stem().string(), alphabet);
  std::string source =
      fmt::format("PyTorch's CSV, {} alphabet", csv.alphabet == CsvAlphabet::kOlder
                                                    ? "older (B input half, BW whole backward)"
                                                    : "current (I input half, B whole backward)");
  if (csv.messages > 0) source += fmt::format("; {} messages checked and dropped", csv.messages);
  if (csv.other_dropped > 0) {
    source += fmt::format("; {} UNSHARD, RESHARD and REDUCE_GRAD dropped", csv.other_dropped);
  }
  return {std::move(csv.schedule), std::move(source)};
}

}  // namespace

LoadedSchedule load_schedule(const std::filesystem::path& path, CsvAlphabet alphabet) {
  const MappedFile file(path, ErrorCode::kPlan);
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()),
                              file.bytes().size());
  try {
    LoadedSchedule loaded = looks_like_json(text)
                                ? LoadedSchedule{parse_schedule_json(text), "Sluice's JSON"}
                                : load_csv(text, path, alphabet);
    loaded.source = fmt::format("{}: {}", path.string(), loaded.source);
    return loaded;
  } catch (const std::invalid_argument& error) {
    throw_error(ErrorCode::kPlan, "{}: {}", path.string(), error.what());
  }
}

}  // namespace sluice
