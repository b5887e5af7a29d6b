// What a test may do to the emulated CUDA and NCCL, and ask of them, that no program can of the
// real ones.
#pragma once

#include <cublasLt.h>
#include <nccl.h>

#include <cstddef>
#include <vector>

namespace sluice::emulated {

// Bytes of every cudaMalloc on the device that succeeded so far, in order, freed ones included.
[[nodiscard]] std::vector<std::size_t> allocations(int device);

// What there is in this process of cuMemCreate's memory, of cuMemAddressReserve's addresses and of
// cuMemMap's mappings, on all devices.
struct VirtualMemory {
  std::size_t allocations = 0, reservations = 0, mappings = 0;
  friend bool operator==(const VirtualMemory&, const VirtualMemory&) = default;
};
[[nodiscard]] VirtualMemory virtual_memory();

// Bytes of all copies from the device's memory to the host's given so far.
[[nodiscard]] std::size_t copied_to_host(int device);

// From now on ncclCommGetAsyncError reports `failure` for this communicator, as after the death of
// a peer; what it waits for stays blocked until ncclCommAbort. Programs that cannot be reached this
// way fail by SLUICE_EMULATED_NCCL_FAILURE=RANK:GROUP: the communicators of that rank report
// ncclRemoteError in place of starting their group of that number, counted from 0.
void fail_communicator(ncclComm_t communicator, ncclResult_t failure);

// What ncclCommGetAsyncError reports of every communicator that is made from now on, in place of it
// being ready. ncclSuccess at the start.
void set_communicator_status(ncclResult_t status);

// ncclConfig_t::maxCTAs of the communicators made in this process so far by this or any thread,
// NCCL_CONFIG_UNDEF_INT where none was given.
[[nodiscard]] std::vector<int> most_blocks_asked();

// Elements of the all-reduces that this process has called so far.
[[nodiscard]] std::vector<std::size_t> all_reduce_sizes();

// What the device says its compute capability is from now on, 75 for 7.5. 90 at the start.
void set_compute_capability(int device, int capability);

// How many multiprocessors the device says it has from now on. 4 at the start.
void set_multiprocessors(int device, int number);

// Host memory that one cudaHostAlloc gets at most, in bytes; more is cudaErrorMemoryAllocation from
// now on. No limit at the start.
void set_most_host_memory(std::size_t bytes);

// What cublasLtCreate and cublasLtMatmul answer from now on. CUBLAS_STATUS_SUCCESS at the start.
void set_cublas_status(cublasStatus_t status);

// Which of the algorithms that cublasLtMatmulAlgoGetHeuristic named the last cublasLtMatmul ran: 0
// large tiles, 1 a sum split over blocks, 2 small tiles. -1 before the first.
[[nodiscard]] int last_matmul_candidate();

// Bytes of memory that communicators of this process were told of by ncclCommRegister, less what
// was taken back.
[[nodiscard]] std::size_t registered_bytes();

// Priorities of the streams that live on the device, without its default stream, ascending: the
// first ones start first.
[[nodiscard]] std::vector<int> stream_priorities(int device);

// How many communicators ncclCommAbort has ended in this process so far.
[[nodiscard]] int aborted_communicators();

}  // namespace sluice::emulated
