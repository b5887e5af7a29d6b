// Data: where micro-batches come from. Batches depend on seed and step alone, never on the layout.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <sluice/stage.hpp>

#pragma GCC visibility push(default)
namespace sluice {

// Samples [first, first + count) of the global batch of a step.
struct SampleRange {
  std::int64_t first = 0, count = 0;
  friend bool operator==(const SampleRange&, const SampleRange&) = default;
};

// A source of samples. Stage 0 asks for inputs, the last stage for targets; no other rank reads
// any. Calls may come from a prefetch thread, one at a time; a source keeps no per-call state.
class DataSource {
 public:
  virtual ~DataSource() = default;
  // Host tensors of one micro-batch of `samples` samples; dimension 0 is the sample.
  [[nodiscard]] virtual std::vector<TensorSpec> input_specs(std::int64_t samples) const = 0;
  [[nodiscard]] virtual std::vector<TensorSpec> target_specs(std::int64_t samples) const = 0;
  virtual void inputs(Phase phase, std::uint64_t step, SampleRange range,
                      std::span<const Tensor> into) const = 0;
  virtual void targets(Phase phase, std::uint64_t step, SampleRange range,
                       std::span<const Tensor> into) const = 0;
};

// --- batches that the caller has ---
// Where a caller's batches lie.
enum class Feed {
  // Inputs on the rank of each replica's first stage, targets on that of its last one: the
  // replica's share of the batch. Other ranks pass nothing; what they pass is not read.
  kWhereUsed,
  // The whole batch on rank 0, which sends each replica a contiguous share. Shares differ by at
  // most one sample, larger ones first.
  kRank0,
};

// The samples of one call, in host memory of the caller, which is only read, and only during the
// call. Dimension 0 of every tensor is the sample.
struct Batch {
  std::vector<Tensor> inputs = {}, targets = {};
};

// What batches look like. How many samples a step may have at most follows from
// PipelineOptions::Shape.
struct BatchSpec {
  // Of one sample: type and shape, without dimension 0. "f32 []" stands for one number a sample.
  std::vector<TensorSpec> inputs = {}, targets = {};
  Feed feed = Feed::kWhereUsed;
};

// --- rows of numbers in memory ---
// Rows of f32: sample i has inputs[i * input_width ...) and targets likewise. Step t (from 1) takes
// the batch_size samples after those of step t - 1, in order, starting over at the end; evaluation
// takes them from the front. Throws Error(kUsage) where the sizes do not fit.
[[nodiscard]] std::unique_ptr<DataSource> make_array_source(std::vector<float> inputs,
                                                            std::int64_t input_width,
                                                            std::vector<float> targets,
                                                            std::int64_t target_width,
                                                            std::int64_t batch_size);

// --- token files ---
enum class TokenFormat { kText, kNanoGpt, kLlmC };  // bytes; .bin uint16; 256 int32 header + uint16

// A memory-mapped file of tokens, split into training (front) and validation (back).
class TokenFile {
 public:
  // Format by content and name: llm.c's magic 20240520 (version 1), else `.bin` is nanoGPT's, else
  // text. The last `validation_share` of the tokens (in [0, 1), else Error(kUsage)) validate.
  // Throws Error(kData) naming the file: missing, empty, odd length, bad header.
  explicit TokenFile(const std::filesystem::path& path, double validation_share = 0.1);
  ~TokenFile();
  TokenFile(TokenFile&&) noexcept;
  TokenFile& operator=(TokenFile&&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const;
  [[nodiscard]] TokenFormat format() const;
  [[nodiscard]] std::int64_t size() const;
  [[nodiscard]] std::int64_t train_size() const;  // tokens [0, train_size) train
  [[nodiscard]] int token(std::int64_t index) const;
  // Scans the file once, then cached; not from two threads at once.
  [[nodiscard]] int largest_token() const;
  // Tokens [first, first + into.size()), which must be within the file.
  void copy(std::int64_t first, std::span<std::int32_t> into) const;
  // Values that must be equal on every rank, by names that contain `option` and this file's path:
  // the number of tokens, and the SHA-256 of their bytes. Beyond 1 MiB it is that of a sample: the
  // first 4 KiB, the last, and 64 times 4 KiB evenly spaced between them. Headers do not count.
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> identity(
      const std::string& option) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Next-token prediction: inputs i32 [samples, context], targets i32 [samples, context]. Training
// sample i of step t starts at an offset drawn by Philox from (seed, t, i); validation sample i is
// the i-th window of the validation part (wrapping around), for every step.
// Throws Error(kData): a split shorter than context + 1 (a validation split of share 0 may be
// absent until it is asked for), a token >= vocabulary (naming its place).
[[nodiscard]] std::unique_ptr<DataSource> make_token_source(std::shared_ptr<TokenFile> file,
                                                            int context, int vocabulary,
                                                            std::uint64_t seed);
// The shapes of such a source without any tokens, for dry runs and inference; its inputs() and
// targets() leave memory as it is.
[[nodiscard]] std::unique_ptr<DataSource> make_token_shapes(int context);
// Number of whole validation windows.
[[nodiscard]] std::int64_t validation_samples(const TokenFile& file, int context);

}  // namespace sluice
#pragma GCC visibility pop
