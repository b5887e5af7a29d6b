// Small trainings under any layout, and their outcomes, for comparisons to the bit.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <sluice/pipeline.hpp>
#include <sluice/transformer.hpp>

#include "comm/group/communicator.hpp"

namespace sluice::testing {

struct TrainingCase {
  std::string name;
  TransformerConfig model;
  int micro_batches = 3;
  std::int64_t micro_batch_size = 2;
  std::int64_t batch_size = 0;  // 0: all micro-batches full
  int steps = 3, threads = 1;
  double clip = 0.5;
  DType moments = DType::kF32;
  std::function<void(Pipeline&)> before_step = {};
};

struct Layout {
  int pipeline = 1, replicas = 1;
  int virtual_replicas = 0;  // 0: as many as replicas
  int tensor_shards = 0;     // 0: one
  std::string schedule = "1f1b";
  RankOrder order = RankOrder::kPipelineFirst;
  int chunks = 1;
  std::shared_ptr<const Schedule> own = nullptr;  // in place of schedule and chunks
  std::string devices = "cpu";                    // as --device
  TransportChoice transport = TransportChoice::kAuto;
  bool all_reduce = false;
  bool cuda_graphs = false;
  PipelineOptions::Offload offload = {};
  std::size_t bucket_bytes = std::size_t{25} << 20;
};

struct TrainingOutcome {
  std::vector<double> losses, norms;
  double validation = 0;
  std::string digest;  // over every parameter, by name
  std::vector<int> peaks;
  friend bool operator==(const TrainingOutcome& a, const TrainingOutcome& b) {
    return a.losses == b.losses && a.norms == b.norms && a.validation == b.validation &&
           a.digest == b.digest;
  }
};

// gpt2, two blocks, width 32: everything small, nothing special.
[[nodiscard]] TransformerConfig small_model();
// Of small_model().
[[nodiscard]] TrainingCase named(const std::string& name);

// Tokens that are a function of seed, step, sample and position.
[[nodiscard]] std::unique_ptr<DataSource> synthetic_tokens(const TransformerConfig& model);

// Collective over `comm` of layout.pipeline * layout.replicas ranks; the outcome is on every rank,
// but for peaks (rank 0).
[[nodiscard]] TrainingOutcome train(Communicator& comm, const TrainingCase& what,
                                    const Layout& layout);

// Runs train() over the first pipeline * replicas ranks of `world`; the outcome on every rank of
// `world` that took part.
void train_on_some(Communicator& world, const TrainingCase& what, const Layout& layout,
                   const std::function<void(const TrainingOutcome&)>& check);

// Runs `body` over a communicator of `ranks` ranks: threads, or, where a test is built with
// SLUICE_UNDER_MPI, the job's own, where every other count is left to another job.
void with_ranks(int ranks, const std::function<void(Communicator&)>& body);

// What rank 0 gets by training alone, while the others go on to their first wait.
[[nodiscard]] TrainingOutcome alone(Communicator& comm, const TrainingCase& what,
                                    const Layout& layout = {});

// On rank 0, which alone knows what to expect: all but the peaks. `where` names the place.
void expect_same(Communicator& comm, const std::string& where, const TrainingOutcome& expected,
                 const TrainingOutcome& actual);

// Between two steps: makes every stale gradient of this rank NaN, and returns how many there are.
// All elements of the others are zero, else the test fails.
std::size_t spoil_old_gradients(Pipeline& pipeline);

// SHA-256 over names and values of every parameter.
[[nodiscard]] std::string digest_of(Pipeline& pipeline);

}  // namespace sluice::testing
