// Data: where batches come from: a source that the pipeline asks, or batches of the caller, whom a
// loader of a data set may help. None depends on the layout.
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
  // Host tensors of one micro-batch of `samples` samples; dimension 0 is the sample. inputs() and
  // targets() write all of them: numbers of floats that a first batch leaves unwritten are
  // Error(kUsage).
  [[nodiscard]] virtual std::vector<TensorSpec> input_specs(std::int64_t samples) const = 0;
  [[nodiscard]] virtual std::vector<TensorSpec> target_specs(std::int64_t samples) const = 0;
  // The dimension, from 1, that counts positions in every input and target, such as the tokens of a
  // sequence; 0: none. The same at all times and on all ranks. With one, Pipeline::infer() takes
  // inputs with fewer positions than input_specs() says.
  [[nodiscard]] virtual int position_dimension() const { return 0; }
  virtual void inputs(Phase phase, std::uint64_t step, SampleRange range,
                      std::span<const Tensor> into) const = 0;
  virtual void targets(Phase phase, std::uint64_t step, SampleRange range,
                       std::span<const Tensor> into) const = 0;
};

// --- batches that the caller has ---
// Where a caller's batches lie.
enum class Feed {
  // Inputs on the rank of each replica's first stage, targets on that of its last one: the
  // replica's share of the batch. All ranks that share such a stage pass the same. Other ranks pass
  // nothing; what they pass is not read.
  kPerStage,
  // The whole batch on rank 0, which sends each replica a contiguous share: those of its virtual
  // replicas, which differ by at most one sample, larger ones first.
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
  Feed feed = Feed::kPerStage;
  // As DataSource::position_dimension(), counted in a batch: 1 is a sample's first dimension.
  int position_dimension = 0;
};

// --- data sets and their loaders ---
// What a loader asks a data set for.
struct ItemRequest {
  std::int64_t index = 0;   // of the item, from 0
  std::uint64_t epoch = 0;  // from 0
  int worker = 0;           // the thread that asks, from 0
  // For items that change at random: philox(random, index, n) is the n-th block of four words. It
  // follows from the loader's seed, the epoch and the index. So the ranks of inputs and of targets
  // draw the same, whatever the number of workers.
  RandomKey random = {};
};

// Items by number: images and their classes, for example. Workers read items at the same time.
class Dataset {
 public:
  virtual ~Dataset() = default;
  [[nodiscard]] virtual std::int64_t size() const = 0;  // constant
  // Types and shapes of one item, for the Pipeline.
  [[nodiscard]] virtual BatchSpec spec() const = 0;
  // Writes the item: tensor i has the type and shape of spec().inputs[i] or targets[i]. `inputs` is
  // empty on a rank that passes no inputs, `targets` on one that passes no targets. Called from
  // several threads at once. What it throws comes out of DataLoader::next(), with the index. So
  // does Error(kUsage) where a loader's first item leaves numbers of f32 or other floats unwritten.
  virtual void get(const ItemRequest& item, std::span<const Tensor> inputs,
                   std::span<const Tensor> targets) const = 0;
};

// A tensor with a copy of values in host memory. Throws Error(kUsage) for elements with null data.
[[nodiscard]] HostTensor host_copy(const Tensor& values);
// Item i is sample i of every array: dimension 0 counts samples. Throws Error(kUsage) without
// inputs, and where arrays have different numbers of samples, or none.
[[nodiscard]] std::shared_ptr<Dataset> make_array_dataset(std::vector<HostTensor> inputs,
                                                          std::vector<HostTensor> targets);

// Which part of each batch a rank passes to its pipeline: Pipeline::share(). Ranks that share a
// stage have the same.
struct BatchShare {
  // Of as many virtual replicas as `replicas`, the samples of `count` from `replica` on.
  int replica = 0, replicas = 1, count = 1;
  bool inputs = true, targets = true;
};

struct LoaderOptions {
  std::int64_t batch_size = 1;  // samples over all replicas
  bool shuffle = false;         // the order of an epoch is a permutation by seed and epoch
  std::uint64_t seed = 0;
  int workers = 0;         // threads that read items ahead; 0: next() reads them itself
  int ahead = 2;           // batches that workers read before they are asked for
  bool drop_last = false;  // an epoch leaves out a last batch that is smaller
  BatchShare share = {};
};

// A batch of a loader, to be passed to the pipeline. `indices` and `workers` have an entry for each
// sample that this rank passes.
struct LoadedBatch : Batch {
  std::uint64_t epoch = 0;
  std::int64_t first = 0;             // its first sample, counted in the epoch over all replicas
  std::int64_t samples = 0;           // over all replicas
  std::vector<std::int64_t> indices;  // of the items in the data set
  std::vector<int> workers;           // which worker read the item
};

// Batches of a data set, epoch after epoch, in an order that does not depend on the workers:
//
//   for (int epoch = 0; epoch < epochs; ++epoch) {
//     while (const LoadedBatch* batch = loader.next()) pipeline.train_step(*batch);
//   }
//
// One thread calls a loader. Memory for the batches is allocated by the constructor, and for the
// order of a shuffled epoch (8 bytes an item) at its start. A rank that passes nothing of a batch
// reads nothing. Movable; calls of one that was moved from are Error(kUsage). So are next(), skip()
// and set_state() within Dataset::get().
class DataLoader {
 public:
  // Throws Error(kUsage) for options that cannot work, and for a share of several virtual replicas
  // that leaves one of them without a sample.
  DataLoader(std::shared_ptr<const Dataset> data, const LoaderOptions& options);
  ~DataLoader();  // waits for the items that workers are reading
  DataLoader(DataLoader&&) noexcept;
  DataLoader& operator=(DataLoader&&) noexcept;

  // The next batch, valid until the next call, or null at the end of an epoch: the call after that
  // begins the next epoch. What Dataset::get() throws comes out here when it is this batch's turn:
  // an Error that names the item. The next call tries the same batch again. Other ranks do not know
  // of it: their loaders go on, and their next call of the pipeline waits for this rank.
  [[nodiscard]] const LoadedBatch* next();
  // Leaves out the next batch, after an error for example. At the end of an epoch nothing.
  void skip();

  [[nodiscard]] std::uint64_t epoch() const;   // of the next batch, from 0
  [[nodiscard]] std::int64_t batches() const;  // in an epoch
  [[nodiscard]] const LoaderOptions& options() const;

  // Where the loader is, as JSON for Checkpointer::add_state(). A loader with this state goes on
  // with the batch after the last one that next() returned, whatever was read ahead.
  [[nodiscard]] std::string state() const;
  // Throws Error(kUsage) for a state of another data set size, order or seed, and for text that is
  // no such state; the loader is then as it was. Another batch size goes on with the next item.
  void set_state(const std::string& state);

 private:
  struct Impl;
  [[nodiscard]] Impl& impl() const;
  std::unique_ptr<Impl> impl_;
};

// --- files of arrays ---
// Each throws Error(kData) that names the file: missing, another format, cut off, longer than its
// header says, or of a type that no tensor has. Values are in host memory.
//
// IDX, the format of MNIST, plain or compressed by gzip. 8 and 16-bit signed integers become i32.
[[nodiscard]] HostTensor read_idx(const std::filesystem::path& path);
// NumPy's .npy, version 1 to 3, little-endian, in C order: f16, f32, f64, i32, i64, u8.
[[nodiscard]] HostTensor read_npy(const std::filesystem::path& path);
// value * scale + offset in double precision, rounded to `to`; integers to nearest. Throws
// Error(kUsage) where a value does not fit an integer type.
[[nodiscard]] HostTensor converted(const HostTensor& from, DType to, double scale = 1,
                                   double offset = 0);

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
// kText: bytes. kNanoGpt: `.bin` of uint16. kLlmC: 256 int32 header + uint16 or uint32.
// kSluice: what examples/prepare_tokens.py writes. 256 bytes of header, little-endian:
//   byte  0  magic: 0xff, "SLTOKEN"
//         8  uint32 version: 1
//        12  uint32 bytes per token: 2 or 4
//        16  uint64 number of tokens
//        24  uint32 vocabulary: tokens are below it; at most 65536 with 2 bytes, 2^31 - 1 with 4
//        28  uint32 the token between documents; 2^32 - 1: none
//        32  SHA-256 of the tokenizer.json that made the tokens; zeros: not known
//        64  zeros
enum class TokenFormat { kText, kNanoGpt, kLlmC, kSluice };

// A memory-mapped file of tokens, split into training (front) and validation (back).
class TokenFile {
 public:
  // Format by content and name: the magic above, llm.c's magic 20240520 (version 1, uint16) or
  // 20240801 (version 7, uint32), else `.bin` is nanoGPT's, else text. The last `validation_share`
  // of the tokens (in [0, 1), else Error(kUsage)) validate.
  // Throws Error(kData) naming the file: missing, empty, odd length, a field of its header, or a
  // name in `.jsonl` or `.json`, whose bytes nobody means.
  explicit TokenFile(const std::filesystem::path& path, double validation_share = 0.1);
  ~TokenFile();
  TokenFile(TokenFile&&) noexcept;
  TokenFile& operator=(TokenFile&&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const;
  [[nodiscard]] TokenFormat format() const;
  [[nodiscard]] std::int64_t size() const;
  [[nodiscard]] std::int64_t train_size() const;  // tokens [0, train_size) train
  [[nodiscard]] int token_bytes() const;          // 1, 2 or 4
  // As the header of kSluice says. Nothing else says so: 0, -1 and "".
  [[nodiscard]] int vocabulary() const;
  [[nodiscard]] int end_of_text() const;
  [[nodiscard]] const std::string& tokenizer_sha256() const;  // 64 hexadecimal digits
  // Numbers above 2^31 - 1 are read as that, which no vocabulary has.
  [[nodiscard]] int token(std::int64_t index) const;
  // Scans the file once, then cached; not from two threads at once.
  [[nodiscard]] int largest_token() const;
  // Tokens [first, first + into.size()), which must be within the file.
  void copy(std::int64_t first, std::span<std::int32_t> into) const;
  // Values that must be equal on every rank, by names that contain `option` and this file's path:
  // the number of tokens, and the SHA-256 of their bytes. Beyond 1 MiB it is that of a sample: the
  // first 4 KiB, the last, and 64 times 4 KiB evenly spaced between them. Headers do not count.
  [[nodiscard]] Facts identity(const std::string& option) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Next-token prediction: inputs i32 [samples, context], targets i32 [samples, context]. Training
// sample i of step t starts at an offset drawn by Philox from (seed, t, i). Validation samples are
// windows of the validation part, the same for every step: n of them lie evenly over the part, and
// as many as validation_samples() are each of its windows once.
// Throws Error(kData): a split shorter than context + 1 (a validation split of share 0 may be
// absent until it is asked for), a token >= vocabulary, or >= that of the file's header (naming its
// place). Error(kUsage): no file, or a context or vocabulary below 1.
[[nodiscard]] std::unique_ptr<DataSource> make_token_source(std::shared_ptr<TokenFile> file,
                                                            int context, int vocabulary,
                                                            std::uint64_t seed);
// The windows of a part of the file, one after the other, as items: inputs i32 [context], and as
// targets the tokens one further. The part's remainder is left out. Throws as make_token_source().
enum class TokenPart { kTraining, kValidation };
[[nodiscard]] std::shared_ptr<Dataset> make_token_dataset(std::shared_ptr<TokenFile> file,
                                                          int context, int vocabulary,
                                                          TokenPart part = TokenPart::kTraining);
// The shapes of such a source without any tokens, for dry runs and inference; its inputs() and
// targets() leave memory as it is.
[[nodiscard]] std::unique_ptr<DataSource> make_token_shapes(int context);
// Number of whole validation windows. Throws Error(kUsage) for a context below 1.
[[nodiscard]] std::int64_t validation_samples(const TokenFile& file, int context);

}  // namespace sluice
#pragma GCC visibility pop
