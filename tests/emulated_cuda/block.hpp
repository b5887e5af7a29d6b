// Runs the blocks of a kernel on the calling thread: one block after the other, the threads of a
// block as fibers that change over only at barriers and warp exchanges. Between two of those,
// thread 0 runs first and alone, then thread 1, and so on, so that a missing barrier gives wrong
// values instead of a race that happens to go well. Threads that never wait share one fiber: a
// block without synchronisation costs a function call per thread.
//
// Whatever would hang or be undefined on a GPU (a barrier that not all threads of the block reach,
// threads waiting in different places, a warp exchange that names an ended lane) ends the process
// by abort() after one line on stderr that names kernel, block, threads and source lines.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>

namespace sluice::emulated {

struct Launch {
  const char* name;  // what the kernel is for; outlives the launch
  const void* function;
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes;
};

// Puts a kernel on a stream: `run_thread` is called once per thread of the grid, with what the
// functions below return set for that thread. Refuses what CUDA refuses.
cudaError_t enqueue_kernel(const Launch& launch, cudaStream_t stream,
                           std::function<void()> run_thread);

// Runs all blocks here and now.
void run_blocks(const Launch& launch, const std::function<void()>& run_thread);

// What kernel code knows about where it is.
struct Place {
  uint3 thread{};
  uint3 block{};
  dim3 block_shape;
  dim3 grid_shape;
};

// The functions from here on are for kernel code only.

// Of the running thread; fibers change it.
extern constinit thread_local const Place* running_place;

[[nodiscard]] inline const Place& place() { return *running_place; }

// 16-byte aligned, bytes 0xFF at the start of each block.
[[nodiscard]] void* dynamic_shared_memory();

// All threads of the block meet; the last one to arrive calls `finish(argument)` (may be null)
// before any goes on.
void block_barrier(std::source_location where, void (*finish)(void*) = nullptr,
                   void* argument = nullptr);

// One slot of 8 bytes per thread of the block, kept between barriers.
[[nodiscard]] std::uint64_t* block_slots();
// Alternates between two words of the block from one call per thread to the next.
[[nodiscard]] std::uint64_t* block_result();

enum class WarpOperation : std::uint8_t {
  kBarrier,  // returns 0
  kShuffle,  // returns lane `source`'s value; all ones where that lane takes no part
  kBallot,   // returns the bits of the lanes whose value is not 0
  kReduce,   // see warp_reduction()
};

// All lanes in `mask` that exist meet and exchange values. `mask` holds the caller.
std::uint64_t warp_exchange(std::uint32_t mask, WarpOperation operation, std::uint64_t value,
                            int source, std::source_location where);

// All 32 lanes meet; the last one to arrive calls `reduce` with their values, all ones where a lane
// does not exist, and each returns what is then in its place.
using WarpReduction = void (*)(std::uint64_t* values);
std::uint64_t warp_reduction(std::uint64_t value, WarpReduction reduce, std::source_location where);

// Of the running thread in its warp.
[[nodiscard]] int lane();

// cp.async: the copy happens in the calling thread's finish_copies(), not before, so that what
// reads too early finds something else. Of `bytes`, the first `existing` are read, the rest are
// zeros.
void copy_later(void* to, const void* from, std::size_t bytes, std::size_t existing);
void finish_copies();

}  // namespace sluice::emulated
