#include <utility>

#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/tensor.hpp>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

// Any number that differs from every layer's random_site().
constexpr std::uint64_t kOffsetSite = 0xC3430BEE;

// A number in [0, bound), bound > 0, from 64 random bits: the upper half of their product. Its bias
// is at most bound / 2^64.
std::int64_t draw_below(std::int64_t bound, const RandomKey& key, std::int64_t sample) {
  const auto words = philox(key, 0, static_cast<std::uint64_t>(sample));
  const std::uint64_t bits = static_cast<std::uint64_t>(words[0]) << 32 | words[1];
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::int64_t>(Wide{bits} * static_cast<std::uint64_t>(bound) >> 64);
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
    return file_->train_size() + sample % windows_ * context();
  }

  std::shared_ptr<const TokenFile> file_;
  std::int64_t windows_;
  RandomKey key_;
};

void require_split(const TokenFile& file, const char* name, std::int64_t tokens, int context) {
  if (tokens > context) return;
  throw_error(ErrorCode::kData,
              "the {} split of data file '{}' has {} of its {} tokens; --context {} "
              "needs at least {}",
              name, file.path().string(), tokens, file.size(), context, context + 1);
}

void require_vocabulary(const TokenFile& file, int vocabulary) {
  const int possible = file.format() == TokenFormat::kText ? 256 : 65536;
  if (possible <= vocabulary || file.largest_token() < vocabulary) return;
  std::int64_t index = 0;
  while (file.token(index) < vocabulary) ++index;
  throw_error(ErrorCode::kData,
              "data file '{}' has token {} at index {}; --vocabulary {} allows 0 to {} "
              "(the largest token of the file is {})",
              file.path().string(), file.token(index), index, vocabulary, vocabulary - 1,
              file.largest_token());
}

}  // namespace

std::unique_ptr<DataSource> make_token_source(std::shared_ptr<TokenFile> file, int context,
                                              int vocabulary, std::uint64_t seed) {
  if (context < 1 || vocabulary < 1) {
    throw_usage("--context is {} and --vocabulary {}; both must be at least 1", context,
                vocabulary);
  }
  require_split(*file, "training", file->train_size(), context);
  if (file->train_size() < file->size()) {
    require_split(*file, "validation", file->size() - file->train_size(), context);
  }
  require_vocabulary(*file, vocabulary);
  return std::make_unique<TokenSource>(std::move(file), context, seed);
}

std::unique_ptr<DataSource> make_token_shapes(int context) {
  return std::make_unique<TokenShapes>(context);
}

std::int64_t validation_samples(const TokenFile& file, int context) {
  const std::int64_t tokens = file.size() - file.train_size();
  return tokens > context ? (tokens - 1) / context : 0;
}

}  // namespace sluice
