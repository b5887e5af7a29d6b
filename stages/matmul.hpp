// Matrix products from a cache of prepared library primitives. Making a primitive costs 6 to
// 370 microseconds, running one allocates nothing of ours; so each distinct product is made once,
// before the first step, and found again by its full specification.
//
// The specification fixes everything that a product's bits depend on: sizes, leading dimensions,
// transposition, types, bias, accumulation in place; threads and scratch are the cache's own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/device.hpp"
#include "stages/tensor.hpp"

namespace sluice {

// One operand: element (b, i, j) is at data[b * batch + i * row + j * column], in elements. One of
// row and column is 1 (a transposed operand has row 1).
struct MatMulLayout {
  std::int64_t row = 0, column = 1, batch = 0;
  friend bool operator==(const MatMulLayout&, const MatMulLayout&) = default;
};

// For each of `batches`: c [m, n] = a [m, k] b [k, n] (+ bias [n], f32) (+ c, where accumulate).
struct MatMulSpec {
  std::int64_t batches = 1, m = 0, n = 0, k = 0;
  MatMulLayout a, b, c;
  DType operands = DType::kF32;  // kF32 or kBf16, of a and b; sums run in f32
  DType result = DType::kF32;    // of c; kF32 where accumulate
  bool bias = false;
  bool accumulate = false;
  friend bool operator==(const MatMulSpec&, const MatMulSpec&) = default;

  [[nodiscard]] double flops() const {
    return 2.0 * static_cast<double>(batches) * static_cast<double>(m) * static_cast<double>(n) *
           static_cast<double>(k);
  }
};

[[nodiscard]] std::string to_string(const MatMulSpec& spec);

// Of all that makes two specifications differ, for caches.
struct MatMulSpecHash {
  [[nodiscard]] std::size_t operator()(const MatMulSpec& spec) const;
};

// A product that was run, on operands that its caller owns.
struct MatMulCall {
  MatMulSpec spec;
  const void* a = nullptr;
  const void* b = nullptr;
  const void* bias = nullptr;
  void* c = nullptr;
  double seconds = 0;  // of this run
};

// Used from one thread.
class MatMulCache {
 public:
  // Products run on the OpenMP team of the thread that makes the cache.
  explicit MatMulCache(Device device);
  ~MatMulCache();
  MatMulCache(const MatMulCache&) = delete;
  MatMulCache& operator=(const MatMulCache&) = delete;

  // Makes the primitive on first use. Throws Error(kDevice) with the specification where the
  // library cannot make or run it.
  void run(const MatMulSpec& spec, const void* a, const void* b, const void* bias, void* c);
  // Makes the primitive and its scratch, runs nothing.
  void prepare(const MatMulSpec& spec);
  [[nodiscard]] std::size_t size() const;  // primitives made
  // Whether products of bf16 run in f32 on widened copies of their operands
  // (stages/cpu/widened.hpp) rather than by the library's own for bf16; at first where
  // native_bf16() says no. For tests and benchmarks; products the library has none for are widened
  // all the same.
  void widen_bf16(bool widen);

  // While recording, every run is appended to recorded() and timed (~60 ns each). Turning it on
  // clears the record.
  void record(bool on);
  [[nodiscard]] std::span<const MatMulCall> recorded() const;
  // Runs the calls again, in order, on the same operands: what a step's products cost alone.
  void replay(std::span<const MatMulCall> calls);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice
