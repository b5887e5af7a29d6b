// Tells the program that supervises a training where the training is
// (runtime/options/supervisor_events.hpp). Rank 0 alone has one. Nothing happens where nobody
// supervises. For one thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>

namespace sluice {

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
