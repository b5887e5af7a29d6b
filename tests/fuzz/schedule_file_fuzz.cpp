// Feeds arbitrary bytes to the readers of schedule files, as `sluice schedule --file` does, and
// what they accept to check, plan, verify, simulate and the writers. Fails where anything but a
// refusal escapes, where a refusal is not one printable line, or where a written file reads back
// otherwise.
//
// What the readers do not bound, the fuzzer does: -rss_limit_mb and -timeout end a run.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule_file.hpp>
#include <sluice/simulate.hpp>

namespace sluice {
namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

bool equal(const Schedule& one, const Schedule& two) {
  return one.placement == two.placement && one.micro_batches == two.micro_batches &&
         one.forward_only == two.forward_only && one.ranks == two.ranks;
}

// What the program does with an accepted file.
void use(const Schedule& schedule) {
  require(equal(parse_schedule_json(to_schedule_json(schedule)).schedule, schedule));
  if (const auto violation = check(schedule)) {
    (void)describe(schedule, *violation);
    return;
  }
  require(
      equal(parse_pytorch_csv(to_pytorch_csv(schedule), "again", CsvAlphabet::kCurrent).schedule,
            schedule));
  const Schedule lowered = lower(schedule, {});
  require(!check(lowered));
  require(verify(make_plan(lowered, {})).ok());
  (void)draw_svg(schedule, simulate(lowered, {.stages = {StageTimes{}}, .message = 1}));
}

void require_one_printable_line(std::string_view message) {
  require(!message.empty() && message.size() < 2000);
  for (const char c : message) require(c >= ' ' && c <= '~');
}

template <class Read>
void feed(const Read& read) {
  Schedule schedule;
  try {
    schedule = read();
  } catch (const Error& refusal) {
    require_one_printable_line(refusal.what());
    return;
  }
  use(schedule);
}

}  // namespace
}  // namespace sluice

// The name is libFuzzer's.
// NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (sluice::looks_like_json(text)) {
    sluice::feed([&] {
      sluice::ScheduleFile file = sluice::parse_schedule_json(text);
      const std::string again = sluice::to_schedule_json(file.schedule, file.made_for);
      sluice::require(sluice::parse_schedule_json(again).made_for == file.made_for);
      return std::move(file.schedule);
    });
  } else {
    for (const auto alphabet : {sluice::CsvAlphabet::kDetect, sluice::CsvAlphabet::kOlder}) {
      sluice::feed([&] { return sluice::parse_pytorch_csv(text, "fuzz", alphabet).schedule; });
    }
  }
  return 0;
}
