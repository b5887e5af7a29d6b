// Where the states of micro-batches are while they are away from their device (plan.hpp, "Moves").
// Internal to the engine.
//
// Moves are made one after the other in the order of their starts, beside the rank's actions: on a
// GPU to page-locked host memory by a stream of its own, else to a file by a thread. Calls come
// from one thread, which no call blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/options.hpp>

#include "comm/base/steady_seconds.hpp"

namespace sluice {

class StateStore {
 public:
  // Page-locked host memory through which a GPU's states go to a file.
  static constexpr std::size_t kStagedBytes = (std::size_t{4} << 20) + 4096;
  // The places of a stage.
  struct Shelf {
    int stage = 0, places = 0;
    std::size_t bytes = 0;  // of each
  };
  struct Move {
    bool leaves = true;  // the device; else comes back
    int stage = 0, micro_batch = 0, place = 0;
    std::span<std::byte> state = {};  // as many bytes as a place, or more
  };
  // Of moves; they count from 1.
  using Number = std::uint64_t;
  // A move with the time that it took.
  struct Made {
    Move move;
    TimeSpan time;
  };

  // Null where there is no place. Throws what ScratchFile and memory throw. `compute` outlives it.
  [[nodiscard]] static std::unique_ptr<StateStore> make(const PipelineOptions::Offload& offload,
                                                        std::span<const Shelf> shelves,
                                                        ComputeContext& compute);
  virtual ~StateStore() = default;
  StateStore(const StateStore&) = delete;
  StateStore& operator=(const StateStore&) = delete;

  // After all work on the compute stream so far. The state's memory is the move's until it is done.
  virtual Number start(const Move& move) = 0;
  // Whether later work of the host and the compute stream runs after the move and those before it.
  // Throws what a move has thrown.
  [[nodiscard]] virtual bool done(Number move) = 0;

  // Those since the last call that are known, all done. Valid until the next start().
  [[nodiscard]] virtual std::span<const Made> take_made() { return {}; }

  // What a slot's memory starts at a multiple of, and a place has a multiple of bytes.
  [[nodiscard]] static std::size_t alignment(const PipelineOptions::Offload& offload);

 protected:
  explicit StateStore(std::span<const Shelf> shelves);
  [[nodiscard]] std::size_t bytes() const { return bytes_; }  // of all places
  struct Room {
    std::size_t offset = 0, bytes = 0;
  };
  [[nodiscard]] Room room_of(const Move& move) const;

 private:
  std::map<int, Room> shelves_;  // by stage: the first place
  std::size_t bytes_ = 0;
};

}  // namespace sluice
