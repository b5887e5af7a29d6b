// Lines for the program that supervises a job (`sluice run`): what it must know and cannot see from
// the exit code of a launcher. runtime/program/supervise/job_output.hpp reads them.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>

namespace sluice {

// Set in the environment of a job that is supervised. The launcher of Open MPI passes each variable
// that begins with OMPI_ on to ranks on all hosts, and others to those on its own host alone.
inline constexpr const char* kSupervised = "SLUICE_SUPERVISED";
inline constexpr const char* kSupervisedByMpi = "OMPI_SLUICE_SUPERVISED";

[[nodiscard]] bool is_supervised() noexcept;

// "sluice-event <json>" as one line on standard error, in one write, where the job is supervised;
// otherwise nothing. `json`: one object without line breaks. Never throws.
void tell_supervisor(const std::string& json) noexcept;

// Where a training is. Rank 0 alone has one. For one thread.
class RunEvents {
 public:
  // `step`: steps done before this start; `save`: the newest save then, may be empty.
  void start(std::uint64_t step, const std::filesystem::path& save);
  // A step is done. At most one line a second, and one with each save.
  void step(std::uint64_t step, double seconds);
  // The newest save that a run can go on from; told where it is another one than before.
  void save(const std::filesystem::path& save);
  // No further step comes, and the last one is saved.
  void end(std::uint64_t step);

 private:
  std::filesystem::path save_;
  std::uint64_t step_ = 0;
  double seconds_ = 0;
  std::chrono::steady_clock::time_point told_;
};

}  // namespace sluice
