// Compute context: what operators need in addition to their operands: device, stream, threads,
// scratch memory and the backend. One per rank; used from one thread. Its constructor takes no
// device memory except what libraries take for their handles. Below it: operands that are no
// tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <sluice/device.hpp>
#include <sluice/tensor.hpp>

#pragma GCC visibility push(default)
namespace sluice {

// Internal to Sluice.
class Backend;
class DeviceWait;
class OperatorProfile;
class ProgressHook;

// What the calls of one operator took.
struct OperatorTime {
  std::string name;  // of the operator: "linear_forward", "adamw"
  std::int64_t calls = 0;
  double seconds = 0;  // on a GPU by its clock, with the gaps between the operator's kernels
  double bytes = 0;  // that its calls cannot do without: once what they read, once what they write
  double flops = 0;  // of matmuls and attention; 0 for other operators
};

// How rotary angles are scaled for a context longer than the one trained for.
struct RotaryScaling {
  enum class Kind {
    kNone,
    kLinear,  // all frequencies over `factor`
    kLlama3,  // low frequencies over `factor`, high ones as they are, those between interpolated
  };
  Kind kind = Kind::kNone;
  float factor = 1;
  // kLlama3 only: wavelengths below original_context / high_frequency_factor are high frequencies,
  // those above original_context / low_frequency_factor low ones.
  float low_frequency_factor = 1, high_frequency_factor = 4;
  int original_context = 0;
  friend bool operator==(const RotaryScaling&, const RotaryScaling&) = default;
};

// Which angles rotary positions turn by: position times a frequency for each pair i of a head's
// numbers, base^(-2i/head_dim), scaled.
struct RotaryPositions {
  float base = 10000;
  RotaryScaling scaling = {};
  friend bool operator==(const RotaryPositions&, const RotaryPositions&) = default;
};

class ComputeContext {
 public:
  // Operators compute in a team of `threads`. The size of the calling thread's own OpenMP team is
  // another one outside them. On a GPU, makes the device the calling thread's current one. Throws
  // Error(kUsage) for threads below 1 and above kMostThreads, for a SLUICE_KERNELS that this
  // machine does not have, and for a device that cannot be used (require_device); Error(kDevice)
  // for more threads than the machine starts now.
  static constexpr int kMostThreads = 1024;
  ComputeContext(Device device, int threads);
  ~ComputeContext();  // waits for what is on the stream
  ComputeContext(const ComputeContext&) = delete;
  ComputeContext& operator=(const ComputeContext&) = delete;

  [[nodiscard]] Device device() const { return memory_.device(); }
  // All buffers that are used here come from it, those of stages too.
  [[nodiscard]] const DeviceMemory& memory() const { return memory_; }
  [[nodiscard]] int threads() const { return threads_; }
  [[nodiscard]] StreamView stream() const { return stream_.view(); }

  // Whether a GPU's fp32 matmuls may round their operands to TF32; off at first. No effect on a
  // CPU. Call it before the first matmul.
  void set_tf32(bool allowed);
  // The cublasLtHandle_t of this context, for a stage's own matmuls; null on a CPU. The
  // context owns it. Callers pass stream() and scratch from workspace().
  [[nodiscard]] void* native_blas() const;

  // A line on what the bits of a CPU's results depend on: kernels, matrix library, threads, and how
  // matmuls take rows once a stage with some has been described. Empty for a GPU.
  [[nodiscard]] std::string arithmetic() const;

  // Blocks until all work put on the stream so far is done, as stream().synchronize() does. Throws
  // what the pipeline throws where another rank has failed: the work may never end then.
  void wait();

  // Scratch for one operator call, on the device; its contents do not survive the next call. It
  // grows when asked for more than before, and then the host waits as wait() does. A pipeline
  // reserves what its stages describe. A workspace that was outgrown is freed at the end of a step,
  // or where memory runs out.
  [[nodiscard]] std::byte* workspace(std::size_t bytes);
  // Lets a pipeline's messages advance on a CPU, as every operator does before it starts. For a
  // stage that computes for longer than a millisecond without operators; it may call this as often
  // as it likes.
  void progress() const;

  // For positions 0 .. sequence - 1: cosines, sines, negated sines of the angles, [sequence, 3,
  // head_dim / 2], on the device. Computed in double precision on first use. Throws Error(kUsage)
  // for numbers below 0, and for a table of more than 2^60 elements.
  [[nodiscard]] const float* rotary_table(std::int64_t sequence, std::int64_t head_dim,
                                          const RotaryPositions& positions);
  [[nodiscard]] static std::size_t rotary_table_bytes(std::int64_t sequence, std::int64_t head_dim);

  // Measures every operator from now on, or no more; off at first. It costs two readings of a clock
  // per operator, on a GPU two events. Not while calls are recorded
  // (PipelineOptions::Devices::cuda_graphs).
  void profile_operators(bool on);
  // Since profile_operators(true), the longest first; empty where it is off. Waits for the device.
  [[nodiscard]] std::vector<OperatorTime> operator_times();

 private:
  friend struct ContextAccess;  // internal
  void reserve_workspace(std::size_t bytes);

  struct RotaryTable {
    std::int64_t sequence, head_dim;
    RotaryPositions positions;
    Buffer values;
  };

  DeviceMemory memory_;
  int threads_;
  Stream stream_;
  Event passed_;
  DeviceWait* device_wait_ = nullptr;
  Buffer workspace_;
  std::vector<Buffer> outgrown_;
  std::size_t workspace_peak_ = 0;
  std::vector<RotaryTable> rotary_tables_;
  std::unique_ptr<Backend> backend_;  // never null
  ProgressHook* hook_ = nullptr;
  std::unique_ptr<OperatorProfile> profile_;
};

// --- what operators compute on, besides tensors ---
// A matmul layer's operands: x [rows, in] and weight [out, in] of type `operands`, y [rows, out].
struct LinearShape {
  std::int64_t rows = 0, in = 0, out = 0;
  DType operands = DType::kF32, result = DType::kF32;
  bool bias = false;
};

// Functions of one number.
enum class Pointwise {
  kRelu,
  kGelu,      // x times the normal distribution's function of x: torch's approximate="none"
  kGeluTanh,  // GPT-2's form of it
  kSilu,      // x sigmoid(x); also called swish
  kTanh,
  kSigmoid,
  kCount,  // of them
};

// Of the matmul layer's fused forms. kGelu is Pointwise::kGeluTanh. kSwiglu: its operand is [rows,
// 2 * hidden], gates first.
enum class Activation { kGelu, kSwiglu };

// Causal self-attention.
struct AttentionShape {
  std::int64_t samples = 0, sequence = 0;
  int heads = 0, kv_heads = 0, head_dim = 0;  // heads is a multiple of kv_heads
  int window = 0;  // positions that a query sees, itself the last of them; 0: all
  // Of a shard's heads: heads before them, and of the model; 0: `heads`.
  int first_head = 0, all_heads = 0;
  [[nodiscard]] constexpr std::int64_t rows() const { return samples * sequence; }
  [[nodiscard]] constexpr std::int64_t packed_width() const {
    return static_cast<std::int64_t>(heads + 2 * kv_heads) * head_dim;
  }
  // The most positions that a query sees.
  [[nodiscard]] constexpr std::int64_t seen() const { return slides() ? window : sequence; }
  // Whether there is a position that a query does not see, besides those after it.
  [[nodiscard]] constexpr bool slides() const { return window > 0 && window < sequence; }
  friend bool operator==(const AttentionShape&, const AttentionShape&) = default;
};

struct Dropout {
  float probability = 0;  // 0: the operator is the identity and draws nothing
  RandomKey key;
  // Index of the operand's first element in the tensor of the global batch. So a sample's mask does
  // not depend on its micro-batch.
  std::uint64_t first_element = 0;
  // Device memory in which a GPU's kernels read key.step; null: key.step itself. Unused on a CPU.
  const std::uint64_t* step_on_device = nullptr;
};

}  // namespace sluice
#pragma GCC visibility pop
