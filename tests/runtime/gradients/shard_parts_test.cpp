// A program's stage of four shards on one, two and four ranks: parameters in parts of shards, and
// shares of a gradient. All numbers, and all saves, have the bits of one rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include <sluice/checkpoint.hpp>
#include <sluice/parameter.hpp>
#include <sluice/pipeline.hpp>

#include "comm/base/index.hpp"
#include "comm/base/sum_tree.hpp"
#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/checkpoint/saved_tensors.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice::testing {
namespace {

namespace fs = std::filesystem;

// A shard's columns of "down" are several blocks of sums; one shard has no row of "few".
constexpr int kShards = 4, kIn = 6, kHidden = 91, kOut = 900, kFew = 3, kSamples = 8;

// y = gain * (down (tanh(up x + bias) * (gate x)) + few x) + last, whose sums over hidden numbers
// are made by shards: of "up_gate" a shard has rows of up and then of gate. "check" gets the
// gradient of "gain" without shares, and is otherwise unused.
class ShardedStage : public Stage, public LossStage {
 public:
  explicit ShardedStage(const StagePlace& place) : shards_(place.shards_here()) {
    std::vector<SlicePart> up_gate, bias, down, few;
    for (int s = shards_.first; s < shards_.first + shards_.local; ++s) {
      const auto rows = [&](int axis, std::int64_t begin, std::int64_t units, std::int64_t whole) {
        return SlicePart{{.axis = axis,
                          .begin = begin + shards_.begin(s, units),
                          .length = shards_.begin(s + 1, units) - shards_.begin(s, units),
                          .whole = whole},
                         s};
      };
      up_gate.push_back(rows(0, 0, kHidden, 2 * kHidden));
      up_gate.push_back(rows(0, kHidden, kHidden, 2 * kHidden));
      bias.push_back(rows(0, 0, kHidden, kHidden));
      down.push_back(rows(1, 0, kHidden, kHidden));
      few.push_back(rows(0, 0, kFew, kFew));
    }
    const auto add = [&](const char* name, const Shape& shape, std::vector<SlicePart> parts) {
      return &set_.add_parts(name, shape, Init::uniform(0.2), true, false, std::move(parts));
    };
    up_gate_ = add("up_gate", {2 * kHidden, kIn}, up_gate);
    bias_ = add("bias", {kHidden}, bias);
    down_ = add("down", {kOut, kHidden}, down);
    few_ = add("few", {kFew, kIn}, few);
    gain_ = &set_.add("gain", {kOut}, Init::normal(1));
    last_ = &set_.add("last", {kOut}, Init::uniform(0.1));
    gain_->shares = shards_.local;
    check_ = &set_.add("check", {kOut}, Init::constant(0));
  }
  ParameterSet* parameters() override { return &set_; }
  StageDescription describe(std::span<const TensorSpec> in, ComputeContext&) const override {
    StageDescription description{.outputs = {{DType::kF32, {in[0].shape[0], kOut}}}};
    const PlannedCollective sum{.bytes = at(in[0].shape[0] * kOut) * sizeof(float)};
    if (shards_.local < shards_.count) description.collectives.forward = {sum};
    return description;
  }
  void forward(StageContext& ctx, std::span<const Tensor> in,
               std::span<const Tensor> out) override {
    const std::vector<float> sums = partial_sums(in[0]);
    std::vector<std::vector<float>> tree = split(sums);
    add_leaves(tree.size(), [&](std::size_t into, std::size_t from) {
      for (std::size_t i = 0; i < tree[into].size(); ++i) tree[into][i] += tree[from][i];
    });
    if (shards_.local < shards_.count) ctx.tensor->sum(std::span(tree[0]));
    sums_ = tree[0];
    for (std::int64_t i = 0; i < out[0].elements(); ++i) {
      out[0].at(i) = gain_->value.at(i % kOut) * tree[0][at(i)] + last_->value.at(i % kOut);
    }
  }
  void backward(StageContext& ctx, std::span<const Tensor> grad, std::span<const Tensor>) override {
    const Tensor &x = ctx.inputs[0], &dy = grad[0];
    const std::vector<std::vector<float>> sums = split(partial_sums(x));
    for (std::int64_t i = 0; i < dy.elements(); ++i) {
      last_->grad.at(i % kOut) += dy.at(i);
      check_->grad.at(i % kOut) += dy.at(i) * sums_[at(i)];
    }
    for (int s = 0; s < shards_.local; ++s) {
      for (std::int64_t i = 0; i < dy.elements(); ++i) {
        gain_->share_grads[at(s)].at(i % kOut) += dy.at(i) * sums[at(s)][at(i)];
      }
      const Panels of = panels(s);
      for (std::int64_t sample = 0; sample < x.shape()[0]; ++sample) {
        for (std::int64_t k = 0; k < of.rows; ++k) {
          const Hidden h = hidden(of, x, sample, k);
          float product = 0;
          for (std::int64_t o = 0; o < kOut; ++o) {
            const float d = dy.at(sample * kOut + o) * gain_->value.at(o);
            down_->grad.at(of.down + o * of.rows + k) += d * h.up * h.gate;
            product += d * down_->value.at(of.down + o * of.rows + k);
          }
          const float up = product * h.gate * (1 - h.up * h.up), gate = product * h.up;
          bias_->grad.at(of.bias + k) += up;
          for (std::int64_t c = 0; c < kIn; ++c) {
            up_gate_->grad.at(of.up_gate + k * kIn + c) += up * x.at(sample * kIn + c);
            up_gate_->grad.at(of.up_gate + (of.rows + k) * kIn + c) +=
                gate * x.at(sample * kIn + c);
          }
        }
        for (std::int64_t r = 0; r < of.few_rows; ++r) {
          for (std::int64_t o = 0; o < kOut; ++o) {
            few_->grad.at(of.few + r * kIn + o % kIn) +=
                dy.at(sample * kOut + o) * gain_->value.at(o) * x.at(sample * kIn + o % kIn);
          }
        }
      }
    }
  }
  void loss(StageContext& ctx, std::span<const Tensor> y, std::span<const Tensor> target,
            double* sum) override {
    *sum = 0;
    for (std::int64_t i = 0; i < y[0].elements(); ++i) {
      y[0].at(i) -= target[0].at(i);
      *sum += std::pow(y[0].at(i), 2.0);
      y[0].at(i) *= static_cast<float>(2 * ctx.loss_scale);
    }
  }
  [[nodiscard]] double target_weight(std::span<const Tensor> target) const override {
    return static_cast<double>(target[0].elements());
  }

 private:
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
  // Where a shard's parts begin in this rank's memory.
  struct Panels {
    std::int64_t rows = 0, few_rows = 0;
    std::int64_t up_gate = 0, bias = 0, down = 0, few = 0;
  };
  [[nodiscard]] Panels panels(int local) const {
    Panels of;
    for (int s = 0; s <= local; ++s) {
      of.up_gate += 2 * of.rows * kIn;
      of.bias += of.rows;
      of.down += of.rows * kOut;
      of.few += of.few_rows * kIn;
      of.rows = bias_->parts[at(s)].slice.length;
      of.few_rows = few_->parts[at(s)].slice.length;
    }
    return of;
  }
  struct Hidden {
    float up = 0, gate = 0;
  };
  [[nodiscard]] Hidden hidden(const Panels& of, const Tensor& x, std::int64_t sample,
                              std::int64_t k) const {
    Hidden h{bias_->value.at(of.bias + k), 0};
    for (std::int64_t c = 0; c < kIn; ++c) {
      h.up += up_gate_->value.at(of.up_gate + k * kIn + c) * x.at(sample * kIn + c);
      h.gate += up_gate_->value.at(of.up_gate + (of.rows + k) * kIn + c) * x.at(sample * kIn + c);
    }
    h.up = std::tanh(h.up);
    return h;
  }
  // [local shard][sample][output]
  [[nodiscard]] std::vector<float> partial_sums(const Tensor& x) const {
    std::vector<float> sums(at(shards_.local * x.shape()[0] * kOut));
    float* sum = sums.data();
    for (int s = 0; s < shards_.local; ++s) {
      const Panels of = panels(s);
      for (std::int64_t sample = 0; sample < x.shape()[0]; ++sample, sum += kOut) {
        for (std::int64_t k = 0; k < of.rows; ++k) {
          const Hidden h = hidden(of, x, sample, k);
          for (std::int64_t o = 0; o < kOut; ++o) {
            sum[o] += down_->value.at(of.down + o * of.rows + k) * h.up * h.gate;
          }
        }
        for (std::int64_t r = 0; r < of.few_rows; ++r) {
          for (std::int64_t o = 0; o < kOut; ++o) {
            sum[o] += few_->value.at(of.few + r * kIn + o % kIn) * x.at(sample * kIn + o % kIn);
          }
        }
      }
    }
    return sums;
  }
  [[nodiscard]] std::vector<std::vector<float>> split(const std::vector<float>& sums) const {
    std::vector<std::vector<float>> all;
    const auto each = static_cast<std::ptrdiff_t>(sums.size()) / shards_.local;
    for (auto from = sums.begin(); from != sums.end(); from += each) {
      all.emplace_back(from, from + each);
    }
    return all;
  }

  Shards shards_;
  ParameterSet set_;
  Parameter *up_gate_, *bias_, *down_, *few_, *gain_, *last_, *check_;
  std::vector<float> sums_;  // of the last forward
};

struct ShardGrid {
  int tensor = 1, replicas = 1, virtual_replicas = 0;
  ShardLevel shard = ShardLevel::kNone;
  OptimizerConfig optimizer = {.weight_decay = 0.1F, .moments = DType::kBf16};
  double clip = 0.05, rate = 1e-2;
};

// What all ranks have to agree about, with all bits.
struct Trained {
  std::vector<double> losses, norms;
  std::map<std::string, std::vector<std::byte>> values;
  bool operator==(const Trained&) const = default;
};

class ShardPartsTest : public ::testing::Test {
 protected:
  static void run(const ShardGrid& grid,
                  const std::function<void(Pipeline&, Communicator&)>& body) {
    run_loopback(grid.tensor * grid.replicas, [&](Communicator& comm) {
      PipelineOptions options;
      const int parts = grid.virtual_replicas > 0 ? grid.virtual_replicas : grid.replicas;
      options.shape = {.pipeline = 1,
                       .replicas = grid.replicas,
                       .virtual_replicas = grid.virtual_replicas,
                       .tensor = grid.tensor,
                       .micro_batches = kSamples / parts,
                       .shard = grid.shard};
      options.training.optimizer = grid.optimizer;
      options.training.learning_rate = {.peak = grid.rate};
      options.training.clip = grid.clip;
      options.checks.replicas_every = 1;
      const BatchSpec spec{.inputs = {{DType::kF32, {kIn}}},
                           .targets = {{DType::kF32, {kOut}}},
                           .feed = Feed::kRank0};
      const StageFactory make = [](const StagePlace& place) {
        StagePlace of_shards = place;
        of_shards.shards = kShards;
        return std::make_unique<ShardedStage>(of_shards);
      };
      Pipeline pipeline(comm, make, spec, options);
      body(pipeline, comm);
    });
  }
  // Calls `step` with a batch of numbers that depend on `seed`.
  template <typename Step>
  static void with_batch(Communicator& comm, int seed, const Step& step) {
    std::vector<float> x(at(kSamples * kIn)), y(at(kSamples * kOut));
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] = std::sin(static_cast<float>(i) + static_cast<float>(seed));
    for (std::size_t i = 0; i < y.size(); ++i) y[i] = std::cos(static_cast<float>(i) * 0.3F);
    if (seed < 0) y[7] = std::numeric_limits<float>::infinity();
    Batch batch;
    if (comm.rank() == 0) {
      batch = {.inputs = {view(x, {kSamples, kIn})}, .targets = {view(y, {kSamples, kOut})}};
    }
    step(batch);
  }
  static void train(Pipeline& pipeline, Communicator& comm, int steps, Trained* trained = nullptr) {
    Trained mine;
    for (int step = 0; step < steps; ++step) {
      with_batch(comm, static_cast<int>(pipeline.step()), [&](const Batch& batch) {
        const StepReport report = pipeline.train_step(batch);
        mine.losses.push_back(report.loss);
        mine.norms.push_back(report.grad_norm);
      });
    }
    for (const auto& [name, tensor] : pipeline.state()) {
      mine.values[name] = {tensor.bytes.begin(), tensor.bytes.end()};
    }
    if (trained != nullptr && comm.rank() == 0) *trained = mine;
  }
  static Trained trained(const ShardGrid& grid, int steps) {
    Trained result;
    run(grid,
        [&](Pipeline& pipeline, Communicator& comm) { train(pipeline, comm, steps, &result); });
    return result;
  }
  static void expect_equal(const Trained& one, const Trained& other) {
    EXPECT_EQ(one.losses, other.losses);
    EXPECT_EQ(one.norms, other.norms);
    ASSERT_EQ(one.values.size(), other.values.size());
    for (const auto& [name, bytes] : one.values) {
      EXPECT_TRUE(bytes == other.values.at(name)) << name;
    }
  }
  [[nodiscard]] fs::path saves(std::size_t number) const {
    return directory_.path() / std::to_string(number);
  }
  // Every tensor of a save by name, as f32.
  static std::map<std::string, std::vector<float>> saved(const fs::path& path) {
    const Save save = scan_saves(path).saves.at(0);
    SavedTensors tensors(save.directory, save.state);
    std::map<std::string, std::vector<float>> all;
    for (const char* kind : {"", "exp_avg.", "exp_avg_sq."}) {
      for (const char* name : {"up_gate", "bias", "down", "few", "gain", "last", "check"}) {
        std::vector<float>& values = all[std::string(kind) + name];
        const auto spec = tensors.find(std::string(kind) + name);
        if (!spec) {
          ADD_FAILURE() << kind << name;
          continue;
        }
        values.resize(static_cast<std::size_t>(spec->shape.elements()));
        tensors.read(std::string(kind) + name, values);
      }
    }
    return all;
  }

  TemporaryDirectory directory_;
};

TEST_F(ShardPartsTest, ATrainingHasTheSameBitsOnAnyNumberOfRanks) {
  for (const OptimizerConfig& optimizer :
       {OptimizerConfig{.weight_decay = 0.1F, .moments = DType::kBf16},
        OptimizerConfig::sgd(0.9F)}) {
    const Trained one = trained({.optimizer = optimizer}, 4);
    EXPECT_GT(one.norms[0], 0.1) << "it is clipped";
    EXPECT_LT(one.losses[3], one.losses[0]) << "it learns";
    for (const int tensor : {2, 4}) {
      SCOPED_TRACE(tensor);
      expect_equal(one, trained({.tensor = tensor, .optimizer = optimizer}, 4));
    }
    const Trained two = trained({.replicas = 2, .optimizer = optimizer}, 4);
    for (const int tensor : {1, 2, 4}) {
      for (const ShardLevel shard : {ShardLevel::kNone, ShardLevel::kOptimizer}) {
        SCOPED_TRACE(tensor);
        expect_equal(
            two,
            trained({.tensor = tensor, .replicas = 2, .shard = shard, .optimizer = optimizer}, 4));
      }
    }
  }
}

TEST_F(ShardPartsTest, SharesAreJoinedForEachVirtualReplica) {
  const Trained four = trained({.replicas = 4}, 3);
  for (const int tensor : {1, 2, 4}) {
    for (const int replicas : {1, 2, 4}) {
      SCOPED_TRACE(tensor * 10 + replicas);
      expect_equal(four,
                   trained({.tensor = tensor, .replicas = replicas, .virtual_replicas = 4}, 3));
    }
  }
}

TEST_F(ShardPartsTest, BatchesOfAStepAndARefusedStepLeaveNothingBehind) {
  std::vector<Trained> all;
  for (const int tensor : {1, 1, 2, 4}) {
    const bool refused = !all.empty();
    Trained& result = all.emplace_back();
    run({.tensor = tensor}, [&](Pipeline& pipeline, Communicator& comm) {
      train(pipeline, comm, 1);
      if (refused) {
        with_batch(comm, -1, [&](const Batch& batch) {
          expect_error(ErrorCode::kNumeric, {"not finite"},
                       [&] { (void)pipeline.train_step(batch); });
        });
      }
      with_batch(comm, 5, [&](const Batch& batch) { (void)pipeline.accumulate(batch); });
      train(pipeline, comm, 2, &result);
    });
    expect_equal(all.front(), result);
  }
}

// On the last of the ranks that share the stage, of each replica.
TEST_F(ShardPartsTest, AGainThatOneRankChangesIsNamed) {
  for (const ShardGrid& grid :
       {ShardGrid{.tensor = 2}, ShardGrid{.tensor = 4}, ShardGrid{.tensor = 2, .replicas = 2}}) {
    run(grid, [&](Pipeline& pipeline, Communicator& comm) {
      train(pipeline, comm, 1);
      for (const Pipeline::Owned& each : pipeline.parameters()) {
        const bool last = PipelineAccess::layout(pipeline).place.here.tensor == grid.tensor - 1;
        if (each.parameter->name == "gain" && last) each.parameter->value.at(3) += 1e-6F;
      }
      const std::string ranks =
          "between tensor rank 0 and tensor rank " + std::to_string(grid.tensor - 1);
      with_batch(comm, 5, [&](const Batch& batch) {
        expect_error(ErrorCode::kMismatch,
                     {"after step 2 parameter 'gain' of stage 0 differs " + ranks},
                     [&] { (void)pipeline.train_step(batch); });
      });
    });
  }
}

TEST_F(ShardPartsTest, JoinedSharesAreTheGradient) {
  const auto change = [](Pipeline& pipeline, const std::function<void()>& train) {
    std::map<std::string, std::vector<float>> changes;
    const auto add = [&](float sign) {
      for (const auto& [name, tensor] : pipeline.state()) {
        std::vector<float> values(tensor.bytes.size() / sizeof(float));
        std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
        std::vector<float>& sum = changes[name];
        sum.resize(values.size());
        for (std::size_t i = 0; i < values.size(); ++i) sum[i] += sign * values[i];
      }
    };
    add(-1);
    train();
    add(1);
    return changes;
  };
  for (const int tensor : {1, 2}) {
    for (const int virtual_replicas : {1, 4}) {
      const ShardGrid grid = {.tensor = tensor,
                              .virtual_replicas = virtual_replicas,
                              .optimizer = OptimizerConfig::sgd(),
                              .clip = 0,
                              .rate = 10};
      run(grid, [&](Pipeline& pipeline, Communicator& comm) {
        const auto changes = change(pipeline, [&] {
          if (virtual_replicas == 1) {
            with_batch(comm, 5, [&](const Batch& batch) { (void)pipeline.accumulate(batch); });
          }
          train(pipeline, comm, 1);
        });
        const std::vector<float>&gain = changes.at("gain"), &check = changes.at("check");
        float most = 0;
        for (std::size_t i = 0; i < gain.size(); ++i) {
          most = std::max(most, std::abs(gain[i]));
          EXPECT_NEAR(gain[i], check[i], 1e-6F + 1e-3F * std::abs(check[i])) << i;
        }
        EXPECT_GT(most, 1e-3F);
      });
    }
  }
}

TEST_F(ShardPartsTest, AnyLayoutGoesOnFromASaveOfAnyOther) {
  constexpr auto kDivided = ShardLevel::kOptimizer;
  const std::vector<ShardGrid> chain = {{.tensor = 1, .replicas = 2, .shard = kDivided},
                                        {.tensor = 4, .replicas = 1, .virtual_replicas = 2},
                                        {.tensor = 2, .replicas = 2, .shard = kDivided},
                                        {.tensor = 1, .replicas = 1, .virtual_replicas = 2},
                                        {.tensor = 4, .replicas = 2, .shard = kDivided},
                                        {.tensor = 2, .replicas = 1, .virtual_replicas = 2},
                                        {.tensor = 1, .replicas = 2, .shard = kDivided}};
  Trained next;
  for (std::size_t i = 0; i < chain.size(); ++i) {
    SCOPED_TRACE(i);
    Trained after;
    run(chain[i], [&](Pipeline& pipeline, Communicator& comm) {
      if (i == 0) train(pipeline, comm, 2);
      if (i > 0) {
        EXPECT_EQ(load_checkpoint(pipeline, saves(i - 1), Verify::kRead).step, 2U);
      }
      save_checkpoint(pipeline, {.directory = saves(i)});
      train(pipeline, comm, 2, &after);
    });
    EXPECT_EQ(saved(saves(i)), saved(saves(0)));
    if (i == 0) next = after;
    expect_equal(next, after);
  }
}

TEST_F(ShardPartsTest, ValuesOfAStateGoIntoAllParts) {
  std::map<std::string, HostTensor> values;
  run({.tensor = 2}, [&](Pipeline& pipeline, Communicator& comm) {
    train(pipeline, comm, 2);
    auto mine = pipeline.state();
    if (comm.rank() == 0) values = std::move(mine);
  });
  for (const int tensor : {1, 4}) {
    run({.tensor = tensor}, [&](Pipeline& pipeline, Communicator&) {
      pipeline.set_state(values);
      for (const auto& [name, tensor_now] : pipeline.state()) {
        EXPECT_TRUE(std::ranges::equal(tensor_now.bytes, values.at(name).bytes)) << name;
      }
    });
  }
}

TEST_F(ShardPartsTest, FilesOfOtherProgramsHoldThePartsTogether) {
  const FileLayout files = {{"up_gate", {{"up", kHidden}, {"gate", kHidden}}},
                            {"bias", {{"b", kHidden}}},
                            {"down", {{"down.weight", kOut, /*transposed=*/true}}},
                            {"few", {{"few", kFew}}},
                            {"gain", {{"gain", kOut}}},
                            {"last", {{"last", kOut}}},
                            {"check", {{"check", kOut}}}};
  for (const auto& [from, into] : {std::pair(1, 4), std::pair(2, 1), std::pair(4, 2)}) {
    Trained before, after;
    const fs::path path = saves(at(from));
    run({.tensor = from}, [&](Pipeline& pipeline, Communicator& comm) {
      train(pipeline, comm, 2);
      save_checkpoint(pipeline, {.directory = path, .weights_only = true, .layout = files});
      train(pipeline, comm, 0, &before);
    });
    run({.tensor = into}, [&](Pipeline& pipeline, Communicator& comm) {
      load_weights(pipeline, scan_saves(path).saves.at(0).directory, files);
      train(pipeline, comm, 0, &after);
    });
    expect_equal(before, after);
  }
}

TEST_F(ShardPartsTest, MemoryOfSharesIsPlanned) {
  for (const int tensor : {1, 2}) {
    run({.tensor = tensor}, [&](Pipeline& pipeline, Communicator& comm) {
      train(pipeline, comm, 1);
      const JobLayout& layout = PipelineAccess::layout(pipeline);
      const RankMemory& memory = layout.memory.of(layout.place.here);
      std::size_t values = 0;
      for (const ParameterEntry& each : layout.parameters.stages[0].parameters) {
        values += parameter_bytes(each.elements);
      }
      EXPECT_EQ(memory.gradients, values + at(kShards / tensor) * parameter_bytes(kOut));
      // The first rank has what the others send it first.
      const std::size_t held = PipelineAccess::collective_bytes(pipeline);
      EXPECT_EQ(comm.rank() == 0 ? held : std::max(held, memory.collectives), memory.collectives);
    });
  }
}

}  // namespace
}  // namespace sluice::testing
