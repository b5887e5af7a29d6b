// What a job tells its supervisor (runtime/options/supervisor_events.hpp), read from the text of
// one line.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

struct JobEvent {
  enum class Kind {
    kStart,  // steps begin; `step` are done, by a save, or 0
    kStep,   // `step` is done, `seconds` were spent in the steps of this start
    kSave,   // the save of `step` is complete
    kEnd,    // the last step is done and saved; otherwise as kStep
    kHang,   // ranks stopped answering, or wait for each other
  };
  Kind kind = Kind::kStep;
  std::uint64_t step = 0;
  double seconds = 0;
  bool deadlock = false;                // kHang: all ranks live and wait; no host is to blame
  std::vector<std::string> hosts = {};  // kHang: of the ranks that are lost
  std::vector<int> ranks = {};          // kHang
};

// Empty for text that is no event of these kinds, in any way: a line may be cut or mixed with
// another one.
[[nodiscard]] std::optional<JobEvent> parse_event(std::string_view json);

// The JSON of a line "sluice-event {...}"; else empty. `before`: what stands before it of another
// line, of which Open MPI 5 may put a part there; mpirun's "[1,0]<stderr>:" does not count.
struct EventText {
  std::string_view before, json;
};
[[nodiscard]] EventText event_in(std::string_view line);

}  // namespace sluice
