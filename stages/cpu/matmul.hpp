// Matmuls from a cache of prepared library primitives. Making a primitive costs 6 to
// 370 microseconds; running one allocates nothing in Sluice. So each distinct matmul is made once,
// before the first step, and found by its full specification.
//
// The specification fixes everything that a matmul's bits depend on: sizes, leading dimensions,
// transposition, types, bias, accumulation in place; threads and scratch are the cache's own.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include <sluice/device.hpp>

#include "stages/compute/matmul_spec.hpp"

namespace sluice {

// Used from one thread.
class MatmulCache {
 public:
  // Matmuls run on the OpenMP team of the thread that makes the cache.
  explicit MatmulCache(Device device);
  ~MatmulCache();
  MatmulCache(const MatmulCache&) = delete;
  MatmulCache& operator=(const MatmulCache&) = delete;

  // Makes the primitive on first use; sums without terms, where k is 0, need none. Throws
  // Error(kDevice) with the specification where the library cannot make or run it.
  void run(const MatmulSpec& spec, const void* a, const void* b, const void* bias, void* c);
  // Makes the primitive and its scratch, runs nothing.
  void prepare(const MatmulSpec& spec);
  [[nodiscard]] std::size_t size() const;  // primitives made
  // Whether matmuls of bf16 run in f32 on widened copies of their operands
  // (stages/cpu/widened.hpp) rather than by the library's own for bf16; at first where
  // native_bf16() says no. For tests and benchmarks; matmuls the library has none for are widened
  // all the same.
  void widen_bf16(bool widen);

  // While recording, every run is appended to recorded() and timed (~60 ns each). Turning it on
  // clears the record.
  void record(bool on);
  [[nodiscard]] std::span<const MatmulCall> recorded() const;
  // Runs the calls again in order on the same operands, to measure only a step's matmuls.
  void replay(std::span<const MatmulCall> calls);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice
