#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/tensor.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/data/draw_below.hpp"

namespace sluice {
namespace {

// Any number that differs from every layer's random_site().
constexpr std::uint64_t kOffsetSite = 0xC3430BEE;

// The largest quotient of Euclid's algorithm, for a > b; the most there is where both have a
// divisor.
std::int64_t largest_quotient(std::int64_t a, std::int64_t b) {
  std::int64_t largest = 0;
  while (b != 0) {
    largest = std::max(largest, a / b);
    a = std::exchange(b, a % b);
  }
  return a == 1 ? largest : std::numeric_limits<std::int64_t>::max();
}

// Steps of this many windows, around the end, visit each once, and any number of steps lie evenly
// over all: quotients are small, as those of the golden section are, near which it is looked for.
std::int64_t stride_over(std::int64_t windows) {
  constexpr double kSection = 0.6180339887498949;
  constexpr std::int64_t kAround = 32;
  const std::int64_t middle = std::llround(static_cast<double>(windows) * kSection);
  std::int64_t best = 1;
  for (std::int64_t each = std::max<std::int64_t>(middle - kAround, 1);
       each < std::min(windows, middle + kAround); ++each) {
    if (largest_quotient(windows, each) < largest_quotient(windows, best)) best = each;
  }
  return best;
}

class TokenShapes : public DataSource {
 public:
  explicit TokenShapes(std::int64_t context) : context_(context) {}
  [[nodiscard]] std::vector<TensorSpec> input_specs(std::int64_t samples) const override {
    return {{DType::kI32, {samples, context_}}};
  }
  [[nodiscard]] std::vector<TensorSpec> target_specs(std::int64_t samples) const override {
    return input_specs(samples);
  }
  [[nodiscard]] int position_dimension() const override { return 1; }
  void inputs(Phase, std::uint64_t, SampleRange, std::span<const Tensor>) const override {}
  void targets(Phase, std::uint64_t, SampleRange, std::span<const Tensor>) const override {}

 protected:
  [[nodiscard]] std::int64_t context() const { return context_; }

 private:
  std::int64_t context_;
};

class TokenSource final : public TokenShapes {
 public:
  TokenSource(std::shared_ptr<const TokenFile> file, int context, std::uint64_t seed)
      : TokenShapes(context),
        file_(std::move(file)),
        windows_(sluice::validation_samples(*file_, context)),
        stride_(stride_over(windows_)),
        key_{.seed = seed, .site = kOffsetSite, .step = 0} {}

  void inputs(Phase phase, std::uint64_t step, SampleRange range,
              std::span<const Tensor> into) const override {
    copy(phase, step, range, 0, into);
  }
  void targets(Phase phase, std::uint64_t step, SampleRange range,
               std::span<const Tensor> into) const override {
    copy(phase, step, range, 1, into);
  }

 private:
  // Targets are the windows of the inputs, shifted by one token.
  void copy(Phase phase, std::uint64_t step, SampleRange range, std::int64_t shift,
            std::span<const Tensor> into) const {
    const TensorSpec wanted{DType::kI32, {range.count, context()}};
    if (into.size() != 1 || into[0].spec != wanted) {
      throw_error(ErrorCode::kInternal, "tokens are one tensor {}, asked for {} tensors",
                  to_string(wanted), into.size());
    }
    const auto width = static_cast<std::size_t>(context());
    std::span<std::int32_t> out(into[0].as<std::int32_t>(),
                                static_cast<std::size_t>(into[0].elements()));
    for (std::int64_t i = range.first; i < range.first + range.count; ++i) {
      file_->copy(start_of(phase, step, i) + shift, out.first(width));
      out = out.subspan(width);
    }
  }

  [[nodiscard]] std::int64_t start_of(Phase phase, std::uint64_t step, std::int64_t sample) const {
    if (phase == Phase::kTrain) {
      RandomKey key = key_;
      key.step = step;
      // The last window of the split ends with its last token as a target.
      return draw_below(file_->train_size() - context(), key, sample);
    }
    if (windows_ == 0) {
      throw_error(ErrorCode::kData, "data file '{}' has no validation split to evaluate on",
                  file_->path().string());
    }
    __extension__ using Wide = __int128;
    const auto window = static_cast<std::int64_t>(Wide{sample} * stride_ % windows_);
    return file_->train_size() + window * context();
  }

  std::shared_ptr<const TokenFile> file_;
  std::int64_t windows_, stride_;
  RandomKey key_;
};

// The windows of one part of a file, one after the other.
class TokenWindows final : public Dataset {
 public:
  TokenWindows(std::shared_ptr<const TokenFile> file, int context, std::int64_t first,
               std::int64_t windows)
      : file_(std::move(file)), context_(context), first_(first), windows_(windows) {}
  [[nodiscard]] std::int64_t size() const override { return windows_; }
  [[nodiscard]] BatchSpec spec() const override {
    const TensorSpec window{DType::kI32, {context_}};
    return {.inputs = {window}, .targets = {window}, .position_dimension = 1};
  }
  void get(const ItemRequest& item, std::span<const Tensor> inputs,
           std::span<const Tensor> targets) const override {
    copy(item.index * context_, inputs);
    copy(item.index * context_ + 1, targets);
  }

 private:
  void copy(std::int64_t first, std::span<const Tensor> into) const {
    if (into.empty()) return;
    file_->copy(first_ + first,
                {into[0].as<std::int32_t>(), static_cast<std::size_t>(into[0].elements())});
  }

  std::shared_ptr<const TokenFile> file_;
  std::int64_t context_, first_, windows_;
};

void require_split(const TokenFile& file, const char* name, std::int64_t tokens, int context) {
  if (tokens > context) return;
  throw_error(ErrorCode::kData,
              "the {} split of data file '{}' has {} of its {} tokens; --context {} "
              "needs at least {}",
              name, file.path().string(), tokens, file.size(), context, std::int64_t{context} + 1);
}

void require_file(const std::shared_ptr<TokenFile>& file) {
  if (file == nullptr) throw_usage("tokens of a null file; legal: a TokenFile");
}

void require_sizes(int context, int vocabulary) {
  if (context >= 1 && vocabulary >= 1) return;
  throw_usage("--context is {} and --vocabulary {}; both must be at least 1", context, vocabulary);
}

std::int64_t first_beyond(const TokenFile& file, int vocabulary) {
  std::int64_t index = 0;
  while (file.token(index) < vocabulary) ++index;
  return index;
}

void require_vocabulary(const TokenFile& file, int vocabulary) {
  const std::int64_t possible = std::int64_t{1} << (8 * file.token_bytes());
  if (file.vocabulary() > 0 && file.vocabulary() < possible &&
      file.largest_token() >= file.vocabulary()) {
    const std::int64_t index = first_beyond(file, file.vocabulary());
    throw_error(ErrorCode::kData,
                "data file '{}' has token {} at index {}, but its header has vocabulary {}: legal "
                "are 0 to {}",
                file.path().string(), file.token(index), index, file.vocabulary(),
                file.vocabulary() - 1);
  }
  if (possible <= vocabulary || file.largest_token() < vocabulary) return;
  const std::int64_t index = first_beyond(file, vocabulary);
  throw_error(ErrorCode::kData,
              "data file '{}' has token {} at index {}; --vocabulary {} allows 0 to {} "
              "(the largest token of the file is {})",
              file.path().string(), file.token(index), index, vocabulary, vocabulary - 1,
              file.largest_token());
}

}  // namespace

std::unique_ptr<DataSource> make_token_source(std::shared_ptr<TokenFile> file, int context,
                                              int vocabulary, std::uint64_t seed) {
  require_file(file);
  require_sizes(context, vocabulary);
  require_split(*file, "training", file->train_size(), context);
  if (file->train_size() < file->size()) {
    require_split(*file, "validation", file->size() - file->train_size(), context);
  }
  require_vocabulary(*file, vocabulary);
  return std::make_unique<TokenSource>(std::move(file), context, seed);
}

std::shared_ptr<Dataset> make_token_dataset(std::shared_ptr<TokenFile> file, int context,
                                            int vocabulary, TokenPart part) {
  require_file(file);
  require_sizes(context, vocabulary);
  const bool training = part == TokenPart::kTraining;
  const std::int64_t first = training ? 0 : file->train_size();
  const std::int64_t tokens = training ? file->train_size() : file->size() - first;
  require_split(*file, training ? "training" : "validation", tokens, context);
  require_vocabulary(*file, vocabulary);
  return std::make_shared<TokenWindows>(std::move(file), context, first, (tokens - 1) / context);
}

std::unique_ptr<DataSource> make_token_shapes(int context) {
  return std::make_unique<TokenShapes>(context);
}

std::int64_t validation_samples(const TokenFile& file, int context) {
  require_sizes(context, /*vocabulary=*/1);
  const std::int64_t tokens = file.size() - file.train_size();
  return tokens > context ? (tokens - 1) / context : 0;
}

}  // namespace sluice
