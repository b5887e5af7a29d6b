// All stages of a transformer in one process, called by hand in pipeline order: what the runtime
// does, without schedule or messages. Every buffer a stage must overwrite starts as NaN.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <sluice/transformer.hpp>

#include "tests/stages/state_slot.hpp"

namespace sluice::testing {

// One micro-batch's data.
struct MicroBatch {
  std::int64_t first_sample = 0, samples = 1, sequence = 1;
  std::vector<std::int32_t> tokens, targets;
};

// Tokens and targets that depend on the sample's number in the global batch; every seventh target
// does not count.
[[nodiscard]] MicroBatch make_micro_batch(const TransformerConfig& config,
                                          std::int64_t first_sample, std::int64_t samples,
                                          std::int64_t sequence);

struct LocalLoss {
  double sum = 0, weight = 0;
};

class LocalPipeline {
 public:
  struct Options {
    bool split_backward = true;
    Phase phase = Phase::kTrain;
    double loss_scale = 1;
    int threads = 1;
    Device device = {};
    bool recomputes_first = false;  // by recompute(), before each B or I
  };
  // Slot i serves micro-batch i.
  LocalPipeline(const TransformerConfig& config, const Partition& partition,
                std::vector<MicroBatch> micro_batches, const Options& options);
  LocalPipeline(const TransformerConfig& config, const Partition& partition,
                std::vector<MicroBatch> micro_batches)
      : LocalPipeline(config, partition, std::move(micro_batches), Options{}) {}

  void forward(int micro_batch);  // through all stages, and the loss
  void backward(int micro_batch);
  void backward_input(int micro_batch);
  void backward_weight(int micro_batch);
  // Forward and backward of every micro-batch, one after the other.
  void step();

  [[nodiscard]] const std::vector<LocalLoss>& losses() const { return losses_; }
  [[nodiscard]] double loss_sum() const;
  // Outputs of the last stage as forward left them, before the loss.
  [[nodiscard]] const std::vector<float>& logits(int micro_batch) const {
    return logits_[static_cast<size_t>(micro_batch)];
  }
  // Gradients by name, the uses of a tied one summed in stage order.
  [[nodiscard]] std::map<std::string, std::vector<float>> grads() const;
  // Calls for every use.
  void for_each_parameter(const std::function<void(Parameter&)>& visit);
  void mark_values_changed();
  [[nodiscard]] ComputeContext& compute() { return compute_; }
  [[nodiscard]] Stage& stage(int index) { return *stages_[static_cast<size_t>(index)]; }

 private:
  struct Edge {
    Edge() = default;
    Edge(Device device, const TensorSpec& spec_in, const void* values = nullptr);
    Buffer memory;
    TensorSpec spec;
    [[nodiscard]] Tensor tensor() { return {memory.data(), spec}; }
    void poison();
  };
  struct InFlight {
    std::vector<Edge> activations;  // [stage]: its input; one more for the logits
    std::vector<Edge> gradients;    // [stage]: of its input
    Edge targets;
    Tensor input;
    std::vector<StateSlot> states;  // [stage]
    HostBuffer sum;                 // of the loss
  };
  [[nodiscard]] std::vector<float> floats_of(const Tensor& tensor) const;
  void make_edges(const MicroBatch& batch, InFlight& flight);
  StageContext context(int stage, int micro_batch);
  void each_stage_back(int micro_batch,
                       const std::function<void(Stage&, StageContext&, std::span<const Tensor>,
                                                std::span<const Tensor>)>& call,
                       bool begins = true);

  Options options_;
  std::vector<MicroBatch> micro_batches_;
  ComputeContext compute_;
  std::vector<std::unique_ptr<Stage>> stages_;
  std::vector<InFlight> flights_;
  std::vector<LocalLoss> losses_;
  std::vector<std::vector<float>> logits_;
};

}  // namespace sluice::testing
