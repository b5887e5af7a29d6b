#include "runtime/pipeline/batch_feed.hpp"

#include <fmt/core.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>

#include "comm/base/index.hpp"
#include "comm/base/sum_tree.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/data/batch_shape.hpp"
#include "runtime/data/sample_specs.hpp"
#include "runtime/files/checksum.hpp"
#include "runtime/group/guard.hpp"
#include "runtime/pipeline/call.hpp"

namespace sluice {
namespace {

// [Call]
constexpr std::array<const char*, 18> kNames = {"train_step() of a batch",
                                                "train_step() of the source",
                                                "accumulate()",
                                                "forward_backward()",
                                                "optimizer_step()",
                                                "drop_gradients()",
                                                "evaluate() of a batch",
                                                "evaluate() of a source",
                                                "infer()",
                                                "state()",
                                                "set_state()",
                                                "values_changed()",
                                                "a save",
                                                "load_checkpoint() or load_weights()",
                                                "loader()",
                                                "step_timeline()",
                                                "close()",
                                                "the values of a batch"};
static_assert(kNames.size() == static_cast<std::size_t>(Call::kValues) + 1);

const char* name_of(Call call) { return kNames.at(static_cast<std::size_t>(call)); }

bool has_batch(Call call) {
  return call == Call::kTrain || call == Call::kAccumulate || call == Call::kGradients ||
         call == Call::kEvaluate || call == Call::kInfer;
}
bool has_targets(Call call) { return has_batch(call) && call != Call::kInfer; }

std::uint64_t checksum_of(std::span<const Tensor> tensors) {
  std::uint64_t sum = 0;
  for (const Tensor& each : tensors) {
    sum = checksum_64({each.as<const std::byte>(), each.spec.bytes()}, sum);
  }
  return sum;
}

constexpr std::int64_t kAnyNumber = -1;  // of samples: there are no tensors

// Each replica needs samples for a micro-batch of gradients.
bool trains(Call call) { return has_targets(call) && call != Call::kEvaluate; }

// Whether the number of steps done decides what the call does.
bool counts_on(Call call) {
  return trains(call) || call == Call::kTrainSource || call == Call::kUpdate || call == Call::kSave;
}

// "f32 [samples, 3]", or, where `fewer` is dimension 1, "f32 [samples, 1 to 3]".
std::string describe(const TensorSpec& one, int fewer = 0) {
  std::string text = fmt::format("{} [samples", name_of(one.dtype));
  for (int d = 1; d < one.shape.rank(); ++d) {
    text += fmt::format(", {}{}", d == fewer ? "1 to " : "", one.shape[d]);
  }
  return text + "]";
}

std::size_t sample_bytes(const TensorSpec& spec) {
  return spec.shape[0] == 0 ? 0 : spec.bytes() / static_cast<std::size_t>(spec.shape[0]);
}

// Samples [first, first + count) of a tensor.
Tensor slice(const Tensor& whole, SampleRange range) {
  Tensor part = whole;
  part.data =
      whole.as<std::byte>() + static_cast<std::size_t>(range.first) * sample_bytes(whole.spec);
  part.spec = with_samples(whole.spec, range.count);
  return part;
}

// Of one sample.
void require_specs(const char* who, const char* what, const std::vector<TensorSpec>& theirs,
                   const std::vector<TensorSpec>& needed) {
  if (theirs.size() != needed.size()) {
    throw_usage("{} has {} {}s a sample, {} are needed", who, theirs.size(), what, needed.size());
  }
  for (std::size_t i = 0; i < theirs.size(); ++i) {
    if (theirs[i] == with_samples(needed[i], 1)) continue;
    throw_usage("{} {} of {} is {}, but {} is needed", what, i, who, describe(theirs[i]),
                describe(needed[i]));
  }
}

template <typename... Args>
[[noreturn]] void refuse(ErrorCode code, int rank, fmt::format_string<Args...> text,
                         Args&&... args) {
  throw Refused{Error(code, fmt::format(text, std::forward<Args>(args)...), rank)};
}

class BatchShapes final : public DataSource {
 public:
  explicit BatchShapes(BatchSpec spec) : spec_(std::move(spec)) {}
  [[nodiscard]] std::vector<TensorSpec> input_specs(std::int64_t samples) const override {
    return batches_of(spec_.inputs, samples);
  }
  [[nodiscard]] std::vector<TensorSpec> target_specs(std::int64_t samples) const override {
    return batches_of(spec_.targets, samples);
  }
  [[nodiscard]] int position_dimension() const override { return spec_.position_dimension; }
  void inputs(Phase, std::uint64_t, SampleRange, std::span<const Tensor>) const override {
    refuse_to_read();
  }
  void targets(Phase, std::uint64_t, SampleRange, std::span<const Tensor>) const override {
    refuse_to_read();
  }

 private:
  [[noreturn]] static void refuse_to_read() {
    throw_usage("this pipeline was made from a BatchSpec and has no source: pass a batch");
  }

  BatchSpec spec_;
};

}  // namespace

std::unique_ptr<DataSource> make_batch_shapes(const BatchSpec& spec) {
  if (spec.inputs.empty()) throw_usage("a BatchSpec without inputs; at least one is needed");
  for (const std::vector<TensorSpec>* list : {&spec.inputs, &spec.targets}) {
    for (const TensorSpec& one : *list) {
      if (one.shape.rank() < Shape::kMaxDims) continue;
      throw_usage(
          "a sample of {} dimensions in a BatchSpec; at most {} are legal, and dimension 0 "
          "of a batch is added",
          one.shape.rank(), Shape::kMaxDims - 1);
    }
  }
  return std::make_unique<BatchShapes>(spec);
}

std::string to_text(const BatchSpec& spec) {
  std::string text = spec.feed == Feed::kRank0 ? "from rank 0" : "where used";
  for (const TensorSpec& one : spec.inputs) text += fmt::format(", input {}", to_string(one));
  for (const TensorSpec& one : spec.targets) text += fmt::format(", target {}", to_string(one));
  if (spec.position_dimension != 0) text += fmt::format(", positions {}", spec.position_dimension);
  return text;
}

BatchFeed::BatchFeed(JobContext& job, const JobLayout& layout, const DataSource& shapes, Feed feed)
    : job_(job),
      layout_(layout),
      feed_(feed),
      first_(layout.owns(0)),
      last_(layout.owns(layout.plans.num_stages() - 1)),
      one_input_(shapes.input_specs(1)),
      one_target_(shapes.target_specs(1)),
      dimension_(shapes.position_dimension()),
      headers_(at(job.world.ranks->size())),
      shares_(at(layout.place.virtual_replicas())) {
  received_.resize(one_input_.size() + one_target_.size());
}

UnitShape BatchFeed::shape_of(std::span<const Tensor> tensors, bool targets, bool fewer) const {
  const std::vector<TensorSpec>& ones = targets ? one_target_ : one_input_;
  const char* what = targets ? "target" : "input";
  if (tensors.size() != ones.size()) {
    throw_usage("{} {}s are given, {} are needed", tensors.size(), what, ones.size());
  }
  const int dimension = fewer ? dimension_ : 0;
  UnitShape shape{.samples = ones.empty() ? kAnyNumber : 0};
  for (std::size_t i = 0; i < ones.size(); ++i) {
    const TensorSpec& spec = tensors[i].spec;
    const bool counts = dimension > 0 && dimension < spec.shape.rank();
    const std::int64_t positions = counts ? spec.shape[dimension] : 0;
    const std::int64_t whole = dimension > 0 ? ones[i].shape[dimension] : 0;
    if (spec.shape.rank() == 0 || (counts && positions < 1) || positions > whole ||
        with_shape(spec, {1, whole}, dimension) != with_samples(ones[i], 1)) {
      throw_usage("{} {} is {}, but {} is needed", what, i, to_string(spec),
                  describe(ones[i], dimension));
    }
    if (i == 0) shape = {spec.shape[0], positions == whole ? 0 : positions};
    if (spec.shape[0] != shape.samples) {
      throw_usage("{} {} has {} samples, {} 0 has {}", what, i, spec.shape[0], what, shape.samples);
    }
    if (spec != with_shape(ones[i], shape, dimension)) {
      throw_usage("{} {} has {} positions, {} 0 has {}", what, i, positions, what,
                  tensors[0].spec.shape[dimension]);
    }
    if (tensors[i].data == nullptr && spec.bytes() > 0) {
      throw_usage("{} {} is {} without data", what, i, to_string(spec));
    }
    if (reinterpret_cast<std::uintptr_t>(tensors[i].data) % size_of(spec.dtype) != 0) {
      throw_usage("the data of {} {} are not aligned to their type {}", what, i,
                  sluice::name_of(spec.dtype));
    }
  }
  return shape;
}

BatchShare BatchFeed::passed() const {
  if (feed_ == Feed::kRank0) {
    const bool all = job_.world.ranks->rank() == 0;
    return {.inputs = all, .targets = all};
  }
  const int count = layout_.place.shares;
  return {.replica = layout_.place.here.replica * count,
          .replicas = layout_.place.virtual_replicas(),
          .count = count,
          .inputs = first_,
          .targets = last_};
}

void BatchFeed::require_items(const BatchSpec& items) const {
  require_specs("the data set", "input", batches_of(items.inputs, 1), one_input_);
  require_specs("the data set", "target", batches_of(items.targets, 1), one_target_);
}

void BatchFeed::require_like(const DataSource& other) const {
  require_specs("the source", "input",
                calling("the source, input_specs()", [&] { return other.input_specs(1); }),
                one_input_);
  require_specs("the source", "target",
                calling("the source, target_specs()", [&] { return other.target_specs(1); }),
                one_target_);
}

void BatchFeed::count_samples(const Asked& asked, Header& header) const {
  if (!has_batch(asked.call)) return;
  const bool whole = feed_ == Feed::kRank0;
  const bool here = whole && job_.world.ranks->rank() == 0;
  calling(name_of(asked.call), [&] {
    const bool fewer = asked.call == Call::kInfer;
    if (whole ? here : first_) header.inputs = shape_of(asked.batch->inputs, false, fewer);
    if (has_targets(asked.call) && (whole ? here : last_)) {
      header.targets = shape_of(asked.batch->targets, true, false).samples;
    }
    if (whole || layout_.place.topology.size.tensor == 1) return;
    if (first_) header.inputs_checksum = checksum_of(asked.batch->inputs);
    if (last_ && has_targets(asked.call)) {
      header.targets_checksum = checksum_of(asked.batch->targets);
    }
  });
}

void BatchFeed::agree(const Asked& asked, const std::function<void()>& check) {
  Header mine{.call = static_cast<std::int32_t>(asked.call),
              .step = asked.step,
              .argument = asked.argument};
  const auto look = [&] {
    if (check) check();
    count_samples(asked, mine);
  };
  const std::optional<Error> fault = error_of(std::cref(look));  // allocates nothing
  if (fault) mine.fault = 1 + static_cast<std::int32_t>(fault->code());
  if (asked.targets != nullptr) mine.counted = *asked.targets;
  job_.world.collectives->all_gather(mine, headers_);
  for (std::size_t rank = 0; rank < headers_.size(); ++rank) {
    if (headers_[rank].fault == 0) continue;
    const int from = static_cast<int>(rank);
    throw Refused{Error(static_cast<ErrorCode>(headers_[rank].fault - 1),
                        job_.world.collectives->broadcast_string(fault ? fault->what() : "", from),
                        from)};
  }
  compare_calls(asked.call);
  if (has_batch(asked.call)) compare_samples(asked.call);
}

void BatchFeed::compare_calls(Call call) const {
  const Header& first = headers_[0];
  for (std::size_t rank = 1; rank < headers_.size(); ++rank) {
    const Header& other = headers_[rank];
    const int from = static_cast<int>(rank);
    if (other.call != first.call) {
      refuse(ErrorCode::kMismatch, from, "ranks make different calls: rank 0 {}, rank {} {}",
             name_of(static_cast<Call>(first.call)), rank, name_of(static_cast<Call>(other.call)));
    }
    if (counts_on(call) && other.step != first.step) {
      refuse(ErrorCode::kMismatch, from,
             "{} after a different number of steps: rank 0 has {}, rank {} has {}; set_step() "
             "takes the same number on all ranks",
             name_of(call), first.step, rank, other.step);
    }
    if (other.argument != first.argument) {
      refuse(ErrorCode::kUsage, from, "{}: rank 0 passes {}, rank {} passes {}", name_of(call),
             first.argument, rank, other.argument);
    }
  }
}

int BatchFeed::passer(int pipeline, int replica, int tensor) const {
  if (feed_ == Feed::kRank0) return 0;
  return layout_.place.topology.rank_of(
      {.pipeline = pipeline, .replica = replica, .tensor = tensor});
}

void BatchFeed::compare_passed(Call call, int replica, int tensor) const {
  const int first = passer(layout_.plans.first_rank(), replica, tensor);
  const int last = passer(layout_.plans.last_rank(), replica, tensor);
  const auto [samples, positions] = headers_[at(first)].inputs;
  const std::int64_t of_targets = headers_[at(last)].targets;
  if (has_targets(call) && of_targets != kAnyNumber && of_targets != samples) {
    refuse(ErrorCode::kUsage, last,
           "{}: rank {} passes inputs of {} samples, rank {} targets of {}", name_of(call), first,
           samples, last, of_targets);
  }
  if (positions != positions_) {
    const auto given = [&](std::int64_t some) {
      return some > 0 ? some : one_input_[0].shape[dimension_];
    };
    refuse(ErrorCode::kUsage, first, "{}: rank {} passes {} positions, rank {} passes {}",
           name_of(call), passer(layout_.plans.first_rank(), 0, 0), given(positions_), first,
           given(positions));
  }
  const int other = passer(layout_.plans.first_rank(), replica, 0);
  const std::int64_t of_other = headers_[at(other)].inputs.samples;
  if (samples != of_other) {
    refuse(ErrorCode::kUsage, first,
           "{}: rank {} passes inputs of {} samples, rank {} of {}; ranks that share a stage pass "
           "the same batch",
           name_of(call), other, of_other, first, samples);
  }
  const auto compare = [&](int one, int two, auto checksum, const char* what) {
    if (headers_[at(one)].*checksum == headers_[at(two)].*checksum) return;
    refuse(ErrorCode::kUsage, two,
           "{}: ranks {} and {} pass {} of other values; ranks that share a stage pass the same "
           "batch",
           name_of(call), one, two, what);
  };
  compare(other, first, &Header::inputs_checksum, "inputs");
  compare(passer(layout_.plans.last_rank(), replica, 0), last, &Header::targets_checksum,
          "targets");
}

void BatchFeed::compare_samples(Call call) {
  const Topology& topology = layout_.place.topology;
  const bool whole = feed_ == Feed::kRank0;
  positions_ = headers_[at(passer(layout_.plans.first_rank(), 0, 0))].inputs.positions;
  for (int r = 0; r < topology.size.replica; ++r) {
    for (int t = 0; t < topology.size.tensor; ++t) compare_passed(call, r, t);
    const int first = passer(layout_.plans.first_rank(), r, 0);
    const std::int64_t samples = headers_[at(first)].inputs.samples;
    const int count = layout_.place.shares, before = r * count;
    for (int v = before; v < before + count; ++v) {
      shares_[at(v)] = whole ? share_of(samples, layout_.place.virtual_replicas(), v).count
                             : share_of(samples, count, v - before).count;
    }
  }
  if (std::accumulate(shares_.begin(), shares_.end(), std::int64_t{0}) == 0) {
    refuse(ErrorCode::kUsage, 0, "{}: the batch has no sample", name_of(call));
  }
  for (std::size_t v = 0; v < shares_.size(); ++v) {
    if (shares_[v] > 0 || !trains(call)) continue;
    refuse(ErrorCode::kUsage, 0, "{}: {} {} gets no sample; each needs at least 1", name_of(call),
           layout_.place.name_of_part(), v);
  }
}

SampleRange BatchFeed::share(int number) const {
  const auto place = shares_.begin() + number;
  return {std::accumulate(shares_.begin(), place, std::int64_t{0}), *place};
}

std::int64_t BatchFeed::largest_share() const {
  std::int64_t most = 0;
  for (int r = 0; r < layout_.place.topology.size.replica; ++r) {
    most = std::max(most, share_of_replica(r).count);
  }
  return most;
}

SampleRange BatchFeed::share_of_replica(int replica) const {
  const auto first = shares_.begin() + std::ptrdiff_t{replica} * layout_.place.shares;
  return {std::accumulate(shares_.begin(), first, std::int64_t{0}),
          std::accumulate(first, first + layout_.place.shares, std::int64_t{0})};
}

double BatchFeed::targets() {
  counted_.clear();
  for (int r = 0; r < layout_.place.topology.size.replica; ++r) {
    const Place place = {.pipeline = layout_.plans.last_rank(), .replica = r};
    counted_.push_back(headers_[at(layout_.place.topology.rank_of(place))].counted);
  }
  add_leaves(counted_.size(),
             [&](std::size_t to, std::size_t from) { counted_[to] += counted_[from]; });
  return counted_.front();
}

void BatchFeed::hand_share(const std::vector<Tensor>& whole, bool targets, SampleRange share,
                           int user) {
  const int me = job_.world.ranks->rank();
  if (me == user && me != 0) return receive_share(targets);
  if (me != 0) return;
  std::vector<Tensor>& mine = targets ? targets_ : inputs_;
  if (user == 0) mine.clear();
  for (const Tensor& tensor : whole) {
    const Tensor part = slice(tensor, share);
    if (user == 0) {
      mine.push_back(part);
    } else {
      job_.world.collectives->send(user, {part.as<const std::byte>(), part.spec.bytes()});
    }
  }
}

void BatchFeed::receive_share(bool targets) {
  const std::vector<TensorSpec>& ones = targets ? one_target_ : one_input_;
  std::vector<Tensor>& tensors = targets ? targets_ : inputs_;
  const std::size_t first = targets ? one_input_.size() : 0;
  tensors.resize(ones.size());
  for (std::size_t i = 0; i < ones.size(); ++i) {
    std::vector<std::byte>& memory = received_[first + i];
    const TensorSpec spec = with_shape(ones[i], {share().count, positions_}, dimension_);
    const std::size_t bytes = spec.bytes();
    if (memory.size() < bytes) memory.resize(bytes);
    tensors[i] = {memory.data(), spec};
    job_.world.collectives->recv(0, std::span(memory).first(bytes));
  }
}

void BatchFeed::distribute(const Batch& batch, bool targets) {
  if (!targets) targets_.clear();
  if (feed_ == Feed::kPerStage) {
    if (first_) inputs_ = batch.inputs;
    if (last_ && targets) targets_ = batch.targets;
    return;
  }
  const Topology& topology = layout_.place.topology;
  for (int r = 0; r < topology.size.replica; ++r) {
    const SampleRange share = share_of_replica(r);
    for (const bool of_targets : {false, true}) {
      if (of_targets && !targets) continue;
      Place user{.pipeline = of_targets ? layout_.plans.last_rank() : layout_.plans.first_rank(),
                 .replica = r};
      for (; user.tensor < topology.size.tensor; ++user.tensor) {
        hand_share(of_targets ? batch.targets : batch.inputs, of_targets, share,
                   topology.rank_of(user));
      }
    }
  }
}

const BatchLoader::Batch& BatchFeed::cut(std::span<const SampleRange> micro_batches,
                                         std::int64_t first) {
  if (batch_.inputs.size() < micro_batches.size()) {
    batch_.inputs.resize(micro_batches.size());
    batch_.targets.resize(micro_batches.size());
  }
  const auto cut_one = [](const std::vector<Tensor>& share, SampleRange range,
                          std::vector<Tensor>& into) {
    into.resize(share.size());
    for (std::size_t i = 0; i < share.size(); ++i) into[i] = slice(share[i], range);
  };
  for (std::size_t m = 0; m < micro_batches.size(); ++m) {
    const SampleRange range{micro_batches[m].first - first, micro_batches[m].count};
    if (first_) cut_one(inputs_, range, batch_.inputs[m]);
    if (last_) cut_one(targets_, range, batch_.targets[m]);
  }
  return batch_;
}

}  // namespace sluice
