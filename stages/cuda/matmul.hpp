// Matmuls on a GPU: cuBLASLt, from a cache of plans. A plan holds the library's descriptors
// and the algorithm for one specification; it is made on first use (tens of microseconds, on the
// host), found again by the specification, and run on the context's stream without blocking or
// allocating.
//
// The algorithm is one of the first eight that cublasLtMatmulAlgoGetHeuristic names for the
// context's workspace, by a fixed rule (pick() in matmul.cpp): never timed, so that a matmul is a
// function of its specification, the device model and the library's version. The rule is of
// measurements on an H200 (tests/benchmarks/README.md). Sums run in f32 also where they are split
// over blocks: reductions in the result's type are excluded, and those in place with them.
//
// Sluice's matrices are row-major, the library's column-major: cᵀ [n, m] = bᵀ aᵀ. The operands swap
// and no data moves.
//
// What shapes lose. The fast kernels load 16 bytes at a time through tensor maps: every leading
// dimension a multiple of 8 elements of bf16 (4 of f32), every operand at a multiple of 16 bytes.
// A vocabulary of 50257 has rows of logits that start at odd places, and its matmul runs several
// times slower than with 50304; a multiple of 128 also fills the last tile of columns. Rows (m) may
// be any number; the last tile computes what is not there. Right results come at every size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "stages/compute/matmul_spec.hpp"

namespace sluice::cuda {

class Context;

// What is done to a matmul's elements before they are stored.
enum class Epilogue : std::uint8_t {
  kNone,  // only the bias of the specification
  // aux = the matmul (with its bias), c = GELU of it (tanh form). The library applies GELU to the
  // sum in f32, not to aux as it was rounded.
  kGelu,
  kGeluGradient,  // c = matmul * GELU'(aux)
};

// A matmul and its epilogue.
struct FusedMatmulSpec {
  MatmulSpec matmul;  // `bias` is of the result's type here, not f32
  Epilogue epilogue = Epilogue::kNone;
  friend bool operator==(const FusedMatmulSpec&, const FusedMatmulSpec&) = default;
};

// Device memory.
struct MatmulOperands {
  const void* a = nullptr;
  const void* b = nullptr;
  const void* bias = nullptr;   // [n], of the result's type
  const void* added = nullptr;  // what an accumulating matmul adds to, laid out as c; null: c
  void* c = nullptr;
  void* aux = nullptr;  // [m, n] with c's strides and type; written by kGelu, read by kGeluGradient
};

class Matmuls {
 public:
  // The context outlives this.
  explicit Matmuls(Context& context);
  ~Matmuls();
  Matmuls(const Matmuls&) = delete;
  Matmuls& operator=(const Matmuls&) = delete;

  // Throws Error(kDevice) with the specification where the library cannot compute it. Operands that
  // do not start at multiples of 16 bytes run in a plan of their own. A matmul without elements is
  // nothing to do.
  void run(const FusedMatmulSpec& spec, const MatmulOperands& operands);
  // Makes the plan for operands at multiples of 16 bytes, and runs nothing: whether the library has
  // an algorithm. A function of the specification, the device model and the library. Throws as
  // run() where the specification is none: batches with a bias or an epilogue, a transposed result.
  [[nodiscard]] bool supports(const FusedMatmulSpec& spec);
  [[nodiscard]] std::size_t size() const;  // plans made, those that are not supported too

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice::cuda
